"""A prepared corpus on disk: its columns, how it is written (completely or not at all) and read
(with checks).

<dir>/prepared.json      corpus, name and checksum of the tokenizer, version of the phonemes,
                         counts, digests of the files
<dir>/{train,dev,test}/  Hugging Face datasets with the columns of `features()`, and
                         columns.feather: a few numbers per row, by which commands choose the
                         rows that they read (columns.py)

Ids are stored in the smallest unsigned integers that hold their vocabulary. Loading a split
compares the sizes of its files with prepared.json and, once per process, the digests of files up to
`MOST_DIGESTED` (about a second).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from dcar.errors import DataError, check_format
from dcar.prepare.columns import Split, read_columns, scan, write_columns
from dcar.sources.shipped import resolve
from dcar.storage import digest, digest_once, file_differences, files_of, gigabytes, writing
from dcar.text.base import SymbolUnits
from dcar.text.languages import DEFAULT
from dcar.text.units import Characters, is_phonemes, units_for, units_named
from dcar.tokens.origin import Origin, TokenizerInfo
from dcar.tracking import write_json

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3

TEXT_ID, SPEECH_TOKEN = "text id", "speech token"
COLUMNS: dict[str, str | list[str]] = {
    "id": "string",
    "text": "string",
    "speaker": "string",
    "text_ids": [TEXT_ID],
    "speech": [SPEECH_TOKEN],
    # [298]: speaker embedding [256] and the vocoder's other features, see speaker_features
    "voice": ["float32"],
    "duration": "float32",  # seconds, at the row's speed
    "speed": "float32",
    # absolute path of the recording, "" if the corpus embeds it (see source_utterances)
    "audio": "string",
    "source": "string",  # file:line
    # the three prompt columns are "" or [] if the corpus names no prompt
    "prompt_text": "string",
    "prompt_speech": [SPEECH_TOKEN],
    "prompt_voice": ["float32"],
}
RESIDUAL_COLUMNS: dict[str, str | list[str]] = {
    # codes [layers - 1, T] of the other layers, layer by layer, see residual_of
    "residual": [SPEECH_TOKEN],
    "prompt_residual": [SPEECH_TOKEN],
}
"""Further columns of a corpus that was prepared with `residual=true`; its prepared.json has
tokenizer.layers."""


LANGUAGE_COLUMNS: dict[str, str | list[str]] = {
    "language": "string",  # code of ISO 639
    "prompt_text_ids": [TEXT_ID],
}
"""Further columns of a corpus that is not in the language of the shipped one."""


def integer_type(size: int) -> str:
    """Return the smallest unsigned integer type for ids 0…size−1."""
    if size <= 1 << 8:
        return "uint8"
    return "uint16" if size <= 1 << 16 else "uint32"


def features(
    speech_size: int, text_size: int = 0, residual: bool = False, language: bool = False
) -> datasets.Features:
    """Return the columns of a prepared split.

    speech_size: number of speech codes per layer. text_size: number of text ids; 0 = that of the
    default language's phonemes. residual: include `RESIDUAL_COLUMNS`, language: `LANGUAGE_COLUMNS`.
    """
    import datasets

    text_size = text_size or units_for().size
    types = {SPEECH_TOKEN: integer_type(speech_size), TEXT_ID: integer_type(text_size)}
    columns: dict[str, Any] = {}
    further = (RESIDUAL_COLUMNS if residual else {}) | (LANGUAGE_COLUMNS if language else {})
    for name, kind in (COLUMNS | further).items():
        if isinstance(kind, list):
            columns[name] = datasets.List(datasets.Value(types.get(kind[0], kind[0])))
        else:
            columns[name] = datasets.Value(kind)
    return datasets.Features(columns)


def names_language(units: SymbolUnits | None) -> bool:
    """Return True if prepared rows have `LANGUAGE_COLUMNS`. units: of their text ids, None for
    those that are collected from the corpus."""
    return units is None or units.languages != (DEFAULT,)


def check_out_dir(out: Path, read: str | Path = "") -> None:
    """Raise DataError if writing to `out` would destroy anything other than a prepared corpus,
    or the corpus that is `read`."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; choose a folder for out")
    if out.is_dir() and any(out.iterdir()) and not (out / "prepared.json").is_file():
        raise DataError(
            f"{out}: contains other files and no prepared.json; choose a new folder for out"
        )
    if read and out.exists() and out.resolve() == prepared_folder(read).resolve():
        raise DataError(f"{out}: is the corpus that is read; choose another folder for out")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`, or None if the file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None  # ValueError: no JSON, or not UTF-8
    return value if isinstance(value, dict) else None


def assemble(
    out: Path,
    work: Path,
    shards: Mapping[str, Sequence[Path]],
    record: Mapping[str, Any],
    units: SymbolUnits | None,
    compress: bool = False,
) -> None:
    """Build datasets from the shards of every split in a hidden folder, rename it to `out` and
    remove the shards.

    One shard is in memory at a time. `record` goes into prepared.json, with the format version, the
    text units and the counts of each split. units: of the text ids in the shards; None = there are
    none yet, and the characters of all texts become the inventory. compress: write smaller files,
    which are read into memory instead of being memory-mapped. Raises StorageError if they cannot be
    written.
    """
    building = work / f"building.{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    made_by = record["tokenizer"]
    language, missing = names_language(units), None
    if units is None:
        by_split = {split: _characters(files) for split, files in shards.items()}
        units = missing = _collected(by_split.values())
        untrained = set(units.symbols) - set(_collected([by_split.get("train", NOTHING)]).symbols)
        if untrained and shards.get("train"):
            logger.warning(
                "%s: no training text has the characters %s, so decoders will not learn to read "
                "them",
                out,
                " ".join(sorted(untrained)),
            )
    columns = features(
        made_by["vocab_size"],
        units.size,
        residual="layers" in made_by,
        language=language,
    )
    with writing(out):
        for split, files in shards.items():
            (building / split).mkdir(parents=True)
            _join(files, building / split / TABLE, columns, compress, missing)
            _describe_dataset(building / split, columns, f"{record['fingerprint']}/{split}")
        phonemes: dict[str, Any] = {"version": units.name, "size": units.size}
        if isinstance(units, Characters):
            phonemes |= units.stored()
        about = {"phonemes": phonemes, "languages": list(units.languages)}
        put_in_place(building, out, list(shards), {**about, **record})


NOTHING: tuple[set[str], set[str]] = (set(), set())


def _collected(read: Iterable[tuple[set[str], set[str]]]) -> Characters:
    """Return the units of characters and languages, those of several splits."""
    characters, languages = (set().union(*sets) for sets in zip(*read, strict=True))
    return Characters.collected(characters, sorted(languages))


def _characters(files: Sequence[Path]) -> tuple[set[str], set[str]]:
    """Return the characters and the languages of the texts of shards."""
    import pyarrow.parquet as pq

    texts: set[str] = set()
    languages: set[str] = set()
    for file in files:
        table = pq.read_table(file, columns=["text", "prompt_text", "language"])
        texts |= {c for name in ("text", "prompt_text") for t in table[name].to_pylist() for c in t}
        languages |= set(table["language"].to_pylist())
    return texts, languages


def put_in_place(building: Path, out: Path, splits: Sequence[str], info: Mapping[str, Any]) -> None:
    """Turn the splits in the folder `building` into the corpus `out`, with columns and
    prepared.json; the former content of `out` and the shards are removed.

    info: content of prepared.json without the counts, the version and the digests.
    """
    import datasets

    counts = {}
    for split in splits:
        table = scan(datasets.Dataset.load_from_disk(str(building / split)))
        write_columns(building / split, table)
        counts[split] = {
            "utterances": len(table),
            "seconds": round(sum(table["duration"].to_pylist()), 2),
            "speakers": len(table["speaker"].unique()),
            "tokens": sum(table["speech_tokens"].to_pylist()),
        }
    about = {"counts": counts, "format_version": FORMAT_VERSION}
    digests = {name: digest(building / name) for name in files_of(building)}
    write_json(building / "prepared.json", {**info, **about, "files": digests})
    if out.exists():
        os.rename(out, building.with_name(f"old.{os.getpid()}"))
    os.rename(building, out)
    clean_up(out)


def save_splits(
    out: Path, splits: Iterable[tuple[str, datasets.Dataset]], info: Mapping[str, Any]
) -> None:
    """Write splits made from another prepared corpus, each by name, as the corpus `out`, completely
    or not at all.

    info: content of prepared.json without the counts, the version and the digests. Raises
    StorageError if it cannot be written.
    """
    building = partial_folder(out) / "building"
    shutil.rmtree(building, ignore_errors=True)
    names = []
    with writing(out), without_bars():
        for split, rows in splits:
            rows.save_to_disk(str(building / split))
            names.append(split)
        put_in_place(building, out, names, info)


@contextmanager
def without_bars() -> Iterator[None]:
    """Switch off the bars of `datasets`, one for every table that it writes, within the block."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


TABLE = "data-00000-of-00001.arrow"


def _describe_dataset(folder: Path, columns: datasets.Features, made_from: str) -> None:
    """Write the files next to a split's table with which `datasets.load_from_disk` opens it."""
    import datasets

    datasets.DatasetInfo(features=columns).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": TABLE}],
        "_fingerprint": hashlib.sha256(made_from.encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    write_json(folder / "state.json", state)


def partial_folder(out: Path) -> Path:
    """Return the folder of the shards, which exists until the datasets of `out` are assembled."""
    return out.parent / f".{out.name}.partial"


def clean_up(out: Path) -> None:
    """Remove the shards, including those of earlier settings, whose datasets are now replaced.

    Also called if `out` is found finished, because the run that finished it may have been killed
    before this step.
    """
    shutil.rmtree(partial_folder(out), ignore_errors=True)


def _join(
    files: Sequence[Path],
    table_file: Path,
    columns: datasets.Features,
    compress: bool,
    units: SymbolUnits | None,
) -> None:
    """Write parquet shards as one Arrow stream, shard by shard. units: of the text ids, if the
    shards have none yet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = columns.arrow_schema
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 19) if compress else None)
    with (
        pa.OSFile(str(table_file), "wb") as sink,
        pa.ipc.new_stream(sink, schema, options=options) as writer,
    ):
        for file in files:
            table = pq.read_table(file)
            if units is not None:
                table = _with_ids(table, units)
            writer.write_table(table.select(schema.names).cast(schema))


def _with_ids(table: pa.Table, units: SymbolUnits) -> pa.Table:
    """Return a shard with the ids of its texts and of its prompts' texts."""
    import pyarrow as pa

    for texts, name in (("text", "text_ids"), ("prompt_text", "prompt_text_ids")):
        ids = [units(text) if text else [] for text in table[texts].to_pylist()]
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pa.array(ids, pa.list_(pa.uint32())))
    return table


def copy_name(name: str, speed: float) -> str:
    """Return the name of an utterance or a speaker at a speed: NAME, or NAME@SPEED for a copy at
    a speed other than 1."""
    return name if speed == 1.0 else f"{name}@{speed:g}"


def recording_of(row: Mapping[str, Any]) -> tuple[str, float]:
    """Return the id of the corpus utterance whose recording a prepared row was made from, and
    the speed at which it is played."""
    speed = round(float(row["speed"]), 6)  # stored as float32
    return row["id"].removesuffix(copy_name("", speed)), speed


def residual_of(row: Mapping[str, Any], prompt: bool = False) -> np.ndarray:
    """Return the codes [layers - 1, T] int64 of the layers after the first of a prepared row.

    prompt: return those of the row's own prompt instead. Raises DataError if there are none, or if
    their number is not a multiple of the number of speech tokens T.
    """
    name = "prompt_residual" if prompt else "residual"
    codes, frames = row.get(name, ()), len(row["prompt_speech" if prompt else "speech"])
    if not len(codes):
        raise DataError(
            f"utterance {row['id']}: has no codes in the column {name!r}; prepare the corpus with "
            "residual=true and a codec of several layers"
        )
    if not frames or len(codes) % frames:
        raise DataError(
            f"utterance {row['id']}: {len(codes)} codes in the column {name!r} for {frames} "
            "speech tokens, not a multiple of them; prepare the corpus again"
        )
    return np.asarray(codes, dtype=np.int64).reshape(-1, frames)


def without_residual(rows: datasets.Dataset) -> datasets.Dataset:
    """Return a data set without `RESIDUAL_COLUMNS`, for speech that the codec did not make."""
    stored = [name for name in RESIDUAL_COLUMNS if name in rows.column_names]
    return rows.remove_columns(stored) if stored else rows


def with_recorded(rows: datasets.Dataset) -> datasets.Dataset:
    """Return a data set with the column `recorded`, from whose tokens prompts are taken (see
    `dcar distil`). Rows of a corpus without it are recordings themselves."""
    if "recorded" in rows.column_names:
        return rows
    speech = rows.data.column("speech")
    return rows.add_column("recorded", speech, feature=rows.features["speech"])


def note_equal_speakers(
    corpora: Sequence[Mapping[str, Any]], speakers: Sequence[Iterable[str]]
) -> None:
    """Log the names that speakers of different corpora share, since each name counts as one
    person; corpora made from the same recordings may share all of them."""
    by_name: dict[str, Mapping[str, Any]] = {}
    shared = {
        name
        for corpus, names in zip(corpora, speakers, strict=True)
        for name in names
        if by_name.setdefault(name, corpus) != corpus
    }
    if shared:
        logger.warning(
            "%d speakers have the same name in several corpora and count as one person each: %s; "
            "if they are not, prepare one of the corpora again with other names",
            len(shared),
            shorten(", ".join(sorted(shared)), 200),
        )


@dataclass(frozen=True)
class PreparedInfo(Origin):
    """Content of a prepared corpus' prepared.json."""

    corpus: dict[str, Any]  # that was prepared: the arguments of `read_corpus`
    counts: dict[str, dict[str, Any]]  # by split: utterances, seconds, speakers, tokens
    files: dict[str, Any]  # name -> `digest`
    content: dict[str, Any]  # everything, as it was written

    @property
    def units(self) -> SymbolUnits:
        """Units of its text ids, if they are phonemes or characters. Raises CheckpointError if an
        installed package has others, AssetError without it."""
        about = self.content["phonemes"]
        if "symbols" in about:
            return Characters(about["symbols"], about["languages"])
        return units_named(self.phonemes)


def prepared_folder(directory: str | Path) -> Path:
    """Return the folder of a prepared corpus, given the folder or "starter" for the one that
    ships."""
    return resolve(str(directory), "prepared")


def prepared_info(directory: str | Path) -> PreparedInfo:
    """Return the content of a prepared corpus' prepared.json. Raises DataError if the folder is
    not a prepared corpus or was made by another version of this project."""
    directory = prepared_folder(directory)
    content = read_json(directory / "prepared.json")
    if content is None:
        raise DataError(
            f"{directory}: has no readable prepared.json; run `dcar prepare` with "
            f"out={directory}, or use starter, the corpus that ships"
        )
    version = content.get("format_version")
    check_format(directory / "prepared.json", version, FORMAT_VERSION, DataError, "prepare again")
    try:
        tokenizer, inventory = TokenizerInfo(**content["tokenizer"]), content["phonemes"]["version"]
        corpus, counts, files = (content[name] for name in ("corpus", "counts", "files"))
        languages = tuple(content.get("languages", [DEFAULT]))
        info = PreparedInfo(
            tokenizer, inventory, corpus, counts, files, content, languages=languages
        )
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{directory}: prepared.json is incomplete ({error}); prepare again"
        ) from error
    # other units need what they were made with only where texts are read again
    if languages == (DEFAULT,) and is_phonemes(inventory) and inventory != units_for().name:
        raise DataError(
            f"{directory}: has the phoneme inventory {inventory}, but this version uses "
            f"{units_for().name}; prepare again"
        )
    return info


def load_prepared(directory: str | Path, split: str) -> datasets.Dataset:
    """Return one split of a prepared corpus, memory-mapped. Raises DataError if the phoneme
    inventory differs from this version's, or if the split is missing or damaged."""
    import datasets

    info, directory = prepared_info(directory), prepared_folder(directory)
    folder = directory / split
    if split not in info.counts or not folder.is_dir():
        raise DataError(
            f"{directory}: has no split {split!r}; choose from {', '.join(info.counts)}"
        )
    if damaged := split_faults(directory, info, split, digests=True):
        raise DataError(
            f"{directory}: {'; '.join(damaged)}: the files have changed since they were written; "
            "prepare again, or copy the folder again from its origin (`dcar doctor` lists the "
            "differences)"
        )
    return datasets.Dataset.load_from_disk(str(folder))


def load_split(directory: str | Path, split: str) -> Split:
    """Return one split of a prepared corpus with the columns of all its rows, memory-mapped.
    Raises the errors of `load_prepared`."""
    rows = load_prepared(directory, split)
    return Split.of(rows, read_columns(prepared_folder(directory) / split, rows))


MOST_DIGESTED = 1 << 30
"""Largest file, in bytes, whose digest is checked when it is loaded; `dcar doctor` checks larger
ones."""


def split_faults(
    directory: Path, info: PreparedInfo, split: str, digests: bool = False
) -> list[str]:
    """Return the differences between the files of a split and the list in prepared.json: in
    sizes, and in digests if `digests` is true."""
    files = {name: entry for name, entry in info.files.items() if name.startswith(f"{split}/")}
    if not files:
        return [f"prepared.json lists no file of {split}"]
    return file_differences(directory, files, _digest_of if digests else lambda path: None)


def _digest_of(path: Path) -> dict[str, Any] | None:
    """Return the digest of a file, or None if it is too large to be read at every start."""
    size = path.stat().st_size
    if size <= MOST_DIGESTED:
        return digest_once(path)
    logger.info(
        "%s: %s; checked only its size, `dcar doctor` reads the whole file", path, gigabytes(size)
    )
    return None
