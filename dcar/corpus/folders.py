"""Plain folders: recordings with their texts next to them, or a table with a header (CSV, TSV).

Recordings without a text are read with an empty one, which validation reports, unless `dcar prepare
recognizer=…` transcribes them.
"""

import csv
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from dcar.corpus.huggingface import ID_COLUMNS, SPEAKER_COLUMNS, TEXT_COLUMNS
from dcar.corpus.libritts import SUBSETS
from dcar.corpus.rows import (
    READ,
    STRETCH,
    AudioSegment,
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
    note_one_speaker,
    note_unused,
    row_of,
    stretch_of,
)
from dcar.errors import DataError

logger = logging.getLogger(__name__)

AUDIO_COLUMNS = (
    "audio path file file_name filename wav audio_file audio_path audio_filepath "
    "wav_path wav_filename file_path filepath"
).split()


def folder_parts(root: Path) -> list[Part]:
    """Return the parts of a table, or of a folder with one table in it (also a `.txt` file with the
    header of one) or with recordings, each `NAME.wav` next to `NAME.txt`."""
    tables = [root] if root.is_file() else files_in(root, ".csv", ".tsv")
    recordings, texts = ([], {}) if tables else recordings_in(root)
    if not tables:
        alone = _texts_alone(recordings, texts)
        tables = [file for file in alone if file.parent == root and _is_table(file)]
    if len(tables) > 1:
        raise DataError(
            f"{root}: contains {len(tables)} tables ({', '.join(t.name for t in tables[:5])}); "
            "give one as path"
        )
    if tables:
        return [file_part(tables[0], _table)]
    if not recordings:
        raise DataError(
            f"{root}: contains no recordings ({', '.join(READ)}) and no table (.csv, .tsv)"
        )
    tops = {top for f in recordings for top in f.relative_to(root).parts[:-1][:1]}
    splits = {top for top in tops if _split_of_folder(top)}
    if splits and tops - splits:
        logger.warning(
            "%s: the folders %s are read as splits, the others (%s) as speakers; rename a speaker "
            "whose name is that of a split",
            root,
            ", ".join(sorted(splits)),
            ", ".join(sorted(tops - splits)[:5]),
        )
    stamp = "\n".join(f"{f} {file_stamp(f)}" for f in sorted([*recordings, *texts.values()]))
    return [Part(root.name, partial(_recordings, root, recordings, texts), stamp)]


