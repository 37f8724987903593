"""Hugging Face datasets with an Audio column: on disk (memory-mapped) or streamed from files or
from the hub."""

import glob
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dcar.corpus.rows import (
    Part,
    Problem,
    Row,
    StoredAudio,
    Utterance,
    canonical_split,
    encoded_audio,
    files_in,
    known_split,
    note_one_speaker,
    note_unused,
)
from dcar.errors import DataError

logger = logging.getLogger(__name__)

TEXT_COLUMNS = tuple(
    "text_normalized normalized_text text sentence transcription transcript raw_text".split()
)
SPEAKER_COLUMNS = tuple(
    "speaker speaker_id client_id speaker_name spk spk_id reader_id speaker_label".split()
)
ID_COLUMNS = ("id", "utterance_id", "segment_id", "utt_id")
READ_AT_ONCE = 1000


def dataset_parts(path: str, streaming: bool = False) -> list[Part]:
    """Return one part per split, or, when streamed, one per file of a split.

    path: a `save_to_disk` folder, parquet file(s), or a hub name (`org/name[:config]`). Streaming
    stores nothing on disk (a `save_to_disk` folder is memory-mapped in either case). Raises
    DataError if it cannot be opened or lacks the columns.
    """
    loaded = _open(path, streaming)
    splits = loaded if isinstance(loaded, Mapping) else {None: loaded}
    parts = []
    for name, rows in splits.items():
        if hasattr(rows, "num_shards") and not hasattr(rows, "select"):
            columns = _columns(rows, path)
            for shard in range(rows.num_shards):
                piece = rows.shard(num_shards=rows.num_shards, index=shard)
                read = partial(_streamed, piece, columns, path, name, shard)
                parts.append(Part(f"{name or 'all'}-{shard:05d}", read, costly=True))
        else:
            parts.append(
                Part(
                    name or Path(path).name,
                    partial(_stored, rows, path, name),
                    getattr(rows, "_fingerprint", ""),
                )
            )
    return parts


def _columns(rows: Any, path: str) -> dict[str, str]:
    """Return the names of the columns of audio, text, speaker, id, split and language; "" for any
    of the last four that is absent."""
    import datasets

    features = rows.features
    if features is None:  # a streamed dataset without a declared schema: its first row shows them
        features = dict.fromkeys(next(iter(rows), {}))

    def first(names: tuple[str, ...]) -> str:
        return next((c for c in names if c in features), "")

    audio = next((c for c, f in features.items() if isinstance(f, datasets.Audio)), "audio")
    if audio not in features or not first(TEXT_COLUMNS):
        raise DataError(
            f"{path}: needs an Audio column and a text column ({', '.join(TEXT_COLUMNS)}); it has "
            f"{', '.join(features)}"
        )
    columns = {
        "audio": audio,
        "text": first(TEXT_COLUMNS),
        "speaker": first(SPEAKER_COLUMNS),
        "id": first(ID_COLUMNS),
        "split": first(("split",)),
        "language": first(("language",)),
    }
    note_unused(path, tuple(name for name in features if name not in columns.values()))
    return columns


def _utterance(
    row: Mapping[str, Any],
    columns: Mapping[str, str],
    audio: str | bytes | StoredAudio,
    default_id: str,
    split: str | None,
    source: str,
) -> Row:
    key, text, speaker, own = (columns[c] for c in ("id", "text", "speaker", "split"))
    uid = str(row[key]) if key and row[key] is not None else default_id
    if not isinstance(row[text], str):
        return Problem(
            uid, source, f"column {text!r} holds {type(row[text]).__name__}, expected a string"
        )
    who = row[speaker] if speaker else None
    if who is None:
        note_one_speaker(source.rpartition(":")[0])
    language = row[columns["language"]] if columns["language"] else ""
    return Utterance(
        uid,
        row[text],
        "unknown" if who is None else str(who),
        audio,
        split=canonical_split(str(row[own])) if own and row[own] else split,
        source=source,
        language=language if isinstance(language, str) else "",
    )


def _stored(rows: Any, path: str, name: str | None) -> Iterator[Row]:
    import datasets

    columns, label = _columns(rows, path), f"{path}[{name}]" if name else path
    audio = columns["audio"]
    # decode=False leaves the encoded bytes to our own reader: no torchcodec, and every bad row can
    # be named
    rows = rows.cast_column(audio, datasets.Audio(decode=False))
    split = canonical_split(name) if name else None
    wanted = [c for k, c in columns.items() if c and k != "audio"]
    for index, row in enumerate(_each(rows.select_columns(wanted))):
        source, default = f"{label}:{index + 1}", f"{name or Path(path).stem}_{index:07d}"
        if isinstance(row, str):
            yield Problem(default, source, row)
        else:
            yield _utterance(row, columns, StoredAudio(rows, index, audio), default, split, source)


