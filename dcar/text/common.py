"""Symbols that all inventories share, and limits of a text, whatever its language."""

from dcar.errors import TextError

PAD, WORD_BOUNDARY = "<pad>", " "
PHRASE_MARKS = (",", ".", "?", "!")
FIRST = (PAD, WORD_BOUNDARY, *PHRASE_MARKS)
"""Symbols with the first ids of every inventory; id 0 is padding."""

MAX_CHARACTERS = 1000
MAX_UNITS = 1000  # ids that one text may become


def check_text(text: str) -> str:
    """Return `text`. Raises TextError if it is empty, binary, or longer than MAX_CHARACTERS."""
    if not text.strip():
        raise TextError("text is empty; give at least one word")
    if "\0" in text:
        raise TextError(
            "text holds NUL characters (U+0000), as UTF-16 does when it is read as UTF-8; save the "
            "file as UTF-8"
        )
    if len(text) > MAX_CHARACTERS:
        raise TextError(
            f"text has {len(text)} characters, the limit is {MAX_CHARACTERS}: {text[:40]!r}…; "
            "split it into sentences"
        )
    return text


def check_units(count: int, what: str, text: str) -> None:
    """Raise TextError if a text became more than MAX_UNITS of `what`."""
    if count > MAX_UNITS:
        raise TextError(
            f"text has {count} {what}, the limit is {MAX_UNITS}: {text[:40]!r}…; split it into "
            "sentences"
        )
