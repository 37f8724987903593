"""What people have: a folder of recordings with their texts beside them, or a table with a header (CSV, TSV).

Recordings without a text are read with an empty one, which validation reports, unless `dcar prepare transcribe=…` has a
recogniser write it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dcar.corpus.huggingface import SPEAKER_COLUMNS, TEXT_COLUMNS
from dcar.corpus.rows import Part, Problem, Row, Utterance, canonical_split, file_stamp, is_file
from dcar.errors import DataError

READ = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au")
NOT_READ = (".m4a", ".aac", ".mp4", ".wma", ".amr", ".webm")
AUDIO_COLUMNS = ("audio", "path", "file", "file_name", "filename", "wav", "audio_file", "audio_path")
SPLITS = ("train", "dev", "test")


def folder_parts(root: Path) -> list[Part]:
    """A table, or a folder: with one table in it, or with recordings, each `NAME.wav` beside `NAME.txt`."""
    tables = [root] if root.is_file() else sorted([*root.glob("*.csv"), *root.glob("*.tsv")])
    if len(tables) > 1:
        raise DataError(f"{root}: holds {len(tables)} tables ({', '.join(t.name for t in tables[:5])}); give one as "
                        "path")
    if tables:
        return [Part(tables[0].name, partial(_table, tables[0]), file_stamp(tables[0]))]
    files = sorted(f for f in root.rglob("*") if f.suffix.lower() in (*READ, *NOT_READ, ".txt") and f.is_file())
    if not any(f.suffix.lower() != ".txt" for f in files):
        raise DataError(f"{root}: no recordings in it ({', '.join(READ)}) and no table (.csv, .tsv)")
    return [Part(root.name, partial(_recordings, root, files), "\n".join(f"{f} {file_stamp(f)}" for f in files))]


def _recordings(root: Path, files: list[Path]) -> Iterator[Row]:
    spoken = {f.with_suffix("") for f in files if f.suffix.lower() != ".txt"}
    for file in files:
        folders = list(file.relative_to(root).parts[:-1])
        name = "-".join([*folders, file.stem])
        if file.suffix.lower() == ".txt":
            whose = file.with_name(file.name.removesuffix(".txt").removesuffix(".normalized"))
            if whose not in spoken and file.stem.lower() not in ("readme", "license", "licence"):
                yield Problem(name, str(file), "a text without a recording of that name beside it")
            continue
        split = canonical_split(folders[0]) if folders else ""
        if split in SPLITS:
            folders = folders[1:]
        try:
            text = next((f.read_text(encoding="utf-8-sig") for f in (
                file.with_suffix(".normalized.txt"), file.with_suffix(".txt")) if is_file(f)), "")
        except UnicodeDecodeError as error:
            yield Problem(name, str(file), f"its text is not UTF-8 (byte {error.start + 1}); save it as UTF-8")
            continue
        yield _row(name, text, folders[0] if folders else root.name, file, split if split in SPLITS else None,
                   str(file))


def _row(name: str, text: str, speaker: str, file: Path, split: str | None, source: str) -> Row:
    if file.suffix.lower() in NOT_READ:
        return Problem(name, source, f"{file.suffix} is not read; convert it: ffmpeg -i \"{file}\" "
                                     f"\"{file.with_suffix('.wav')}\"")
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
        try:
            for cells in rows:
                source = f"{file}:{rows.line_num}"
                if not any(cells):
                    continue
                if len(cells) != len(header):
                    yield Problem(cells[0], source, f"{len(cells)} fields, the header has {len(header)}; fields with "
                                                    "a comma stand in quotes")
                    continue

                def cell(at: int | None, cells: list[str] = cells) -> str:
                    return "" if at is None else cells[at].strip()

                if not cell(audio):
                    yield Problem(cell(own), source, f"no recording in the column {header[audio]}")
                    continue
                found = _found(file.parent, cell(audio))
                yield _row(cell(own) or Path(cell(audio)).stem, cell(text), cell(speaker) or file.parent.name, found,
                           canonical_split(cell(split)) if cell(split) else None, source)
        except csv.Error as error:
            yield Problem("", f"{file}:{rows.line_num}", f"not a table ({error}); save it as CSV with a header")


def _found(folder: Path, name: str) -> Path:
    """A recording as a table names it: beside the table, or in the folder where such corpora keep them."""
    places = [folder / sub / f"{name}{end}" for end in ("", ".wav", ".flac", ".mp3") for sub in ("", "wavs", "clips")]
    return next((place for place in places if is_file(place)), places[0])
