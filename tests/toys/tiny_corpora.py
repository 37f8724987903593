"""Small corpora on disk, in the layouts of public data sets."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile as sf
from tiny_data import ToyEncoder, ToyTokenizer

from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.prepare.run import PrepareConfig, run
from dcar.prepare.settings import PrepareReport
from dcar.sources.shipped import shipped

RATE = 16_000


def tone(seconds: float, hz: float = 220.0, rate: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(
        np.float32
    )


def encoded(
    seconds: float = 1.2,
    hz: float = 220.0,
    kind: str = "OGG",
    subtype: str = "OPUS",
    rate: int = 24_000,
) -> bytes:
    buffer = io.BytesIO()
    sf.write(buffer, tone(seconds, hz, rate), rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def wav_bytes(seconds: float, hz: float) -> bytes:
    return encoded(seconds, hz, "WAV", "PCM_16", RATE)


def write_manifest(
    folder: Path,
    rows: Sequence[dict],
    waves: Sequence[np.ndarray] = (),
    rate: int = RATE,
    name: str = "m.jsonl",
) -> Path:
    """Write a manifest whose row i has the id ui, the text "Line i." and the speaker s, with the
    fields that rows[i] changes.

    waves: recordings, written as 0.wav, 1.wav …; the rows name them in turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for i, wave in enumerate(waves):
        sf.write(folder / f"{i}.wav", wave, rate)
    count = len(waves) or len(rows)
    lines = [
        {"id": f"u{i}", "audio": f"{i % count}.wav", "text": f"Line {i}.", "speaker": "s"} | row
        for i, row in enumerate(rows)
    ]
    (folder / name).write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder / name


def write_starter(
    folder: Path, train: int = 10, dev: int = 3, test: int = 2, **first_train_row: Any
) -> Path:
    """Write the format that the project ships: parquet files with Ogg Opus of 0.6 … 1.0 s
    inside. first_train_row: fields of one row to change."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, n in (("train", train), ("dev", dev), ("test", test)):
        rows = []
        for i in range(n):
            seconds = 0.6 + 0.1 * ((7 * i) % 5)
            row = {
                "id": f"{split}_{i}",
                "text": f"Number {i} of {split}.",
                "speaker": f"v{i % 3}",
                "duration": seconds,
                "audio": {"bytes": encoded(seconds, 200 + 50 * i), "path": f"{i}.ogg"},
            }
            rows.append({**row, **(first_train_row if split == "train" and i == 0 else {})})
        if rows:
            pq.write_table(
                pa.Table.from_pylist(rows), folder / f"{split}.parquet", compression="none"
            )
    return folder


def toy_settings(path: Path, out: Path, **changes: Any) -> PrepareConfig:
    """Return settings with shards of four utterances and short waits."""
    return PrepareConfig(
        **{"out": str(out), "path": str(path), "shard_size": 4, "wait_minutes": 0.3, **changes}
    )


def toy_prepare(
    config: PrepareConfig, tokenizer: ToyTokenizer | None = None, **kwargs: Any
) -> PrepareReport:
    """Run `dcar prepare` with a toy tokenizer and a toy speaker encoder."""
    return run(
        config,
        tokenizer=tokenizer or ToyTokenizer(),
        speaker_encoder=ToyEncoder(),
        progress=False,
        **kwargs,
    )


def rows_of(out: Path) -> dict[str, dict]:
    """Return all splits of a prepared corpus, by name."""
    return {split: load_prepared(out, split).to_dict() for split in prepared_info(out).counts}


def write_libritts(root: Path, subsets: dict[str, int], seconds: float = 0.5) -> Path:
    """Write a corpus in the layout of LibriTTS with real ids; every subset has two speakers.
    `subsets`: name -> number of utterances."""
    for s, (subset, count) in enumerate(subsets.items()):
        for i in range(count):
            speaker, chapter = str(100 * (s + 1) + i % 2), str(7000 + s)
            folder = root / subset / speaker / chapter
            folder.mkdir(parents=True, exist_ok=True)
            stem = f"{speaker}_{chapter}_{i:06d}_000000"
            sf.write(folder / f"{stem}.wav", tone(seconds, 200 + 10 * i, 24_000), 24_000)
            (folder / f"{stem}.normalized.txt").write_text(f"Sentence {i} of {subset}.")
            (folder / f"{stem}.original.txt").write_text(f"Sentence {i} of {subset}!")
    (root / "LICENSE.txt").write_text("CC BY 4.0")
    (root / "doc").mkdir(exist_ok=True)
    return root


def write_starter_as_libritts(root: Path, utterances: dict[str, int]) -> Path:
    """Write recordings of the shipped corpus in the layout of LibriTTS: of each split so many
    `utterances`, two of a speaker, so that each has a prompt."""
    subsets = {"train": "train-clean-100", "dev": "dev-clean", "test": "test-clean"}
    for chapter, (split, count) in enumerate(utterances.items(), start=7000):
        spoken: dict[str, list[dict]] = {}
        for row in pq.read_table(shipped("corpus") / f"{split}.parquet").to_pylist():
            spoken.setdefault(row["speaker"], []).append(row)
        rows = [row for of_speaker in spoken.values() for row in of_speaker[:2]][:count]
        speakers = sorted({row["speaker"] for row in rows})
        for i, row in enumerate(rows):
            speaker = 100 + speakers.index(row["speaker"])
            folder = root / subsets[split] / str(speaker) / str(chapter)
            folder.mkdir(parents=True, exist_ok=True)
            stem = f"{speaker}_{chapter}_{i:06d}_000000"
            sf.write(folder / f"{stem}.wav", *sf.read(io.BytesIO(row["audio"]["bytes"])))
            (folder / f"{stem}.normalized.txt").write_text(row["text"])
    return root


def write_parquets(folder: Path, files: int = 3, rows: int = 2) -> Path:
    """Write a folder in the layout of the hub: train-0000i-of-0000n.parquet with an Audio
    column."""
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    schema = datasets.Features(
        {
            "id": datasets.Value("string"),
            "text": datasets.Value("string"),
            "speaker_id": datasets.Value("int64"),
            "audio": datasets.Audio(RATE),
        }
    )
    for f in range(files):
        table = [
            {
                "id": f"u{f}{i}",
                "text": f"Row {i} of file {f}.",
                "speaker_id": f,
                "audio": {"bytes": wav_bytes(0.6 + 0.1 * i, 200 + 50 * f), "path": None},
            }
            for i in range(rows)
        ]
        pq.write_table(
            pa.Table.from_pylist(table, schema=schema.arrow_schema),
            folder / f"train-{f:05d}-of-{files:05d}.parquet",
        )
    return folder
