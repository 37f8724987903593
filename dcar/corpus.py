"""Corpora: five layouts in, one list of utterances out, and every bad row reported with file and line.

| kind | what is at `path` | split comes from |
| --- | --- | --- |
| starter | the corpus shipped with the project (default), or a folder of parquet files like it | file name |
| ljspeech | folder with `metadata.csv` (`id|text|normalized`) and `wavs/` | none |
| jsonl | manifest(s): `id, audio, text, speaker[, prompt_audio, prompt_text, split]` | row or file name |
| libritts | `subset/speaker/chapter/*.wav` with `.normalized.txt` beside each (or one subset) | subset |
| datasets | Hugging Face `save_to_disk` folder, parquet file(s), or hub name (`org/name[:config]`) | split |

Reading never stops at a bad row: `read_corpus` returns utterances and problems, `load_corpus` raises one error that
lists them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from dcar.audio import load_audio
from dcar.errors import AudioError, DataError, TextError
from dcar.text import text_to_ids

KINDS = ("starter", "ljspeech", "jsonl", "libritts", "datasets")
MIN_PROMPT_SECONDS = 1.0
STARTER_CORPUS = Path(__file__).parent / "assets" / "starter_corpus"

_TEXT_COLUMNS = ("text_normalized", "normalized_text", "text", "sentence", "transcription", "transcript")
_SPEAKER_COLUMNS = ("speaker", "speaker_id", "client_id")
_ID_COLUMNS = ("id", "utterance_id", "segment_id")


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
        value = self.rows[self.index][self.column]
        if isinstance(value, Mapping) and (value.get("bytes") or value.get("path")):
            return value["bytes"] or str(value["path"])
        raise AudioError(f"row {self.index}: column {self.column!r} holds neither audio bytes nor a path")


@dataclass(frozen=True)
class Utterance:
    """One sentence of speech. `audio`: path, encoded bytes, or StoredAudio; `duration` in seconds, if the corpus says.

    `source` is "file:line" (rows are counted from 1) for messages.
    """

    id: str
    text: str
    speaker: str
    audio: str | bytes | StoredAudio = field(repr=False)
    split: str | None = None
    duration: float | None = None
    prompt_audio: str | None = None
    prompt_text: str | None = None
    source: str = ""

    def load(self, sample_rate: int | None = None) -> tuple[np.ndarray, int]:
        """Waveform [samples] float32 and its rate; AudioError names the row."""
        where = f"{self.source}: utterance {self.id}"
        try:
            audio = self.audio.read() if isinstance(self.audio, StoredAudio) else self.audio
        except AudioError as error:
            raise AudioError(f"{where}: {error}") from None
        return load_audio(audio, sample_rate, where=f"{where}: {audio}" if isinstance(audio, str) else where)

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
        return self.message if self.message.startswith(self.source) else f"{self.source}: {self.message}"


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


_Row = Utterance | Problem


def read_corpus(
    kind: str, path: str | Path | None = None, split: str | None = None
) -> tuple[list[Utterance], list[Problem]]:
    """All utterances of a corpus (of one split, if given) and the rows that could not be read.

    Raises DataError if the corpus as a whole is unusable: unknown kind, no such path, not this layout.
    """
    if kind not in KINDS:
        raise DataError(f"unknown corpus kind {kind!r}; one of {', '.join(KINDS)}")
    if kind == "datasets":
        if path is None:
            raise DataError("a corpus of kind 'datasets' needs a path: a save_to_disk folder, parquet, or a hub name")
        rows = _datasets(str(path))
    else:
        if path is None and kind != "starter":
            raise DataError(f"a corpus of kind {kind!r} needs a path")
        root = Path(path) if path is not None else STARTER_CORPUS
        if not root.exists():
            raise DataError(f"{root}: there is no such {kind} corpus; check the path")
        rows = {"starter": _starter, "ljspeech": _ljspeech, "jsonl": _jsonl, "libritts": _libritts}[kind](root)
    utterances: list[Utterance] = []
    problems: list[Problem] = []
    for row in rows:
        if isinstance(row, Problem):
            problems.append(row)
        elif split is None or row.split == split:
            utterances.append(row)
    if not utterances and not problems:
        raise DataError(f"{path or STARTER_CORPUS}: no utterances" + (f" in split {split!r}" if split else ""))
    return utterances, problems


def load_corpus(kind: str, path: str | Path | None = None, split: str | None = None) -> list[Utterance]:
    """Utterances of a corpus; raises DataError listing every row that could not be read."""
    utterances, problems = read_corpus(kind, path, split)
    if problems:
        raise DataError(f"{len(problems)} rows of the {kind} corpus {path} cannot be read:\n{describe(problems, 50)}")
    return utterances


# ---------------------------------------------------------------------------------------------------- the five layouts


def _starter(root: Path) -> Iterator[_Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [root / f"{s}.parquet" for s in ("train", "dev", "test") if (root / f"{s}.parquet").is_file()]
    if not files:
        raise DataError(f"{root}: no train.parquet, dev.parquet or test.parquet; reinstall the package or fix the path")
    for file in files:
        try:
            table = pq.read_table(file)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a readable parquet file ({error}); reinstall the package") from None
        missing = {"id", "text", "speaker", "duration", "audio"} - set(table.column_names)
        if missing:
            raise DataError(f"{file}: columns missing: {', '.join(sorted(missing))}")
        for line, row in enumerate(table.to_pylist(), start=1):
            source = f"{file.name}:{line}"
            if (bad := _missing(row, ("id", "text", "speaker"), source)) is not None:
                yield bad
                continue
            audio = (row["audio"] or {}).get("bytes")
            if not audio:
                yield Problem(row["id"], source, f"utterance {row['id']} has no audio bytes; make the corpus again")
                continue
            yield Utterance(
                row["id"], row["text"], row["speaker"], audio, split=file.stem, duration=row["duration"], source=source
            )


def _ljspeech(root: Path) -> Iterator[_Row]:
    metadata = root / "metadata.csv"
    if not metadata.is_file():
        raise DataError(f"{root}: no metadata.csv; an LJSpeech folder has metadata.csv and wavs/")
    for line, text, error in _lines(metadata):
        source = f"{metadata}:{line}"
        if error is not None:
            yield Problem("", source, error)
            continue
        parts = text.split("|")
        if len(parts) not in (2, 3):
            yield Problem(parts[0], source, f"{len(parts)} fields, expected id|text or id|text|normalized")
            continue
        name = parts[0].strip()
        if not name:
            yield Problem("", source, "the id is empty; the first field names the file in wavs/")
            continue
        spoken = parts[-1].strip() or parts[1].strip()
        yield Utterance(name, spoken, root.name, str(_ljspeech_audio(root / "wavs", name)), source=source)


def _ljspeech_audio(folder: Path, name: str) -> Path:
    for candidate in (folder / f"{name}.wav", folder / name, folder / f"{name}.flac"):
        if candidate.is_file():
            return candidate
    return folder / f"{name}.wav"


def _jsonl(root: Path) -> Iterator[_Row]:
    files = sorted(root.glob("*.jsonl")) if root.is_dir() else [root]
    if not files:
        raise DataError(f"{root}: no .jsonl manifest in this folder")
    for file in files:
        file_split = canonical_split(file.stem)
        default = file_split if file_split in ("train", "dev", "test") else None
        for line, text, error in _lines(file):
            yield _jsonl_row(file, line, text, error, default)


def _jsonl_row(file: Path, line: int, text: str, error: str | None, split: str | None) -> _Row:
    source = f"{file}:{line}"
    if error is not None:
        return Problem("", source, error)
    try:
        row = json.loads(text)
    except json.JSONDecodeError as broken:
        return Problem("", source, f"not valid JSON ({broken.msg} at column {broken.colno}); one object a line")
    except RecursionError:
        return Problem("", source, "JSON nested too deeply; one flat object a line")
    if not isinstance(row, dict):
        return Problem("", source, f"a JSON {type(row).__name__}, expected an object with id, audio, text, speaker")
    if isinstance(row.get("id"), int) and not isinstance(row["id"], bool):
        row["id"] = str(row["id"])
    if isinstance(row.get("speaker"), int) and not isinstance(row["speaker"], bool):
        row["speaker"] = str(row["speaker"])
    if (bad := _missing(row, ("id", "audio", "text", "speaker"), source)) is not None:
        return bad
    for key in ("prompt_audio", "prompt_text", "split"):
        if row.get(key) is not None and not isinstance(row[key], str):
            return Problem(row["id"], source, f"{key!r} must be a string, got {json.dumps(row[key])[:40]}")
    prompt = row.get("prompt_audio")
    return Utterance(
        id=row["id"],
        text=row["text"],
        speaker=row["speaker"],
        audio=str(file.parent / row["audio"]),
        split=canonical_split(row["split"]) if row.get("split") else split,
        prompt_audio=str(file.parent / prompt) if prompt else None,
        prompt_text=row.get("prompt_text"),
        source=source,
    )


def _libritts(root: Path) -> Iterator[_Row]:
    def is_subset(folder: Path) -> bool:
        return any(next(folder.glob(f"*/*/*{ending}"), None) for ending in (".wav", ".normalized.txt"))

    subsets = [root] if is_subset(root) else sorted(p for p in root.iterdir() if p.is_dir() and is_subset(p))
    if not subsets:
        raise DataError(f"{root}: not the LibriTTS layout; expected subset/speaker/chapter/*.wav with .normalized.txt")
    for subset in subsets:
        split = canonical_split(subset.name)
        wavs = {p.with_suffix("") for p in subset.glob("*/*/*.wav")}
        texts = {p.with_name(p.name.removesuffix(".normalized.txt")) for p in subset.glob("*/*/*.normalized.txt")}
        for stem in sorted(wavs | texts):
            wav, txt = Path(f"{stem}.wav"), Path(f"{stem}.normalized.txt")
            if stem not in texts:
                yield Problem(stem.name, str(wav), f"no transcript {txt.name} beside it")
                continue
            try:
                text = txt.read_text(encoding="utf-8-sig").strip()
            except (UnicodeDecodeError, OSError) as error:
                yield Problem(stem.name, f"{txt}:1", f"transcript not readable ({error})")
                continue
            yield Utterance(stem.name, text, stem.parts[-3], str(wav), split=split, source=f"{txt}:1")


def _datasets(path: str) -> Iterator[_Row]:
    import datasets

    loaded = _open_datasets(path)
    parts = loaded if isinstance(loaded, Mapping) else {None: loaded}
    for name, rows in parts.items():
        audio = next((c for c, f in rows.features.items() if isinstance(f, datasets.Audio)), "audio")
        text = next((c for c in _TEXT_COLUMNS if c in rows.features), None)
        if audio not in rows.features or text is None:
            raise DataError(
                f"{path}: needs an Audio column and a text column ({', '.join(_TEXT_COLUMNS)}); "
                f"it has {', '.join(rows.features)}"
            )
        # decode=False leaves the encoded bytes to our own reader: no torchcodec, and every bad row can be named
        rows = rows.cast_column(audio, datasets.Audio(decode=False))
        speaker = next((c for c in _SPEAKER_COLUMNS if c in rows.features), None)
        key = next((c for c in _ID_COLUMNS if c in rows.features), None)
        label = f"{path}[{name}]" if name else path
        split = canonical_split(name) if name else None
        columns = [c for c in (text, speaker, key, "prompt_text", "split") if c is not None and c in rows.features]
        for index, row in enumerate(rows.select_columns(columns)):
            source = f"{label}:{index + 1}"
            uid = str(row[key]) if key and row[key] is not None else f"{name or Path(path).stem}_{index:07d}"
            if not isinstance(row[text], str):
                yield Problem(uid, source, f"column {text!r} holds {type(row[text]).__name__}, expected a string")
                continue
            yield Utterance(
                id=uid,
                text=row[text],
                speaker=str(row[speaker]) if speaker and row[speaker] is not None else "unknown",
                audio=StoredAudio(rows, index, audio),
                split=canonical_split(str(row["split"])) if row.get("split") else split,
                source=source,
            )


def _open_datasets(path: str) -> Any:
    """Dataset or DatasetDict of a save_to_disk folder, parquet file or folder, or hub name."""
    import datasets

    local = Path(path)
    try:
        if local.is_dir() and ((local / "dataset_info.json").exists() or (local / "dataset_dict.json").exists()):
            return datasets.load_from_disk(path)
        if local.is_file() or local.is_dir():
            files = [local] if local.is_file() else sorted(local.rglob("*.parquet"))
            if not files or any(f.suffix != ".parquet" for f in files):
                raise DataError(f"{path}: neither a folder made by save_to_disk nor parquet files")
            splits: dict[str, list[str]] = {}
            for file in files:
                # train-00000-of-00002.parquet belongs to train, as on the hub; a lone data.parquet to no split
                splits.setdefault(file.stem.split("-0")[0], []).append(str(file))
            loaded = {name: datasets.Dataset.from_parquet(shards) for name, shards in splits.items()}
            known = {n: d for n, d in loaded.items() if canonical_split(n) in ("train", "dev", "test")}
            return known if len(known) == len(loaded) else datasets.concatenate_datasets(list(loaded.values()))
        name, _, config = path.partition(":")
        return datasets.load_dataset(name, config or None)
    except DataError:
        raise
    except Exception as error:  # datasets raises from many libraries; the cause is kept in the message
        raise DataError(f"{path}: datasets cannot open it ({type(error).__name__}: {error})") from error


def _lines(file: Path) -> Iterator[tuple[int, str, str | None]]:
    """(line number from 1, text, what is wrong with it) of the lines that are not blank."""
    with file.open("rb") as handle:
        for number, raw in enumerate(handle, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            try:
                text = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                yield number, "", f"not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8"
                continue
            if text.strip():
                yield number, text, None


def _missing(row: Mapping[str, Any], keys: Iterable[str], source: str) -> Problem | None:
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


# ----------------------------------------------------------------------------------------------------------- validation


def validate_corpus(
    utterances: list[Utterance],
    min_seconds: float,
    max_seconds: float,
    *,
    num_workers: int = 1,
    progress: bool = False,
) -> list[Problem]:
    """Every bad row in corpus order: repeated id, text that cannot be spoken, audio that is missing, unreadable, not
    finite or silent, duration outside min_seconds…max_seconds, a prompt that is unreadable or shorter than 1 s.

    One row may have several problems. All audio is decoded, `num_workers` files at a time.
    """
    if not 0 <= min_seconds < max_seconds:
        raise DataError(f"durations from {min_seconds} to {max_seconds} s: need 0 <= min_seconds < max_seconds")
    found: list[list[Problem]] = [[] for _ in utterances]
    first: dict[str, str] = {}
    for problems, u in zip(found, utterances, strict=True):
        if u.id in first:
            problems.append(Problem(u.id, u.source, f"id {u.id!r} was used before, at {first[u.id]}; make ids unique"))
        else:
            first[u.id] = u.source
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        rows = pool.map(lambda u: _validate_row(u, min_seconds, max_seconds), utterances)
        for problems, more in zip(
            found, tqdm(rows, "validate", total=len(utterances), unit="utt", disable=not progress), strict=True
        ):
            problems += more
    return [p for problems in found for p in problems]


def _validate_row(u: Utterance, min_seconds: float, max_seconds: float) -> list[Problem]:
    problems = []

    def report(message: str) -> None:
        problems.append(Problem(u.id, u.source, message))

    for label, text in (("text", u.text), ("prompt_text", u.prompt_text)):
        if text is not None:
            try:
                text_to_ids(text)
            except TextError as error:
                report(f"utterance {u.id}: {label}: {error}")
    try:
        wave, rate = u.load()
        seconds = len(wave) / rate
        if not min_seconds <= seconds <= max_seconds:
            report(f"utterance {u.id}: {seconds:.2f} s, outside {min_seconds:g}…{max_seconds:g} s; cut or remove it")
        elif u.duration is not None and abs(seconds - u.duration) > 0.05 + 0.01 * seconds:
            report(f"utterance {u.id}: {seconds:.2f} s, but the corpus says {u.duration:.2f} s; is the audio cut?")
    except AudioError as error:
        report(str(error))
    try:
        prompt = u.load_prompt()
        if prompt is not None and len(prompt[0]) / prompt[1] < MIN_PROMPT_SECONDS:
            report(f"utterance {u.id}: the prompt {u.prompt_audio} is {len(prompt[0]) / prompt[1]:.2f} s, at least "
                   f"{MIN_PROMPT_SECONDS:g} s are needed")  # fmt: skip
    except AudioError as error:
        report(str(error))
    return problems
