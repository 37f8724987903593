"""What people have: a folder of recordings with their texts beside them, or a table with a header (CSV, TSV).

Recordings without a text are read with an empty one, which validation reports, unless `dcar prepare transcribe=…` has a
recogniser write it.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dcar.corpus.huggingface import SPEAKER_COLUMNS, TEXT_COLUMNS
from dcar.corpus.rows import (
    BadRow,
    Part,
    Problem,
    Row,
    Utterance,
    canonical_split,
    file_part,
    file_stamp,
    first_file,
    known_split,
    row_of,
)
from dcar.errors import DataError

READ = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au")
NOT_READ = (".m4a", ".aac", ".mp4", ".wma", ".amr", ".webm")
AUDIO_COLUMNS = ("audio", "path", "file", "file_name", "filename", "wav", "audio_file", "audio_path")


def folder_parts(root: Path) -> list[Part]:
    """A table, or a folder: with one table in it, or with recordings, each `NAME.wav` beside `NAME.txt`."""
    tables = [root] if root.is_file() else sorted([*root.glob("*.csv"), *root.glob("*.tsv")])
    if len(tables) > 1:
        raise DataError(f"{root}: holds {len(tables)} tables ({', '.join(t.name for t in tables[:5])}); give one as "
                        "path")
    if tables:
        return [file_part(tables[0], _table)]
    files = sorted(f for f in root.rglob("*") if f.suffix.lower() in (*READ, *NOT_READ, ".txt") and f.is_file())
    if not any(f.suffix.lower() != ".txt" for f in files):
        raise DataError(f"{root}: no recordings in it ({', '.join(READ)}) and no table (.csv, .tsv)")
    return [Part(root.name, partial(_recordings, root, files), "\n".join(f"{f} {file_stamp(f)}" for f in files))]


def _recordings(root: Path, files: list[Path]) -> Iterator[Row]:
    spoken = {f.with_suffix("") for f in files if f.suffix.lower() != ".txt"}
    for file in files:
        if file.suffix.lower() != ".txt":
            yield row_of(str(file), _recording, root, file)
            continue
        whose = file.with_name(file.name.removesuffix(".txt").removesuffix(".normalized"))
        if whose not in spoken and file.stem.lower() not in ("readme", "license", "licence"):
            yield Problem(_name(root, file), str(file), "a text without a recording of that name beside it")


def _name(root: Path, file: Path) -> str:
    return "-".join([*file.relative_to(root).parts[:-1], file.stem])


def _recording(root: Path, file: Path, source: str) -> Utterance:
    name, folders = _name(root, file), list(file.relative_to(root).parts[:-1])
    split = known_split(folders[0]) if folders else None
    if split is not None:
        folders = folders[1:]
    try:
        text = next((f.read_text(encoding="utf-8-sig") for f in (
            file.with_suffix(".normalized.txt"), file.with_suffix(".txt")) if os.path.isfile(f)), "")
    except UnicodeDecodeError as error:
        raise BadRow(f"its text is not UTF-8 (byte {error.start + 1}); save it as UTF-8", name) from error
    return _utterance(name, text, folders[0] if folders else root.name, file, split, source)


def _utterance(name: str, text: str, speaker: str, file: Path, split: str | None, source: str) -> Utterance:
    if file.suffix.lower() in NOT_READ:
        wav = file.with_suffix(".wav")
        raise BadRow(f'{file.suffix} is not read; convert it: ffmpeg -i "{file}" "{wav}"', name)
    return Utterance(name, " ".join(text.split()), speaker, str(file), split=split, source=source)


def _table(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as handle:
        first = handle.readline()
        handle.seek(0)
        rows = csv.reader(handle, delimiter=max(",;\t|", key=first.count))
        header = [name.strip().lower() for name in next(rows, [])]

        def column(names: tuple[str, ...]) -> int | None:
            return next((header.index(name) for name in names if name in header), None)

        audio, text, speaker = column(AUDIO_COLUMNS), column(TEXT_COLUMNS), column(SPEAKER_COLUMNS)
        own, split = column(("id",)), column(("split",))
        if audio is None:
            raise DataError(f"{file}:1: no column with recordings ({', '.join(AUDIO_COLUMNS)}); the first line is a "
                            f"header, and it says {', '.join(header)[:100]}")

        def utterance(cells: list[str], source: str) -> Utterance:
            if len(cells) != len(header):
                raise BadRow(f"{len(cells)} fields, the header has {len(header)}; fields with a comma stand in quotes",
                             cells[0])
            name, said, who, recording, of = (
                "" if at is None else cells[at].strip() for at in (own, text, speaker, audio, split))
            if not recording:
                raise BadRow(f"no recording in the column {header[audio or 0]}", name)
            # beside the table, or in the folder where such corpora keep them
            found = first_file([file.parent / folder / f"{recording}{end}" for end in ("", ".wav", ".flac", ".mp3")
                                for folder in ("", "wavs", "clips")])
            return _utterance(name or Path(recording).stem, said, who or file.parent.name, found,
                              canonical_split(of) if of else None, source)

        try:
            yield from (row_of(f"{file}:{rows.line_num}", utterance, cells) for cells in rows if any(cells))
        except csv.Error as error:
            yield Problem("", f"{file}:{rows.line_num}", f"not a table ({error}); save it as CSV with a header")
