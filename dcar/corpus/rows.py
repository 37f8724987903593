"""What every reader of a corpus yields: utterances and bad rows, and the helpers that readers share."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dcar.audio import audio_seconds, load_audio, load_segment
from dcar.errors import AudioError

LONGEST_LINE = 1 << 26
"""Bytes of a line of a manifest; cuts may hold their audio."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class _Rows(Protocol):
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class StoredAudio:
    """Audio bytes that stay in a memory-mapped dataset until they are asked for."""

    rows: _Rows = field(repr=False, compare=False)
    index: int
    column: str

    def read(self) -> str | bytes:
        """Encoded bytes, or the path of the file where the dataset stores only that. AudioError if it has neither."""
        try:
            value = self.rows[self.index][self.column]
        except (OSError, ValueError, LookupError) as error:  # pyarrow's errors are among them
            raise AudioError(f"row {self.index}: cannot be read from the dataset ({error}); copy it again") from None
        found = (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else None
        if isinstance(found, str | bytes):
            return found
        raise AudioError(f"row {self.index}: column {self.column!r} holds neither audio bytes nor a path")


@dataclass(frozen=True)
class AudioSegment:
    """A stretch of a longer recording: `start` and `duration` in seconds, one channel of it."""

    path: str
    start: float
    duration: float
    channel: int = 0


@dataclass(frozen=True)
class Utterance:
    """One sentence of speech. `audio`: path, encoded bytes, StoredAudio or AudioSegment; `duration` in seconds, if the
    corpus says. A segment's waveform is its own stretch only.

    `source` is "file:line" (rows are counted from 1) for messages.
    """

    id: str
    text: str
    speaker: str
    audio: str | bytes | StoredAudio | AudioSegment = field(repr=False)
    split: str | None = None
    duration: float | None = None
    prompt_audio: str | None = None
    prompt_text: str | None = None
    source: str = ""
    sample_rate: int | None = None  # Hz, if the corpus says

    def load(self, sample_rate: int | None = None) -> tuple[np.ndarray, int]:
        """Waveform [samples] float32 and its rate; AudioError names the row."""
        where = f"{self.source}: utterance {self.id}"
        try:
            audio = self.audio.read() if isinstance(self.audio, StoredAudio) else self.audio
        except AudioError as error:
            raise AudioError(f"{where}: {error}") from None
        if isinstance(audio, AudioSegment):
            return load_segment(
                audio.path, audio.start, audio.duration, audio.channel, sample_rate, where=f"{where}: {audio.path}"
            )
        return load_audio(audio, sample_rate, where=f"{where}: {audio}" if isinstance(audio, str) else where)

    def seconds(self) -> float | None:
        """Duration in seconds: what the corpus says, else what the header of the audio says; None if it has no readable
        one (which validation then reports)."""
        if self.duration is not None:
            return self.duration
        try:
            audio = self.audio.read() if isinstance(self.audio, StoredAudio) else self.audio
        except AudioError:
            return None
        return audio.duration if isinstance(audio, AudioSegment) else audio_seconds(audio)

    def load_prompt(self, sample_rate: int | None = None) -> tuple[np.ndarray, int] | None:
        """Waveform and rate of the prompt recording, None if the row names none."""
        if self.prompt_audio is None:
            return None
        return load_audio(self.prompt_audio, sample_rate, where=f"{self.source}: prompt {self.prompt_audio}")


@dataclass(frozen=True)
class Problem:
    """One bad row: what is wrong and what to do about it."""

    id: str
    source: str
    message: str

    def __str__(self) -> str:
        text = self.message if self.message.startswith(self.source) else f"{self.source}: {self.message}"
        # one line that every terminal and file takes, whatever the row held
        return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def describe(problems: list[Problem], limit: int | None = None) -> str:
    """All problems (or the first `limit`), one a line, for a report or an error message."""
    shown = problems if limit is None else problems[:limit]
    rest = len(problems) - len(shown)
    return "\n".join([f"  {p}" for p in shown] + ([f"  … and {rest} more"] if rest else []))


def canonical_split(name: str) -> str:
    """train, dev or test for the usual names of splits ("train-clean-100", "validation"); other names are kept."""
    low = name.lower()
    for split, starts in (("train", ("train",)), ("dev", ("dev", "val")), ("test", ("test", "eval"))):
        if low.startswith(starts):
            return split
    return name

Row = Utterance | Problem


@dataclass(frozen=True)
class Part:
    """A piece of a corpus that is read in order: a file, a subset, a shard on a hub.

    `costly` says that passing over rows costs as much as reading them (a remote stream), so that processes share such a
    corpus by parts and not by rows. `stamp` changes when what the part holds changes.
    """

    name: str
    rows: Callable[[], Iterator[Row]]
    stamp: str = ""
    costly: bool = False


def file_stamp(path: Path) -> str:
    """Size and time of change of a file, to notice that it changed."""
    state = path.stat()
    return f"{state.st_size}:{state.st_mtime_ns}"


def is_file(path: Path) -> bool:
    """Whether a path that a row names is a file; no for one that cannot be one (too long, without permission)."""
    try:
        return path.is_file()
    except OSError:
        return False


def text_lines(file: Path) -> Iterator[tuple[int, str, str | None]]:
    """(line number from 1, text, what is wrong with it) of the lines that are not blank; `.gz` files are unpacked.

    A file that cannot be read on (cut off, damaged, no permission) ends with a line that says so.
    """
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as handle:
            while raw := handle.readline(LONGEST_LINE + 1):
                number += 1
                if len(raw) > LONGEST_LINE:
                    yield number, "", f"longer than {LONGEST_LINE} bytes; one row a line"
                    while raw and not raw.endswith(b"\n"):
                        raw = handle.readline(LONGEST_LINE)
                    continue
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                try:
                    text = raw.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    yield number, "", f"not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8"
                    continue
                if text.strip():
                    yield number, text, None
    except (EOFError, zlib.error, OSError) as error:
        cause = "cut off" if isinstance(error, EOFError) else f"damaged or not readable ({error})"
        yield number + 1, "", (f"the file is {cause}: what is behind line {number} is lost, what is before may be "
                               "wrong; copy it again")


def missing(row: Mapping[str, Any], keys: Iterable[str], source: str) -> Problem | None:
    """The problem of a row whose required strings are absent, of another type, or (all but text) empty."""
    name = row.get("id") if isinstance(row.get("id"), str) else ""
    absent = [k for k in keys if row.get(k) is None]
    if absent:
        return Problem(str(name), source, f"fields missing: {', '.join(absent)}")
    wrong = [k for k in keys if not isinstance(row[k], str)]
    if wrong:
        return Problem(str(name), source, f"fields that must be strings: {', '.join(wrong)}")
    empty = [k for k in keys if k != "text" and not row[k].strip()]
    if empty:
        return Problem(str(name), source, f"fields that must not be empty: {', '.join(empty)}")
    return None
