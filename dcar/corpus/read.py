"""Corpora: the layouts of docs/data.md in, one list (or stream) of utterances out, and every bad
row reported with file and line.

Reading never stops at a bad row. Rows are checked here, after every reader and independently of the
format, and a reader that cannot continue ends with a bad row as well. `read_corpus` returns
utterances and problems, `load_corpus` raises one error that lists them all, and `corpus_parts`
returns the parts of a corpus, to be read one row at a time. Validation decodes every recording and
phonemises every text; every bad row is reported with file and line.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, note
from dcar.corpus import cuts, folders, layouts, libritts
from dcar.corpus.huggingface import dataset_parts
from dcar.corpus.rows import (
    AudioSegment,
    Part,
    Problem,
    Row,
    Utterance,
    accents_of,
    describe,
)
from dcar.corpus.texts import CorpusTexts
from dcar.errors import AudioError, DataError, TextError
from dcar.progress import Progress
from dcar.sources.shipped import shipped
from dcar.text.languages import language_of

READERS = {
    "starter": layouts.starter_parts,
    "folder": folders.folder_parts,
    "ljspeech": layouts.ljspeech_parts,
    "jsonl": layouts.jsonl_parts,
    "seed-tts-eval": layouts.seed_tts_parts,
}
WITH_AUDIO_ROOT: dict[str, Callable[[Path, Path | None], list[Part]]] = {
    "libriheavy": cuts.cut_parts,
    "lhotse": cuts.cut_parts,
    "unicats": libritts.unicats_parts,
}
KINDS = (*READERS, "libritts", *WITH_AUDIO_ROOT, "datasets")
MIN_PROMPT_SECONDS = 1.0
Decoded = tuple[np.ndarray, int]
"""Waveform [samples] and its rate in Hz."""
_HALF = re.compile(r"[\ud800-\udfff]")  # a lone surrogate, which no file can store


def corpus_parts(
    kind: str,
    path: str | Path | None = None,
    *,
    audio_root: str | Path | None = None,
    subsets: Sequence[str] = (),
    streaming: bool = False,
) -> list[Part]:
    """Return the parts of a corpus in a fixed order; nothing is read before a part's rows are
    requested.

    audio_root: the LibriTTS folder of a `unicats` list, or the folder that relative paths of cut
    manifests start from. subsets: of `libritts`, all if empty. streaming: do not store a `datasets`
    corpus on disk. Raises DataError if the corpus as a whole is unusable: unknown kind, no such
    path, not this layout, a setting that the kind does not have.
    """
    if kind not in KINDS:
        raise DataError(f"unknown corpus kind {kind!r}; one of {', '.join(KINDS)}")
    if audio_root is not None and kind not in WITH_AUDIO_ROOT:
        raise DataError(
            f"audio_root is for unicats, libriheavy and lhotse; a {kind} corpus names its audio "
            "itself"
        )
    if subsets and kind != "libritts":
        raise DataError(f"subsets is a setting of libritts, not of a {kind} corpus")
    if path is None and kind != "starter":
        raise DataError(
            f"a corpus of kind {kind!r} needs a path"
            + (": a save_to_disk folder, parquet, or a hub name" if kind == "datasets" else "")
        )
    # resolved: the name of the folder may be that of the speaker, and "." has none
    root = Path(path).resolve() if path is not None else shipped("corpus")
    if kind != "datasets" and not root.exists():
        raise DataError(f"{root}: this {kind} corpus does not exist; check the path")
    if kind == "datasets":
        parts = dataset_parts(str(path), streaming)
    elif kind == "libritts":
        parts = libritts.libritts_parts(root, subsets)
    elif kind in WITH_AUDIO_ROOT:
        parts = WITH_AUDIO_ROOT[kind](root, Path(audio_root) if audio_root is not None else None)
    else:
        parts = READERS[kind](root)
    return [replace(part, rows=partial(checked_rows, part.rows, part.name)) for part in parts]


def read_corpus(
    kind: str,
    path: str | Path | None = None,
    split: str | None = None,
    *,
    audio_root: str | Path | None = None,
    subsets: Sequence[str] = (),
) -> tuple[list[Utterance], list[Problem]]:
    """Return all utterances of a corpus (of one split, if given) and the rows that could not be
    read.

    Raises DataError if the corpus as a whole is unusable (see `corpus_parts`) or empty.
    """
    utterances: list[Utterance] = []
    problems: list[Problem] = []
    for part in corpus_parts(kind, path, audio_root=audio_root, subsets=subsets):
        for row in part.rows():
            if isinstance(row, Problem):
                problems.append(row)
            elif split is None or row.split == split:
                utterances.append(row)
    if not utterances and not problems:
        raise DataError(
            f"{path or 'the shipped corpus'}: no utterances"
            + (f" in split {split!r}" if split else "")
        )
    return utterances, problems


def load_corpus(
    kind: str, path: str | Path | None = None, split: str | None = None
) -> list[Utterance]:
    """Return the utterances of a corpus. Raises DataError listing every row that could not be
    read."""
    utterances, problems = read_corpus(kind, path, split)
    if problems:
        raise DataError(
            f"{len(problems)} rows of the {kind} corpus {path} cannot be "
            f"read:\n{describe(problems, 50)}"
        )
    return utterances


def checked_rows(read: Callable[[], Iterator[Row]], name: str) -> Iterator[Row]:
    """Iterate over the rows of a reader, unusable ones as problems; a reader that breaks off (a
    folder without permission, a file that is gone) ends with a problem."""
    try:
        for row in read():
            if isinstance(row, Problem):
                yield row
            elif fault := _fault(row):
                yield Problem(row.id, row.source, fault)
            else:  # the same name with accents of another form is the same person
                composed = [accents_of(name)[0] for name in (row.id, row.speaker)]
                language = language_of(row.language).code if row.language else ""
                yield replace(row, id=composed[0], speaker=composed[1], language=language)
    except OSError as error:
        yield Problem(
            "",
            str(error.filename or name),
            f"reading broke off ({error.strerror or error}); check the file and its permissions",
        )


def _fault(u: Utterance) -> str | None:
    """Return the reason why an utterance is unusable, before its audio and its text are checked."""
    for label in ("id", "speaker", "split", "text", "prompt_text"):
        if match := _HALF.search(getattr(u, label) or ""):
            return (
                f"the {label} holds half a character (U+{ord(match[0]):04X}, a lone surrogate, at "
                f"character {match.start() + 1}); write it again"
            )
    audio = u.audio.path if isinstance(u.audio, AudioSegment) else u.audio
    if _HALF.search(u.source):
        return "the path of the corpus is not UTF-8; rename its folder"
    for label, path in (("audio", audio), ("prompt_audio", u.prompt_audio)):
        if isinstance(path, str) and _HALF.search(path):
            return f"{label}: the path is not UTF-8; rename the file or folder"
    if u.prompt_audio is not None and u.prompt_audio == audio:
        return "its prompt is its own recording; name another one of the speaker"
    if u.language:
        try:
            language_of(u.language)
        except TextError as error:
            return str(error)
    if u.duration is not None and not (math.isfinite(u.duration) and u.duration > 0):
        return f"a duration of {u.duration} s; correct it"
    return None


def validate_corpus(
    utterances: list[Utterance],
    min_seconds: float,
    max_seconds: float,
    texts: CorpusTexts | None = None,
    *,
    num_workers: int = 1,
    progress: bool = False,
) -> list[Problem]:
    """Return every bad row in corpus order: repeated id, text that cannot be spoken, audio that is
    missing, unreadable, not finite or silent, duration outside min_seconds…max_seconds, a prompt
    that is unreadable, shorter than 1 s or longer than max_seconds.

    One row may have several problems. All audio is decoded, `num_workers` files at a time. texts:
    rules by which texts are read, those of the default language if not given.
    """
    texts = texts or CorpusTexts()
    problems: list[Problem] = []
    first: dict[str, str] = {}
    with ThreadPoolExecutor(num_workers) as pool:

        def look(u: Utterance) -> list[Problem]:
            return examine(u, min_seconds, max_seconds, texts)[0]  # without the audio: memory

        looked = Progress(
            pool.map(look, utterances),
            "validate",
            len(utterances),
            unit="utt",
            disable=not progress,
        )
        for u, faults in zip(utterances, looked, strict=True):
            if u.id in first:
                problems.append(
                    Problem(
                        u.id,
                        u.source,
                        f"id {u.id!r} was used before, at {first[u.id]}; make ids unique",
                    )
                )
            first.setdefault(u.id, u.source)
            problems += faults
    return problems


def examine(
    u: Utterance, min_seconds: float, max_seconds: float, texts: CorpusTexts
) -> tuple[list[Problem], Decoded | None, Decoded | None]:
    """Return the problems of an utterance, and its audio and its prompt's as decoded (waveform,
    rate), None if there is none. A sample rate below that of encoders is noted, once for each."""
    problems = []
    decoded = prompt = None

    def report(message: str) -> None:
        problems.append(Problem(u.id, u.source, message))

    for label, text in (("text", u.text), ("prompt_text", u.prompt_text)):
        if text is not None:
            try:
                texts.check(u, text)
            except TextError as error:
                hint = "" if text.strip() else ", or set recognizer=whisper-base"
                report(f"utterance {u.id}: {label}: {error}{hint}")
    try:
        decoded = u.load()
        seconds = len(decoded[0]) / decoded[1]
        if decoded[1] < ENCODER_SAMPLE_RATE:
            note(
                f"low rate {decoded[1]}",
                f"{u.source}: {decoded[1]} Hz: recordings below {ENCODER_SAMPLE_RATE} Hz lack all "
                "sound above half their rate, and their tokens may lose words; measure that with "
                "`dcar analyse what=vocoder`",
            )
        if not min_seconds <= seconds <= max_seconds:
            report(
                f"utterance {u.id}: {seconds:.2f} s, outside {min_seconds:g}…{max_seconds:g} s; "
                "cut or remove it"
            )
        elif u.duration is not None and abs(seconds - u.duration) > 0.05 + 0.01 * seconds:
            report(
                f"utterance {u.id}: {seconds:.2f} s, but the corpus says {u.duration:.2f} s; is "
                "the audio cut?"
            )
        if u.sample_rate is not None and decoded[1] != u.sample_rate:
            report(
                f"utterance {u.id}: the file has {decoded[1]} Hz, the manifest says "
                f"{u.sample_rate} Hz; make the manifest again from these files, or point "
                "audio_root to its own"
            )
    except AudioError as error:
        report(str(error))
    try:
        prompt = u.load_prompt()
        seconds = len(prompt[0]) / prompt[1] if prompt is not None else MIN_PROMPT_SECONDS
        if not MIN_PROMPT_SECONDS <= seconds <= max(max_seconds, MIN_PROMPT_SECONDS):
            report(
                f"utterance {u.id}: the prompt {u.prompt_audio} is {seconds:.2f} s, outside "
                f"{MIN_PROMPT_SECONDS:g}…{max_seconds:g} s; cut it"
            )
    except AudioError as error:
        report(str(error))
    return problems, decoded, prompt
