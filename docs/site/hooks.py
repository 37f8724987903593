"""What the site has beside docs/: settings from the schema, cards of models, changelog; and links that lead out of it.

The pages of docs/ are written to be read in the repository, too. A link to a file that has no page here becomes its
name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from settings_pages import index, settings_page

from dcar.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
RANGE = re.compile(r"(?<=\d)–(?=\d)")  # of an interval, which no line shall divide
DATE = re.compile(r"^\| (\d{4})-(\d\d)-(\d\d) \|", re.M)  # nor a date in a table
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)


def pages() -> dict[str, str]:
    """Page of the site -> file of the repository, for what is outside of docs/."""
    cards = {f"cards/{card.parent.name}.md": card.relative_to(ROOT).as_posix()
             for card in sorted((ROOT / "dcar/assets").glob("*/README.md"))}
    return {**{name: name for name in TEXTS}, **cards}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation by what is listed nowhere else: log, cards, settings."""
    entries = sorted((p.name for p in (ROOT / "docs/log").glob("2*.md")), reverse=True)
    cards = [page for page in pages() if page.startswith("cards/")]
    config.nav = [
        *config.nav,
        {"Log": [{"Log of experiments": "log/README.md"}, {"Entries": [f"log/{name}" for name in entries]}]},
        {"Models": [{Path(page).stem.replace("_", " "): page} for page in cards]},
        {"Settings": [{"Settings": "settings.md"}, {"Commands": [{n: f"settings/{n}.md"} for n in COMMANDS]}]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for page, source in pages().items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for name in COMMANDS:
        files.append(File.generated(config, f"settings/{name}.md", content=settings_page(name)))
    files.append(File.generated(config, "extra.css", content=(Path(__file__).parent / "extra.css").read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links of the repository to pages of the site."""
    if page.file.src_uri == "settings.md":
        markdown += index()
    source = pages().get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = FENCE.split(markdown)
    for i in range(0, len(parts), 2):  # between the blocks of code
        led = LINK.sub(lambda found: _led(found, source, page), parts[i])
        parts[i] = RANGE.sub("\N{WORD JOINER}–\N{WORD JOINER}", DATE.sub("| <nobr>\\1-\\2-\\3</nobr> |", led))
    return "".join(parts)


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
