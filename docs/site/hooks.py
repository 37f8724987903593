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
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)


def pages() -> dict[str, str]:
    """Page of the site -> file of the repository, for what is outside of docs/."""
    cards = {f"cards/{card.parent.name}.md": card.relative_to(ROOT).as_posix()
             for card in sorted((ROOT / "dcar/assets").glob("*/README.md"))}
    return {**{name: name for name in TEXTS}, **cards}


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
    return "".join(part if part.startswith("```") else LINK.sub(lambda found: _led(found, source, page), part)
                   for part in FENCE.split(markdown))


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
