"""Building blocks of a page of results: sections of texts, tables, pictures and bars, which the
template renders.

Blocks hold plain data. Only `templates/page.html` contains HTML, and it escapes its input.
"""

import base64
import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcar.errors import DataError

MIME = {".opus": "audio/ogg", ".ogg": "audio/ogg", ".wav": "audio/wav", ".png": "image/png"}


def data_uri(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def file_uri(path: Path) -> str:
    """Return a file as a data URI. Raises DataError if it is missing."""
    try:
        return data_uri(path.read_bytes(), MIME[path.suffix])
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error}); run `dcar compare` again, it makes what is missing"
        ) from error


def slug(title: str) -> str:
    """Return a title as an anchor and file name: letters and digits of any script, joined by
    hyphens."""
    return "-".join(re.findall(r"[^\W_]+", title.lower()))


@dataclass(frozen=True)
class Picture:
    """Picture with its caption. One that would be too small on a phone is `wide`: it scrolls in
    a box there."""

    title: str
    source: str
    caption: str = ""
    wide: bool = True
    kind: str = "picture"


@dataclass(frozen=True)
class Bar:
    """Line of blocks (share of the width, colour, tooltip)."""

    label: str
    blocks: Sequence[tuple[float, str, str]]


@dataclass(frozen=True)
class Folded:
    """Blocks that are shown on request."""

    title: str
    blocks: Sequence[Any]
    kind: str = "folded"


@dataclass(frozen=True)
class Cell:
    """Text of a table's cell, with the class that colours it and a tooltip."""

    text: str
    look: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """Sortable table, also available as CSV. classes: one per row, or none; look: a class of the
    whole table."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    classes: Sequence[str] = ()
    look: str = "sortable"
    kind: str = "table"

    @property
    def name(self) -> str:
        return slug(self.title)

    @property
    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.head, *self.rows])
        return text.getvalue()

    @property
    def uri(self) -> str:
        return data_uri(self.csv.encode(), "text/csv")


@dataclass(frozen=True)
class Section:
    """Blocks under a heading, which the list of sections links to. A text is a paragraph of
    small print, a list of texts a list; the pictures of a tuple are placed side by side."""

    title: str
    blocks: Sequence[Any]

    @property
    def name(self) -> str:
        return slug(self.title)


def tables_of(blocks: Sequence[Any]) -> Iterator[Table]:
    """Return all tables among blocks, including nested ones."""
    for block in blocks:
        if isinstance(block, Table):
            yield block
        elif isinstance(block, Folded | Section):
            yield from tables_of(block.blocks)


def write_tables(tables: Sequence[Table], folder: Path) -> None:
    """Write every table as a CSV file in `folder`, and remove the files of an earlier page that
    this one does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.csv"):
        old.unlink()
    for table in tables:
        (folder / f"{table.name}.csv").write_text(table.csv, encoding="utf-8")
