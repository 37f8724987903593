"""Layouts read from files: the starter corpus, LJSpeech, JSONL manifests, the lists of
seed-tts-eval."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dcar.corpus.rows import (
    READ,
    STRETCH,
    BadRow,
    Part,
    Problem,
    Row,
    Utterance,
    accents_of,
    canonical_split,
    file_part,
    file_stamp,
    files_in,
    first_file,
    known_split,
    line_rows,
    note_unused,
    require_strings,
    row_of,
    stretch_of,
)
from dcar.errors import DataError
from dcar.storage import text_lines

REQUIRED = ("id", "audio", "text", "speaker")
OPTIONAL = ("prompt_audio", "prompt_text", "split", "language")
"""Keys of a row of a JSONL manifest."""
SPLIT_LISTS = ("train", "dev", "val", "valid", "validation", "test")


def starter_parts(root: Path) -> list[Part]:
    """Return the parts of train.parquet, dev.parquet and test.parquet with columns id, text,
    speaker, duration, audio."""
    files = [
        root / f"{s}.parquet" for s in ("train", "dev", "test") if (root / f"{s}.parquet").is_file()
    ]
    if not files:
        raise DataError(
            f"{root}: no train.parquet, dev.parquet or test.parquet; reinstall the package or fix "
            "the path"
        )
    return [file_part(file, _starter) for file in files]


def _starter(file: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not a readable parquet file ({error}); reinstall the package"
        ) from None

    def utterance(index: int, source: str) -> Utterance:
        row = {name: table[name][index].as_py() for name in table.column_names}
        return Utterance(
            row["id"],
            row["text"],
            row["speaker"],
            row["audio"]["bytes"],
            split=file.stem,
            duration=row["duration"],
            source=source,
        )

    for index in range(table.num_rows):
        yield row_of(f"{file.name}:{index + 1}", utterance, index)


def ljspeech_parts(root: Path) -> list[Part]:
    """Return the parts of `metadata.csv` (`id|text[|normalized]`) and `wavs/`; `train.txt`,
    `dev.txt` (or `val.txt`, …) and `test.txt` next to them list the ids of each split."""
    metadata = root / "metadata.csv"
    if not metadata.is_file():
        raise DataError(f"{root}: no metadata.csv; an LJSpeech folder has metadata.csv and wavs/")
    lists = [root / f"{name}.txt" for name in SPLIT_LISTS if (root / f"{name}.txt").is_file()]
    stamp = " ".join(file_stamp(file) for file in (metadata, *lists))
    return [Part(metadata.name, partial(_ljspeech, metadata, lists), stamp)]


def _ljspeech(metadata: Path, lists: Sequence[Path]) -> Iterator[Row]:
    root, listed = metadata.parent, _listed_ids(lists)
    # split of the ids in no list
    rest = "train" if lists and all(split != "train" for split, _ in listed.values()) else None
    seen: set[str] = set()

    def utterance(text: str, source: str) -> Utterance:
        parts = text.split("|")
        if len(parts) not in (2, 3):
            raise BadRow(
                f"{len(parts)} fields, expected id|text or id|text|normalized (a table with a "
                "header: corpus=folder)",
                parts[0],
            )
        name = _id_of(parts[0])
        if not name:
            raise BadRow("the id is empty; the first field names the file in wavs/")
        seen.add(name)
        split = listed[name][0] if name in listed else rest
        if lists and split is None:
            raise BadRow(
                f"in none of {', '.join(file.name for file in lists)}; add it to one, or remove "
                "train.txt: then all that is in no other list is for training",
                name,
            )
        written = [Path(parts[0].strip())] if os.path.isabs(parts[0].strip()) else []
        audio = first_file(
            [*written, *(root / "wavs" / f"{name}{end}" for end in (".wav", "", *READ))]
        )
        return Utterance(
            name,
            parts[-1].strip() or parts[1].strip(),
            root.name,
            str(audio),
            split=split,
            source=source,
        )

    yield from line_rows(metadata, utterance)
    for name, (_, source) in listed.items():
        if name not in seen:
            yield Problem(
                name,
                source,
                "not in metadata.csv; each line of a list of ids must begin with one of its first "
                "fields",
            )


def _id_of(field: str) -> str:
    """Return the id in the first field of a line, which may name the file instead
    (`wavs/ID.wav`, `/data/wavs/ID`, `DUMMY/ID.wav` in lists for Tacotron 2)."""
    path = re.sub(
        r"^(?:.*/)?(?:wavs|DUMMY\d*)/|^\./", "", accents_of(field.strip())[0].replace("\\", "/")
    )
    stem, suffix = os.path.splitext(path)
    return stem if suffix.lower() in READ else path


def _listed_ids(lists: Sequence[Path]) -> dict[str, tuple[str, str]]:
    """Return id -> its split and the place that lists it. A line is an id, or begins with one as
    in lists for other programs (`wavs/ID.wav|text`). Raises DataError for an id in two places or
    a line that cannot be read."""
    listed: dict[str, tuple[str, str]] = {}
    for file in lists:
        for line, text, error in text_lines(file):
            source = f"{file}:{line}"
            name = _id_of(text.split("|")[0])
            if error is not None or not name:
                raise DataError(
                    f"{source}: {error or 'no id'}; write one id of metadata.csv per line"
                )
            if name in listed:
                raise DataError(
                    f"{source}: {name} is also listed in {listed[name][1]}; an utterance has one "
                    "split"
                )
            listed[name] = (canonical_split(file.stem), source)
    return listed


def jsonl_parts(root: Path) -> list[Part]:
    """Return the parts of one manifest, or of every `*.jsonl` of a folder."""
    files = files_in(root, ".jsonl") if root.is_dir() else [root]
    if not files:
        raise DataError(f"{root}: no .jsonl manifest in this folder")
    return [file_part(file, line_rows, partial(jsonl_utterance, file)) for file in files]


def jsonl_utterance(file: Path, text: str, source: str) -> Utterance:
    """Return the utterance of a line of the manifest `file`, which paths are relative to and
    whose name may give the split. Raises BadRow."""
    try:
        row: Any = json.loads(text)
    except ValueError as broken:
        raise BadRow(f"not valid JSON ({broken}); one flat object a line") from broken
    if not isinstance(row, dict):
        raise BadRow(
            f"a JSON {type(row).__name__}, expected an object with id, audio, text, speaker"
        )
    for key in ("id", "speaker"):
        if isinstance(row.get(key), int) and not isinstance(row[key], bool):
            row[key] = str(row[key])
    require_strings(row, REQUIRED)
    known = (*REQUIRED, *OPTIONAL, *STRETCH)
    note_unused(str(file), tuple(key for key in row if key not in known))
    for key in OPTIONAL:
        if row.get(key) is not None and not isinstance(row[key], str):
            raise BadRow(f"{key!r} must be a string, got {json.dumps(row[key])[:40]}", row["id"])
    if row.get("language") is not None and not row["language"].strip():
        raise BadRow("its language is empty; give a code of ISO 639, or omit the key", row["id"])
    split = canonical_split(row["split"]) if row.get("split") else known_split(file.stem)
    prompt = row.get("prompt_audio")
    return Utterance(
        row["id"],
        row["text"],
        row["speaker"],
        stretch_of(str(first_file([file.parent / row["audio"]])), row),
        split=split,
        prompt_audio=str(first_file([file.parent / prompt])) if prompt else None,
        prompt_text=row.get("prompt_text"),
        source=source,
        language=row.get("language") or "",
    )


def seed_tts_parts(list_file: Path) -> list[Part]:
    """Return the part of a seed-tts-eval `meta.lst`: `id|prompt text|prompt wav|text[|wav]`, with
    paths relative to the list.

    Without the fifth field the recording is `wavs/<id>.wav` next to the list, as in the published
    test sets.
    """
    if not list_file.is_file():
        raise DataError(f"{list_file}: not a file; give the list (meta.lst) of seed-tts-eval")
    return [file_part(list_file, line_rows, partial(_seed_tts, list_file.parent))]


def _seed_tts(folder: Path, text: str, source: str) -> Utterance:
    fields = [f.strip() for f in text.split("|")]
    if len(fields) not in (4, 5):
        raise BadRow(f"{len(fields)} fields, expected id|prompt text|prompt wav|text[|wav]")
    name, prompt_text, prompt_wav, spoken = fields[:4]
    if not name or not prompt_wav:
        raise BadRow("id and prompt wav must not be empty", name)
    wav = first_file([folder / (fields[4] if len(fields) == 5 else f"wavs/{name}.wav")])
    if not os.path.isfile(wav):
        raise BadRow(
            f"utterance {name} has no recording {wav}; the reference rows need it: unpack the wavs "
            "of the test set, or name them in a fifth field",
            name,
        )
    return Utterance(
        name,
        spoken,
        Path(prompt_wav).stem,
        str(wav),
        split="test",
        prompt_audio=str(first_file([folder / prompt_wav])),
        prompt_text=prompt_text,
        source=source,
    )
