"""Output of every reader of a corpus, utterances and bad rows, and the helpers that readers
share."""

import logging
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import audio_seconds, load_audio, load_segment
from dcar.errors import AudioError
from dcar.storage import text_lines

logger = logging.getLogger(__name__)

READ = tuple(
    ".wav .flac .ogg .opus .mp3 .aiff .aif .au .caf .m4a .mp4 .aac .webm .wma .amr".split()
)
"""Suffixes of recordings, in small letters or capitals."""
_SPLIT = re.compile(
    r"(train(?:ing)?|dev(?:elopment)?|val(?:id(?:ation)?)?|test(?:ing)?|eval(?:uation)?)"
    r"(?:[-_. 0-9].*)?",
    re.IGNORECASE | re.DOTALL,
)
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def encoded_audio(value: Any) -> str | bytes | None:
    """Return the content of a cell of an Audio column of `datasets`: encoded bytes, or else a
    path; None if it has neither."""
    content = (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else None
    return content if isinstance(content, str | bytes) else None


@dataclass(frozen=True)
class StoredAudio:
    """Audio bytes that stay in a memory-mapped dataset until they are read."""

    rows: Any = field(repr=False, compare=False)  # a datasets.Dataset
    index: int
    column: str

    def read(self) -> str | bytes:
        """Return the encoded bytes, or the path of the file if the dataset stores only that.
        Raises AudioError if it has neither."""
        try:
            value = self.rows[self.index][self.column]
        except (OSError, ValueError, LookupError) as error:  # pyarrow's errors are among them
            raise AudioError(
                f"row {self.index}: cannot be read from the dataset ({error}); copy it again"
            ) from None
        if (content := encoded_audio(value)) is None:
            raise AudioError(
                f"row {self.index}: column {self.column!r} contains neither audio bytes nor a path"
            )
        return content


@dataclass(frozen=True)
class AudioSegment:
    """Stretch of a longer recording: `start` and `duration` in seconds, one of its channels."""

    path: str
    start: float
    duration: float
    channel: int = 0


STARTS = ("offset", "start", "start_time", "begin_time")
ENDS, LENGTH = ("end", "end_time"), "duration"
STRETCH = (*STARTS, *ENDS, LENGTH)
"""Names under which manifests of NeMo, lhotse and others give a stretch of a longer recording, in
seconds. A duration without a start is that of the file."""


def stretch_of(path: str, row: Mapping[str, Any]) -> str | AudioSegment:
    """Return the audio of a row of a manifest: the recording, or the stretch of it that the row
    gives. Raises BadRow for a start without an end or a length, and for no numbers."""
    given = {name: row[name] for name in STRETCH if row.get(name) not in (None, "")}
    if not given.keys() & set(STARTS):
        return path
    try:
        seconds = {name: float(value) for name, value in given.items()}
    except (TypeError, ValueError) as error:
        raise BadRow(f"the stretch of its recording is no number of seconds ({error})") from error
    start = next(seconds[name] for name in STARTS if name in seconds)
    ends = [seconds[name] for name in ENDS if name in seconds]
    if LENGTH in seconds:
        return AudioSegment(path, start, seconds[LENGTH])
    if ends:
        return AudioSegment(path, start, ends[0] - start)
    raise BadRow(
        f"{next(iter(given))} without duration or end: give the length of the stretch in seconds"
    )


@dataclass(frozen=True)
class Utterance:
    """One sentence of speech. `audio`: path, encoded bytes, StoredAudio or AudioSegment; `duration`
    in seconds, if the corpus gives it. A segment's waveform is only its own stretch.

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
    language: str = ""  # code of ISO 639, if the corpus says

    def _audio(self) -> str | bytes | AudioSegment:
        return self.audio.read() if isinstance(self.audio, StoredAudio) else self.audio

    def load(self, sample_rate: int | None = None) -> tuple[np.ndarray, int]:
        """Return the waveform [samples] float32 and its rate. An AudioError names the row."""
        where = f"{self.source}: utterance {self.id}"
        try:
            audio = self._audio()
        except AudioError as error:
            raise AudioError(f"{where}: {error}") from None
        if isinstance(audio, AudioSegment):
            return load_segment(
                audio.path,
                audio.start,
                audio.duration,
                audio.channel,
                sample_rate,
                where=f"{where}: {audio.path}",
            )
        return load_audio(
            audio, sample_rate, where=f"{where}: {audio}" if isinstance(audio, str) else where
        )

    def seconds(self) -> float | None:
        """Return the duration in seconds, from the corpus or else from the header of the audio;
        None if it has no readable one (which validation then reports)."""
        if self.duration is not None:
            return self.duration
        try:
            audio = self._audio()
        except AudioError:
            return None
        return audio.duration if isinstance(audio, AudioSegment) else audio_seconds(audio)

    def load_prompt(self) -> tuple[np.ndarray, int] | None:
        """Return waveform and rate of the prompt recording, None if the row names none."""
        if self.prompt_audio is None:
            return None
        return load_audio(self.prompt_audio, where=f"{self.source}: prompt {self.prompt_audio}")


@dataclass(frozen=True)
class Problem:
    """Bad row: what is wrong and what to do about it."""

    id: str
    source: str
    message: str

    def __str__(self) -> str:
        text = (
            self.message
            if self.message.startswith(self.source)
            else f"{self.source}: {self.message}"
        )
        # one line that every terminal and file takes, whatever the row held
        return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def describe(problems: list[Problem], limit: int | None = None) -> str:
    """Return all problems (or the first `limit`), one per line, for a report or an error
    message."""
    shown = problems if limit is None else problems[:limit]
    rest = len(problems) - len(shown)
    return "\n".join([f"  {p}" for p in shown] + ([f"  … and {rest} more"] if rest else []))


def canonical_split(name: str) -> str:
    """Return train, dev or test for the usual names of splits ("train-clean-100", "validation").
    Other names are returned as they are, such as "validated" of Common Voice, which contains all
    three."""
    return known_split(name) or name


def known_split(name: str) -> str | None:
    """Return the split as `canonical_split` does; None for other names. Text after the name of a
    split is separated from it as in `datasets`: by one of `-_.`, a space or a digit."""
    match = _SPLIT.fullmatch(name)
    starts = {"train": "train", "dev": "dev", "val": "dev", "test": "test", "eval": "test"}
    return (
        next(split for start, split in starts.items() if match[1].lower().startswith(start))
        if match
        else None
    )


Row = Utterance | Problem


@dataclass(frozen=True)
class Part:
    """Part of a corpus that is read in order: a file, a subset, a shard on a hub.

    `costly` is true if skipping rows costs as much as reading them (a remote stream), so that
    processes share such a corpus by parts and not by rows. `stamp` changes when the part's content
    changes.
    """

    name: str
    rows: Callable[[], Iterator[Row]]
    stamp: str = ""
    costly: bool = False


def below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, also those of linked folders; of a link to a folder above
    it, none (`Path.rglob` of Python 3.11 and 3.12 follows no link)."""
    for root, folders, files in os.walk(folder, followlinks=True):
        here = Path(root)
        above = {p.resolve() for p in (here, *here.parents)}
        folders[:] = [name for name in folders if (here / name).resolve() not in above]
        yield from (here / file for file in files)


def files_in(folder: Path, *endings: str, deep: bool = False) -> list[Path]:
    """Return the files of a folder (deep: also of its subfolders) with one of these suffixes, in
    small letters or capitals, sorted. Linked folders are followed. The files that macOS writes
    next to them (`._NAME`) are skipped with a warning."""
    paths = [
        p for p in (below(folder) if deep else folder.iterdir()) if p.name.lower().endswith(endings)
    ]
    files = sorted(p for p in paths if not is_companion(p) and p.is_file())
    warn_of_companions(folder, sum(map(is_companion, paths)))
    return files


@cache
def note_unused(where: str, columns: tuple[str, ...]) -> None:
    """Log the columns of a table that no reader knows, once for each table."""
    if columns:
        logger.warning("%s: columns that are not used: %s", where, ", ".join(columns))


@cache
def note_one_speaker(where: str) -> None:
    """Log that a table has rows without a speaker, once for each table."""
    logger.warning(
        "%s: rows without a speaker count as one person; name the speakers if there are several, "
        "because the voice of an utterance is taken from another one of its speaker",
        where,
    )


def is_companion(path: Path) -> bool:
    """Return True for a file in which macOS keeps the attributes of another, on disks and in
    archives that have none."""
    return path.name.startswith("._")


def warn_of_companions(folder: Path, count: int) -> None:
    if count:
        logger.warning(
            "%s: %d files named ._NAME are skipped; macOS writes them next to NAME, and they "
            "contain neither audio nor text",
            folder,
            count,
        )


def file_stamp(path: Path) -> str:
    """Return size and time of change of a file, to detect changes."""
    state = path.stat()
    return f"{state.st_size}:{state.st_mtime_ns}"


def file_part(file: Path, read: Callable[..., Iterator[Row]], *rest: Any) -> Part:
    """Return the part of a file whose rows are `read(file, *rest)`."""
    return Part(file.name, partial(read, file, *rest), file_stamp(file))


def accents_of(name: str) -> tuple[str, str]:
    """Return a name with its accents composed (NFC), and as characters of their own (NFD), as macOS
    writes them."""
    return unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)


