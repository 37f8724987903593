"""Pieces of HTML for the report: escaping, embedded files, tables, figures."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
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


def table(head: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """A table that scrolls sideways where it is too wide; cells are escaped. classes: one per row, or none."""
    names = classes or [""] * len(rows)
    body = "".join(f"<tr class='{escape(name)}'>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>"
                   for name, row in zip(names, rows, strict=True))
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f"<div class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


def figure(title: str, path: Path, caption: str) -> str:
    """A picture file under a heading, with its caption."""
    return (f"<h2>{escape(title)}</h2><img alt='{escape(title)}' src='{file_uri(path)}'>"
            f"<p class=soft>{escape(caption)}</p>")


def paragraphs(texts: Sequence[str]) -> str:
    """Small print, one paragraph each."""
    return "".join(f"<p class=soft>{escape(t)}</p>" for t in texts)


def bullets(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(t)}</li>" for t in texts) + "</ul>" if texts else ""