def _each(rows: Any) -> Iterator[Mapping[str, Any] | str]:
    """Iterate over the rows of a dataset in order; a row that cannot be read is replaced by the
    reason."""
    for start in range(0, len(rows), READ_AT_ONCE):
        block = rows.select(range(start, min(start + READ_AT_ONCE, len(rows))))
        try:
            yield from block.to_list()
        except (OSError, ValueError, LookupError):  # pyarrow's errors are among them: find the row
            for index in range(len(block)):
                try:
                    yield block[index]
                except (OSError, ValueError, LookupError) as error:
                    yield f"cannot be read ({error}); write the dataset again"


def _streamed(
    rows: Any, columns: dict[str, str], path: str, name: str | None, shard: int
) -> Iterator[Row]:
    import datasets

    audio = columns["audio"]
    if rows.features is not None:
        rows = rows.cast_column(audio, datasets.Audio(decode=False))
    split = canonical_split(name) if name else None
    label = f"{path}[{name or 'all'}, file {shard}]"
    try:
        for index, row in enumerate(rows):
            source = f"{label}:{index + 1}"
            default = f"{name or Path(path).stem}_{shard:05d}_{index:07d}"
            if (sound := encoded_audio(row[audio])) is None:
                yield Problem(
                    default, source, f"column {audio!r} contains neither audio bytes nor a path"
                )
            else:
                yield _utterance(row, columns, sound, default, split, source)
    except (OSError, ValueError) as error:
        # a shard is read as a whole: the rows after a damaged one cannot be read either
        cause = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{label}: the stream broke off ({cause}); run again to continue"
        ) from error


def _open(path: str, streaming: bool) -> Any:
    """Open dataset(s) by split, or one without splits, of a save_to_disk folder, parquet file or
    folder, or hub name."""
    import datasets

    local = Path(path)
    try:
        if (local / "dataset_info.json").exists() or (local / "dataset_dict.json").exists():
            return datasets.load_from_disk(path)
        if not local.exists():
            name, _, config = path.partition(":")
            return datasets.load_dataset(name, config or None, streaming=streaming)
        # escaped, as datasets takes brackets in a path for a pattern
        files = {
            name: [glob.escape(str(f)) for f in shards]
            for name, shards in _parquet_by_split(local).items()
        }
        opened = {
            name: datasets.load_dataset(
                "parquet", data_files={"train": shards}, split="train", streaming=True
            )
            if streaming
            else datasets.Dataset.from_parquet(shards)
            for name, shards in files.items()
        }
        return opened.get("", opened)
    except DataError:
        raise
    except Exception as error:
        # datasets raises from many libraries; the cause is kept in the message
        name, hint = path.partition(":")[0], ""
        if not local.exists():
            hint = (
                f"; there is no such folder. If {name} is on the hub and this machine has no "
                f"network, run `hf download {name} --repo-type dataset --local-dir FOLDER` on one "
                "that has, and give FOLDER"
            )
        raise DataError(
            f"{path}: datasets cannot open it ({type(error).__name__}: {error}){hint}"
        ) from error


def _parquet_by_split(local: Path) -> dict[str, list[Path]]:
    """Return the files of every split, all under "" if nothing names one. A split is named by
    the file (`train-00000-of-00002.parquet`) or by a folder (`default/train/0000.parquet`, as
    the hub converts data sets), which may be in the folder of a configuration. Raises DataError
    for several configurations."""
    single = local.is_file()
    files = [local] if single else files_in(local, ".parquet", deep=True)
    if not files or (single and local.suffix.lower() != ".parquet"):
        raise DataError(f"{local}: neither a folder made by save_to_disk nor parquet files")
    splits: dict[str, list[Path]] = {}
    above = set()
    for file in files:
        name, place = _split_of_file(file, local.parent if single else local)
        splits.setdefault(name, []).append(file)
        above.add(place.parent if place.name == "data" else place)
    if not any(map(known_split, splits)):
        if len(folders := {file.parent for file in files}) > 1:
            logger.warning(
                "%s: the parquet files of %d folders are read as one corpus without splits, "
                "because no name is that of a split; give one folder as path to read it alone",
                local,
                len(folders),
            )
        return {"": files}
    if len(above) > 1:
        names = ", ".join(str(place.relative_to(local)) for place in sorted(above))
        raise DataError(
            f"{local}: contains {len(above)} configurations ({names}); give one as path, such as "
            f"{max(above)}"
        )
    return splits


def _split_of_file(file: Path, root: Path) -> tuple[str, Path]:
    """Return the split that a parquet file belongs to, or the name in its place, and the folder
    of its configuration."""
    label = file.stem.split("-0")[0]
    if known_split(label):
        return label, file.parent
    inside = [p for p in file.parents if p == root or root in p.parents]  # the innermost first
    for folder in inside:
        # of data sets too large to be converted as a whole
        name = folder.name.removeprefix("partial-")
        if known_split(name) and (folder != root or label.isdigit()):
            return name, folder.parent
    return (
        (file.parent.name, file.parent.parent)
        if label.isdigit() and len(inside) > 1
        else (label, file.parent)
    )
