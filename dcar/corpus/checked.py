"""What no row of a corpus may hold, whatever its format: checked once, behind every reader.

A reader yields what it finds. Here a row whose strings cannot be written down again (half a character, a control
character in an id), whose id or path is longer than a file system takes, or whose length is no number becomes a bad
row with file and line; and a reader that cannot go on becomes one too, so that validation always comes to its end.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import PurePath

from dcar.corpus.rows import AudioSegment, Problem, Row, Utterance

LONGEST_NAME = 1000
"""Characters of an id or a speaker."""
LONGEST_PATH, LONGEST_PART = 4095, 255
"""Bytes of a path and of one folder or file in it, as Linux allows them."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def checked_rows(read: Callable[[], Iterator[Row]], name: str) -> Iterator[Row]:
    """The rows of a reader, those that cannot be used as problems; a reader that breaks off (a folder without
    permission, a file that is gone) ends with a problem."""
    try:
        for row in read():
            fault = _fault(row) if isinstance(row, Utterance) else None
            yield row if fault is None else Problem(row.id[:LONGEST_NAME], row.source, fault)
    except OSError as error:
        yield Problem("", str(error.filename or name), f"reading broke off ({error.strerror or error}); check the file "
                      "and its permissions")  # fmt: skip


def _fault(u: Utterance) -> str | None:
    """What makes an utterance unusable before its audio and its text are looked at."""
    for label, value in (("id", u.id), ("speaker", u.speaker), ("split", u.split)):
        if value is None:
            continue
        if len(value) > LONGEST_NAME:
            return f"the {label} has {len(value)} characters ({value[:20]}…), the limit is {LONGEST_NAME}; shorten it"
        if found := _CONTROL.search(value):
            return f"the {label} holds the control character U+{ord(found[0]):04X}; remove it"
    for label, value in (("id", u.id), ("speaker", u.speaker), ("split", u.split), ("text", u.text),
                         ("prompt_text", u.prompt_text)):  # fmt: skip
        if value is not None and (place := half_character(value)) is not None:
            return (f"the {label} holds half a character (U+{ord(value[place]):04X}, a lone surrogate, at character "
                    f"{place + 1}); write it again")
    audio = u.audio.path if isinstance(u.audio, AudioSegment) else u.audio if isinstance(u.audio, str) else None
    if half_character(u.source) is not None:
        return "the path of the corpus is not UTF-8; rename its folder"
    for label, path in (("audio", audio), ("prompt_audio", u.prompt_audio)):
        if path is not None and (fault := _path_fault(path)):
            return f"{label}: {fault}"
    if u.duration is not None and not (math.isfinite(u.duration) and u.duration > 0):
        return f"a duration of {u.duration} s; correct it"
    return None


def half_character(text: str) -> int | None:
    """Where a string holds a lone surrogate, which no file can store; None if nowhere."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def _path_fault(path: str) -> str | None:
    if half_character(path) is not None:
        return "the path is not UTF-8; rename the file or folder"
    if "\0" in path:
        return "the path holds a NUL; correct it"
    size = len(os.fsencode(path))
    part = max((len(os.fsencode(part)) for part in PurePath(path).parts), default=0)
    if size > LONGEST_PATH or part > LONGEST_PART:
        return (f"the path has {size} bytes, its longest part {part} (…{path[-20:]}); a file system takes "
                f"{LONGEST_PATH} and {LONGEST_PART}")
    return None
