"""A prepared corpus on disk: its columns, how it is written (whole or not at all) and read (checked).

<dir>/prepared.json      corpus, tokenizer name and checksum, phoneme inventory version, counts, digests of the files
<dir>/{train,dev,test}/  Hugging Face datasets with the columns of `features()`
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcar.corpus.read import Utterance, read_corpus
from dcar.errors import DataError
from dcar.storage import digest, files_of
from dcar.text.phonemes import PHONEME_VERSION, TEXT_TOKENIZER, TEXT_VOCAB_SIZE
from dcar.tracking import write_json

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from dcar.tokens.base import SpeechTokenizer

FORMAT_VERSION = 2  # 1: voice features of 16 kHz audio, which the vocoder took for dull voices
RESUME = "free some space and run again, finished shards are kept"

COLUMNS = {
    "id": "string",
    "text": "string",
    "speaker": "string",
    "text_ids": ["int32"],
    "speech": ["int32"],
    "speaker_embedding": ["float32"],
    "voice": ["float32"],  # what the vocoder hears of the speaker: see vocoder_features.speaker_features
    "duration": "float32",  # seconds, after the change of speed
    "speed": "float32",
    "audio": "string",  # path of the recording, "" where the corpus embeds it (see source_utterances)
    "source": "string",  # file:line
    "prompt_text": "string",  # the four prompt columns are "" or [] where the corpus names no prompt
    "prompt_speech": ["int32"],
    "prompt_speaker_embedding": ["float32"],
    "prompt_voice": ["float32"],
}


def features() -> datasets.Features:
    """Columns of a prepared split."""
    import datasets

    return datasets.Features(
        {
            name: datasets.List(datasets.Value(kind[0])) if isinstance(kind, list) else datasets.Value(kind)
            for name, kind in COLUMNS.items()
        }
    )


def check_out_dir(out: Path) -> None:
    """DataError where writing to `out` would destroy something that is no prepared corpus."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; choose a folder to write the prepared corpus to")
    if out.is_dir() and any(out.iterdir()) and not (out / "prepared.json").is_file():
        raise DataError(f"{out}: holds other files and no prepared.json; choose a new folder")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if the file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None  # ValueError: no JSON, or not UTF-8
    return value if isinstance(value, dict) else None


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write complete or not at all."""
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(table, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error}); {RESUME}") from error
    finally:
        temporary.unlink(missing_ok=True)


def assemble(out: Path, work: Path, shards: Mapping[str, Sequence[Path]], record: Mapping[str, Any]) -> None:
    """Shards of every split → datasets in a hidden folder → renamed to `out`; then the hidden folder goes.

    One shard is in memory at a time. `record` goes into prepared.json, with the format version, the phoneme inventory
    and the counts of each split.
    """
    import datasets

    building, old = (work / f"{name}.{os.getpid()}" for name in ("building", "old"))
    shutil.rmtree(building, ignore_errors=True)
    counts: dict[str, dict[str, float]] = {}
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        building.mkdir(parents=True)
        for split, files in shards.items():
            joined = work / f"{split}.{os.getpid()}.arrow"
            counts[split] = _join(files, joined)
            rows = datasets.Dataset.from_file(str(joined), info=datasets.DatasetInfo(features=features()))
            rows.save_to_disk(str(building / split))
            del rows  # closes the memory map
            joined.unlink()
        phonemes = {"version": PHONEME_VERSION, "size": TEXT_VOCAB_SIZE}
        digests = {name: digest(building / name) for name in files_of(building)}
        info = {"format_version": FORMAT_VERSION, "phonemes": phonemes, "counts": counts, **record, "files": digests}
        write_json(building / "prepared.json", info)
        if out.exists():
            os.rename(out, old)
        os.rename(building, out)
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error}); {RESUME}") from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    clean_up(out)


def partial_folder(out: Path) -> Path:
    """Where shards lie until the datasets of `out` are assembled."""
    return out.parent / f".{out.name}.partial"


def clean_up(out: Path) -> None:
    """Remove the shards; those of earlier settings go too: they belong to datasets that these replace.

    Also called where `out` is found finished: the run that finished it may have been killed before it came to this."""
    shutil.rmtree(partial_folder(out), ignore_errors=True)


def _join(files: Sequence[Path], joined: Path) -> dict[str, float]:
    """Parquet shards → one Arrow stream, shard by shard; the counts of the split."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    utterances, seconds, tokens = 0, 0.0, 0
    speakers: set[str] = set()
    schema = features().arrow_schema
    with pa.OSFile(str(joined), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for file in files:
            table = pq.read_table(file, schema=schema)
            writer.write_table(table)
            utterances += table.num_rows
            seconds += pc.sum(table["duration"]).as_py() or 0.0
            tokens += pc.sum(pc.list_value_length(table["speech"])).as_py() or 0
            speakers.update(pc.unique(table["speaker"]).to_pylist())
    return {"utterances": utterances, "seconds": round(seconds, 2), "speakers": len(speakers), "tokens": tokens}


def copy_name(name: str, speed: float) -> str:
    """What an utterance or a speaker is called at a speed: NAME, or NAME@SPEED for a copy at another one than 1."""
    return name if speed == 1.0 else f"{name}@{speed:g}"


def recording_of(row: Mapping[str, Any]) -> tuple[str, float]:
    """Id of the utterance in the corpus whose recording a prepared row plays, and the speed at which it plays it."""
    speed = round(float(row["speed"]), 6)  # stored as float32
    return row["id"].removesuffix(copy_name("", speed)), speed


NEEDED = {"phonemes": ("version",), "tokenizer": ("name", "checksum", "vocab_size")}
"""What everything that reads a prepared corpus takes from prepared.json, besides the counts."""


def prepared_info(directory: str | Path) -> dict[str, Any]:
    """prepared.json of a prepared corpus; DataError if it is none or was made by another version of this project."""
    directory = Path(directory)
    info = read_json(directory / "prepared.json")
    if info is None:
        raise DataError(f"{directory}: no readable prepared.json; run `dcar prepare` with out={directory}")
    if info.get("format_version") != FORMAT_VERSION:
        found = info.get("format_version")
        raise DataError(f"{directory}: format version {found}, this program reads {FORMAT_VERSION}; prepare again")
    lacking = [f"{part}.{name}" for part, names in NEEDED.items() for name in names
               if not isinstance(info.get(part), dict) or name not in info[part]]
    if lacking or not isinstance(info.get("counts"), dict):
        raise DataError(f"{directory}: prepared.json is incomplete, it lacks {', '.join(lacking) or 'counts'}; prepare "
                        "again")
    version = info["phonemes"]["version"]
    if version != PHONEME_VERSION and not str(version).startswith(TEXT_TOKENIZER):
        raise DataError(f"{directory}: phoneme inventory {version}, this program has {PHONEME_VERSION}; prepare again")
    return info


def tokenizer_identity(info: Mapping[str, Any]) -> str:
    """Name and checksum of the tokenizer that made a corpus' tokens (of `prepared_info`), as decoders, vocoders and
    policies remember it."""
    return f"{info['tokenizer']['name']}@{info['tokenizer']['checksum']}"


def load_prepared(directory: str | Path, split: str, *, tokenizer: SpeechTokenizer | None = None) -> datasets.Dataset:
    """One split of a prepared corpus, memory-mapped.

    Raises DataError where the phoneme inventory differs from this program's, the tokenizer (if given) from the one that
    made the tokens, or the split is not there.
    """
    import datasets

    info = prepared_info(directory)
    made_by = info["tokenizer"]
    if tokenizer is not None and tokenizer.checksum != made_by["checksum"]:
        raise DataError(
            f"{directory}: tokens of {made_by['name']} ({made_by['checksum'][:12]}), but the tokenizer in use is "
            f"{tokenizer.name} ({tokenizer.checksum[:12]}); load that one or prepare again"
        )
    folder = Path(directory) / split
    if not folder.is_dir():
        raise DataError(f"{directory}: no split {split!r}; it has {', '.join(info['counts'])}")
    try:
        rows = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, OSError, ValueError) as error:
        raise DataError(f"{folder}: cannot be read ({error}); prepare again") from error
    expected = info["counts"][split]["utterances"]
    if len(rows) != expected:
        raise DataError(f"{folder}: {len(rows)} rows, prepared.json says {expected}; prepare again")
    return rows


def source_utterances(directory: str | Path, path: str | Path | None = None) -> dict[str, Utterance]:
    """The corpus that a prepared folder was made from, by utterance id: for the original audio of a row.

    `path` says where the corpus is now, if it was moved.
    """
    corpus = prepared_info(directory)["corpus"]
    utterances, _ = read_corpus(
        corpus["kind"],
        path or corpus["path"],
        audio_root=corpus.get("audio_root"),
        subsets=corpus.get("subsets", ()),
    )
    return {u.id: u for u in utterances}
