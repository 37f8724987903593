"""Pieces of HTML for the report: escaping, embedded files, headings, tables with their CSV, figures."""

from __future__ import annotations

import base64
import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcar.errors import DataError

MIME = {".opus": "audio/ogg", ".ogg": "audio/ogg", ".wav": "audio/wav", ".png": "image/png"}


def escape(text: Any) -> str:
    """Text for element content and attribute values."""
    return html.escape(str(text), quote=True)


def data_uri(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def file_uri(path: Path) -> str:
    """A file as a data URI; DataError if it is missing."""
    try:
        return data_uri(path.read_bytes(), MIME[path.suffix])
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); run `dcar compare` again, it makes what is missing"
                        ) from error


def slug(title: str) -> str:
    """A title as an anchor and as the name of a file: letters and digits, joined by hyphens."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def heading(title: str) -> str:
    """The heading of a section, which the list of sections links to."""
    return f"<h2 id='{slug(title)}'>{escape(title)}</h2>"


def folded(title: str, body: str, open_: bool = False) -> str:
    """What is shown when asked for, or from the start where it is `open_`."""
    return f"<details{' open' * open_}><summary>{escape(title)}</summary>{body}</details>"


@dataclass
class Sheets:
    """The tables of a page: each is shown, and given as CSV in the page itself and (`write`) as a file beside it."""

    written: dict[str, str] = field(default_factory=dict)  # name -> text of the CSV

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]],
              classes: Sequence[str] = ()) -> str:
        """A table that can be sorted and scrolls in its own box, with its CSV; cells are escaped.

        title: what the table is, once a page; classes: one per row, or none.
        """
        names = classes or [""] * len(rows)
        body = "".join(f"<tr class='{escape(name)}'><th scope=row>{escape(row[0])}</th>"
                       + "".join(f"<td>{escape(c)}</td>" for c in row[1:]) + "</tr>"
                       for name, row in zip(names, rows, strict=True))
        titles = "".join(f"<th scope=col>{escape(t)}</th>" for t in head)
        return box(title, f"<table class=sortable><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
                   ) + self.link(title, head, rows)

    def link(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        """The CSV of a table as a download. ValueError where the page has a table of this title."""
        name = slug(title)
        if name in self.written:
            raise ValueError(f"two tables are called '{title}'")
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([head, *rows])
        self.written[name] = text.getvalue()
        return (f"<p class=files><a download='{name}.csv' href='{data_uri(text.getvalue().encode(), 'text/csv')}'>"
                f"{escape(title)} as CSV</a></p>")

    def write(self, folder: Path) -> None:
        """Every table as a file in `folder`; files of an earlier page that this one has not are removed."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.csv"):
            old.unlink()
        for name, text in self.written.items():
            (folder / f"{name}.csv").write_text(text, encoding="utf-8")


def box(title: str, table: str) -> str:
    """A table in a box that scrolls, also by the arrow keys."""
    return f"<div class=scroll role=region tabindex=0 aria-label='{escape(title)}'>{table}</div>"


def picture(title: str, path: Path, caption: str) -> str:
    """A picture file with its caption."""
    return f"<img alt='{escape(title)}' src='{file_uri(path)}'><p class=soft>{escape(caption)}</p>"


def wide_picture(title: str, path: Path, caption: str) -> str:
    """A picture that would be too small on a phone: there it keeps its size, in a box that scrolls."""
    return f"{wide(title, path)}<p class=soft>{escape(caption)}</p>"


def wide(title: str, path: Path) -> str:
    """As `wide_picture`, the picture alone."""
    return (f"<div class=wide role=region tabindex=0 aria-label='{escape(title)}'><img alt='{escape(title)}' "
            f"src='{file_uri(path)}'></div>")


def figure(title: str, path: Path, caption: str) -> str:
    """A picture file under a heading, with its caption."""
    return heading(title) + picture(title, path, caption)


def paragraphs(texts: Sequence[str]) -> str:
    """Small print, one paragraph each."""
    return "".join(f"<p class=soft>{escape(t)}</p>" for t in texts)


def bullets(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(t)}</li>" for t in texts) + "</ul>" if texts else ""