def first_file(places: Sequence[Path]) -> Path:
    """Return the first of several places at which a file exists, with its suffix in capitals or
    small letters, or its accents as characters of their own, if necessary; if there is none, the
    first place, for messages."""
    # os.path: no error for what cannot be a path (too long, without permission)
    names = (
        name
        for stem, suffix in map(os.path.splitext, places)
        for end in dict.fromkeys((suffix, suffix.lower(), suffix.upper()))
        for name in dict.fromkeys((stem + end, *accents_of(stem + end)))
    )
    return next((Path(name) for name in names if os.path.isfile(name)), places[0])


def in_turn(speakers: Sequence[str]) -> Iterator[int]:
    """Yield indices of utterances, speakers in turn, so that any beginning of the sequence
    contains all speakers equally, as far as they have speech. The order within a speaker is
    kept."""
    queues: dict[str, list[int]] = {}
    for i, speaker in enumerate(speakers):
        queues.setdefault(speaker, []).append(i)
    for row in zip_longest(*queues.values()):
        yield from (i for i in row if i is not None)


class BadRow(Exception):
    """Error of a reader: the row cannot be used; why and what to do, and the row's id if it has
    one."""

    def __init__(self, message: str, id: str = ""):
        super().__init__(message)
        self.id = id


def row_of(source: str, make: Callable[..., Utterance], *given: Any) -> Row:
    """Return `make(*given, source)`, or a problem if it raises BadRow."""
    try:
        return make(*given, source)
    except BadRow as bad:
        return Problem(bad.id, source, str(bad))


def line_rows(file: Path, make: Callable[[str, str], Utterance]) -> Iterator[Row]:
    """Iterate over a row for every line of a list or manifest, made by `make(text, source)` (see
    `row_of`)."""
    for line, text, error in text_lines(file):
        source = f"{file}:{line}"
        yield row_of(source, make, text) if error is None else Problem("", source, error)


def require_strings(row: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise BadRow if required strings are absent, of another type, or (all but text) empty."""
    name = row["id"] if isinstance(row.get("id"), str) else ""
    if absent := [k for k in keys if row.get(k) is None]:
        raise BadRow(f"fields missing: {', '.join(absent)}", name)
    if wrong := [k for k in keys if not isinstance(row[k], str)]:
        raise BadRow(f"fields that must be strings: {', '.join(wrong)}", name)
    if empty := [k for k in keys if k != "text" and not row[k].strip()]:
        raise BadRow(f"fields that must not be empty: {', '.join(empty)}", name)
