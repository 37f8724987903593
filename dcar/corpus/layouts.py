"""Layouts read from a folder of files: the starter corpus, LJSpeech, JSONL manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dcar.corpus.rows import Part, Problem, Row, Utterance, canonical_split, file_stamp, is_file, missing, text_lines
from dcar.errors import DataError

SPLIT_LISTS = ("train", "dev", "val", "valid", "validation", "test")


def starter_parts(root: Path) -> list[Part]:
    """train.parquet, dev.parquet and test.parquet with columns id, text, speaker, duration, audio."""
    files = [root / f"{s}.parquet" for s in ("train", "dev", "test") if (root / f"{s}.parquet").is_file()]
    if not files:
        raise DataError(f"{root}: no train.parquet, dev.parquet or test.parquet; reinstall the package or fix the path")
    return [Part(file.name, partial(_starter, file), file_stamp(file)) for file in files]


def _starter(file: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable parquet file ({error}); reinstall the package") from None
    absent = {"id", "text", "speaker", "duration", "audio"} - set(table.column_names)
    if absent:
        raise DataError(f"{file}: columns missing: {', '.join(sorted(absent))}")
    for index in range(table.num_rows):
        source = f"{file.name}:{index + 1}"
        try:
            row = {name: table[name][index].as_py() for name in table.column_names}
        except (pa.ArrowException, ValueError) as error:  # a string that is not UTF-8
            yield Problem("", source, f"cannot be read ({error}); make the corpus again")
            continue
        if (bad := missing(row, ("id", "text", "speaker"), source)) is not None:
            yield bad
            continue
        audio, duration = row["audio"], row["duration"]
        encoded = audio.get("bytes") if isinstance(audio, dict) else None
        if not isinstance(encoded, bytes) or not encoded:
            yield Problem(row["id"], source, f"utterance {row['id']} has no audio bytes; make the corpus again")
        elif duration is not None and not isinstance(duration, int | float):
            yield Problem(row["id"], source, f"a duration of type {type(duration).__name__}, expected seconds")
        else:
            yield Utterance(row["id"], row["text"], row["speaker"], encoded, split=file.stem, duration=duration,
                            source=source)  # fmt: skip


def ljspeech_parts(root: Path) -> list[Part]:
    """`metadata.csv` (`id|text[|normalized]`) and `wavs/`; `train.txt`, `dev.txt` (or `val.txt`, …) and `test.txt`
    beside them say which ids are of which split."""
    metadata = root / "metadata.csv"
    if not metadata.is_file():
        raise DataError(f"{root}: no metadata.csv; an LJSpeech folder has metadata.csv and wavs/")
    lists = [root / f"{name}.txt" for name in SPLIT_LISTS if (root / f"{name}.txt").is_file()]
    stamp = " ".join(file_stamp(file) for file in (metadata, *lists))
    return [Part(metadata.name, partial(_ljspeech, root, lists), stamp)]


def _ljspeech(root: Path, lists: Sequence[Path]) -> Iterator[Row]:
    metadata = root / "metadata.csv"
    listed = _listed_ids(lists)
    rest = None if any(split == "train" for split, _ in listed.values()) else "train"
    seen: set[str] = set()
    for line, text, error in text_lines(metadata):
        source = f"{metadata}:{line}"
        if error is not None:
            yield Problem("", source, error)
            continue
        parts = text.split("|")
        if len(parts) not in (2, 3):
            yield Problem(parts[0], source, f"{len(parts)} fields, expected id|text or id|text|normalized (a table "
                                            "with a header: corpus=folder)")
            continue
        name = parts[0].strip()
        if not name:
            yield Problem("", source, "the id is empty; the first field names the file in wavs/")
            continue
        seen.add(name)
        split = listed[name][0] if name in listed else rest if lists else None
        if lists and split is None:
            yield Problem(name, source, f"in none of {', '.join(file.name for file in lists)}; add it to one, or "
                                        "remove train.txt: then all that is in no other list is for training")
            continue
        spoken = parts[-1].strip() or parts[1].strip()
        yield Utterance(name, spoken, root.name, str(_ljspeech_audio(root / "wavs", name)), split=split, source=source)
    for name, (_, source) in listed.items():
        if name not in seen:
            yield Problem(name, source, "not in metadata.csv; a list of ids has one of its first fields a line")


def _listed_ids(lists: Sequence[Path]) -> dict[str, tuple[str, str]]:
    """Id -> its split and where that is said. A line is an id, or what lists for other programs begin with
    (`wavs/ID.wav|text`). DataError for an id in two places or a line that cannot be read."""
    found: dict[str, tuple[str, str]] = {}
    for file in lists:
        for line, text, error in text_lines(file):
            source = f"{file}:{line}"
            name = text.split("|")[0].strip().rpartition("/")[2]
            name = name.removesuffix(".wav").removesuffix(".flac")
            if error is not None or not name:
                raise DataError(f"{source}: {error or 'no id'}; one id of metadata.csv a line")
            if name in found:
                raise DataError(f"{source}: {name} stands in {found[name][1]} as well; an utterance has one split")
            found[name] = (canonical_split(file.stem), source)
    return found


def _ljspeech_audio(folder: Path, name: str) -> Path:
    for candidate in (folder / f"{name}.wav", folder / name, folder / f"{name}.flac"):
        if is_file(candidate):
            return candidate
    return folder / f"{name}.wav"


def jsonl_parts(root: Path) -> list[Part]:
    """One manifest, or every `*.jsonl` of a folder."""
    files = sorted(root.glob("*.jsonl")) if root.is_dir() else [root]
    if not files:
        raise DataError(f"{root}: no .jsonl manifest in this folder")
    return [Part(file.name, partial(_jsonl, file), file_stamp(file)) for file in files]


def _jsonl(file: Path) -> Iterator[Row]:
    file_split = canonical_split(file.stem)
    default = file_split if file_split in ("train", "dev", "test") else None
    for line, text, error in text_lines(file):
        yield _jsonl_row(file, line, text, error, default)


def _jsonl_row(file: Path, line: int, text: str, error: str | None, split: str | None) -> Row:
    source = f"{file}:{line}"
    if error is not None:
        return Problem("", source, error)
    try:
        row = json.loads(text)
    except json.JSONDecodeError as broken:
        return Problem("", source, f"not valid JSON ({broken.msg} at column {broken.colno}); one object a line")
    except ValueError:  # Python reads whole numbers of at most 4300 digits
        return Problem("", source, "holds a number of thousands of digits; numbers that name something are strings")
    except RecursionError:
        return Problem("", source, "JSON nested too deeply; one flat object a line")
    if not isinstance(row, dict):
        return Problem("", source, f"a JSON {type(row).__name__}, expected an object with id, audio, text, speaker")
    if isinstance(row.get("id"), int) and not isinstance(row["id"], bool):
        row["id"] = str(row["id"])
    if isinstance(row.get("speaker"), int) and not isinstance(row["speaker"], bool):
        row["speaker"] = str(row["speaker"])
    if (bad := missing(row, ("id", "audio", "text", "speaker"), source)) is not None:
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