def recordings_in(root: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the recordings in a folder and its subfolders, and the text of each that has one,
    by `_stem` of the recording; `NAME.normalized.txt` takes precedence over
    `NAME.txt`."""
    files = files_in(root, *READ, ".txt", deep=True)
    texts = {
        _stem(f, end): f
        for end in (".txt", ".normalized.txt")
        for f in files
        if f.name.lower().endswith(end)
    }
    return [f for f in files if f.suffix.lower() != ".txt"], texts


def _stem(file: Path, ending: str) -> str:
    """Return the path of a file without its ending, with composed accents (NFC): recording and text
    may be written in different ways."""
    return accents_of(str(file)[: -len(ending)])[0]


def read_beside(recording: Path, texts: Mapping[str, Path]) -> str:
    """Return the text of a recording, "" if there is none. Raises UnicodeDecodeError if it is
    not UTF-8."""
    text = texts.get(_stem(recording, recording.suffix))
    return " ".join(text.read_text(encoding="utf-8-sig").split()) if text else ""


def _split_of_folder(name: str) -> str | None:
    """Return the split of a folder whose name is exactly that of a split, or of a subset of
    LibriTTS; Testa and dev_patel are speakers."""
    return known_split(name) if name.isalpha() or name.lower() in SUBSETS else None


def _recordings(root: Path, recordings: Sequence[Path], texts: Mapping[str, Path]) -> Iterator[Row]:
    for file in recordings:
        yield row_of(str(file), _recording, root, texts, file)
    for file in _texts_alone(recordings, texts):
        if file.stem.lower() not in ("readme", "license", "licence"):
            yield Problem(
                _name(root, file), str(file), "text without a recording of the same name next to it"
            )


def _texts_alone(recordings: Sequence[Path], texts: Mapping[str, Path]) -> list[Path]:
    """Return the texts that have no recording next to them."""
    spoken = {texts.get(_stem(file, file.suffix)) for file in recordings}
    return sorted(set(texts.values()) - spoken)


def _name(root: Path, file: Path) -> str:
    return "-".join([*file.relative_to(root).parts[:-1], file.stem])


def _recording(root: Path, texts: Mapping[str, Path], file: Path, source: str) -> Utterance:
    name, folders = _name(root, file), list(file.relative_to(root).parts[:-1])
    split = _split_of_folder(folders[0]) if folders else None
    if split is not None:
        folders = folders[1:]
    try:
        text = read_beside(file, texts)
    except UnicodeDecodeError as error:
        raise BadRow(
            f"its text is not UTF-8 (byte {error.start + 1}); save it as UTF-8", name
        ) from error
    return _utterance(name, text, folders[0] if folders else root.name, str(file), split, source)


def _utterance(
    name: str,
    text: str,
    speaker: str,
    audio: str | AudioSegment,
    split: str | None,
    source: str,
) -> Utterance:
    return Utterance(name, " ".join(text.split()), speaker, audio, split=split, source=source)


def _is_table(file: Path) -> bool:
    """Return True for a text file whose first line is the header of a table of recordings."""
    with file.open(encoding="utf-8-sig", errors="replace") as handle:
        first = handle.readline()
    names = set(_names(first.split(_delimiter(first))))
    return bool(names & set(AUDIO_COLUMNS) and names & set(TEXT_COLUMNS))


def _delimiter(first: str) -> str:
    return max(",;\t|", key=first.count)


def _names(cells: Sequence[str]) -> list[str]:
    """Return the names of columns, in the form in which they are looked up."""
    return [name.strip().strip('"').lower() for name in cells]


def _table(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as handle:
        first = handle.readline()
        handle.seek(0)
        lines = _lines(handle, _delimiter(first), first.startswith('"'))
        header = _names(next(lines, (1, [], ""))[1])

        def column(names: Sequence[str]) -> int | None:
            return next((header.index(name) for name in names if name in header), None)

        audio, text, speaker = column(AUDIO_COLUMNS), column(TEXT_COLUMNS), column(SPEAKER_COLUMNS)
        own, split, language = column(ID_COLUMNS), column(("split",)), column(("language",))
        if audio is None:
            raise DataError(
                f"{file}:1: no column with recordings ({', '.join(AUDIO_COLUMNS)}); the first "
                f"line must be a header, and it contains {', '.join(header)[:100]}"
            )

        stretch = {header.index(n): n for n in STRETCH if n in header}
        used = {audio, text, speaker, own, split, language, *stretch}
        note_unused(str(file), tuple(n for at, n in enumerate(header) if at not in used))

        def place(recording: str) -> Path:
            """Return the path next to the table, or in the folder where such corpora keep
            recordings."""
            return first_file(
                [
                    file.parent / folder / f"{recording}{end}"
                    for end in ("", *READ)
                    for folder in ("", "wavs", "clips")
                ]
            )

        def utterance(cells: list[str], source: str) -> Utterance:
            if len(cells) != len(header):
                raise BadRow(
                    f"{len(cells)} fields, the header has {len(header)}; fields with a comma stand "
                    "in quotes (in tables separated by tabs or bars quotes are part of the text)",
                    cells[0],
                )
            name, said, who, recording, of = (
                "" if at is None else cells[at].strip() for at in (own, text, speaker, audio, split)
            )
            if not recording:
                raise BadRow(f"no recording in the column {header[audio or 0]}", name)
            if not who:
                note_one_speaker(str(file))
            made = _utterance(
                name or Path(recording).stem,
                said,
                who or file.parent.name,
                stretch_of(
                    str(place(recording)), {name: cells[at] for at, name in stretch.items()}
                ),
                canonical_split(of) if of else None,
                source,
            )
            return made if language is None else replace(made, language=cells[language].strip())

        for number, cells, fault in lines:
            source = f"{file}:{number}"
            if fault:
                yield Problem("", source, fault)
            elif any(cells):
                yield row_of(source, utterance, cells)


def _lines(handle: TextIO, delimiter: str, quoted: bool) -> Iterator[tuple[int, list[str], str]]:
    """Iterate over (line number, cells, fault) of the lines of a table, each of which is a row.
    Fields may be quoted in tables separated by commas or semicolons (RFC 4180), and in others if
    their header has quotes (`quoted`); otherwise a quote is an ordinary character."""
    for number, line in enumerate(handle, 1):
        text = line.rstrip("\r\n")
        if delimiter in "\t|" and not quoted:
            yield number, text.split(delimiter), ""
            continue
        try:
            yield number, next(csv.reader([text], delimiter=delimiter, strict=True), []), ""
        except csv.Error as error:
            fault = (
                f"a quote is not closed as it should be ({error}); put the field in quotes, every "
                "quote in it twice, all in one line"
            )
            yield number, [], fault
