"""Pages of the site in addition to docs/: commands, settings and recipes from the code, model
cards, changelog.

The pages of docs/ can also be read in the repository. On the site, a link to a file without a page
becomes its name, a link to a sound becomes a player, and a formula becomes MathML.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from settings_pages import commands_page, page_of, recipes_page, settings_page

from dcar.cli import jobs

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
SOUND = re.compile(r"\[play\]\((audio/[\w-]+\.mp3)\)")
RANGE = re.compile(r"(?<=\d)–(?=\d)")  # a range, in which no line may break
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
FORMULA = re.compile(r'<(span|div) class="arithmatex">(\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.S)


def pages() -> dict[str, str]:
    """Return {page of the site: file of the repository} for the files outside of docs/."""
    cards = {
        f"cards/{card.parent.name}.md": card.relative_to(ROOT).as_posix()
        for card in sorted((ROOT / "dcar/assets").glob("*/README.md"))
    }
    return {**{name: name for name in TEXTS}, **cards}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages generated from the code to the navigation."""
    cards = [page for page in pages() if page.startswith("cards/")]
    settings = [{f"dcar {job}": page_of(job)} for job in jobs()]
    config.nav = [
        *config.nav,
        {
            "Reference": [
                {"Commands": "commands.md"},
                {"Recipes": "recipes.md"},
                {"Settings": settings},
                {"Models": [{Path(p).stem.replace("_", " "): p} for p in cards]},
            ]
        },
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    made = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in pages().items()}
    made |= {
        "commands.md": commands_page(),
        "recipes.md": recipes_page(),
        "extra.css": (Path(__file__).parent / "extra.css").read_text(encoding="utf-8"),
    }
    made |= {page_of(job): settings_page(job) for job in jobs()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links into the repository as links to pages of the site."""
    source = pages().get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = FENCE.split(markdown)
    for i in range(0, len(parts), 2):  # text between code blocks
        text = SOUND.sub(r'<audio controls preload="none" src="\1"></audio>', parts[i])
        parts[i] = RANGE.sub(
            "\N{WORD JOINER}–\N{WORD JOINER}", LINK.sub(lambda m: _led(m, source, page), text)
        )
    return "".join(parts)


def on_page_content(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace formulas by MathML, which browsers draw without a script."""
    return FORMULA.sub(lambda m: _formula(html.unescape(m[3]), m[1] == "div"), text)


def _formula(latex: str, block: bool) -> str:
    drawn = convert(latex.strip(), display="block" if block else "inline")
    return f'<div class="formula">{drawn}</div>' if block else drawn


def _led(found: re.Match, source: str, page: Page) -> str:
    text, target = found[1], found[2]
    path, _, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return found[0]
    meant = os.path.normpath(PurePosixPath(source).parent / path)
    there = {of: name for name, of in pages().items()}.get(meant)
    if there is None and meant.startswith("docs/") and not meant.startswith("docs/site/"):
        there = meant.removeprefix("docs/")
    if there is None:
        if not (ROOT / meant).exists() and not meant.startswith("docs"):
            return found[0]  # reported by mkdocs
        return text if text.startswith("`") else f"{text} (`{meant}`)"
    near = os.path.relpath(there, PurePosixPath(page.file.src_uri).parent)
    return f"[{text}]({near}{'#' + anchor if anchor else ''})"
