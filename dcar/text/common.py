"""Symbols that all inventories share, limits of a text, and characters that nobody sees, whatever
the language."""

import re

from dcar.errors import TextError

PAD, WORD_BOUNDARY = "<pad>", " "
PHRASE_MARKS = (",", ".", "?", "!")
FIRST = (PAD, WORD_BOUNDARY, *PHRASE_MARKS)
"""Symbols with the first ids of every inventory; id 0 is padding."""

# terminals' escape sequences: colours, links, single commands
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]"
)
# control and format characters, joiners, selectors of glyphs; not the blanks among them
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)

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


def without_invisible(text: str) -> str:
    """Return the text without terminals' escape sequences, control and format characters."""
    return _INVISIBLE.sub("", _ESCAPES.sub("", text))
