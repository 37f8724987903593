"""Small corpora on disk, in the layouts of the wild."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile as sf

RATE = 16_000


def tone(seconds: float, hz: float = 220.0, rate: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav_bytes(seconds: float, hz: float) -> bytes:
    buffer = io.BytesIO()
    sf.write(buffer, tone(seconds, hz), RATE, format="WAV")
    return buffer.getvalue()


def write_libritts(root: Path, subsets: dict[str, int], seconds: float = 0.5) -> Path:
    """`subsets`: name -> utterances, in the real layout with real ids; every subset has two speakers."""
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


def write_parquets(folder: Path, files: int = 3, rows: int = 2) -> Path:
    """A folder as the hub lays it out: train-0000i-of-0000n.parquet with an Audio column."""
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    schema = datasets.Features({"id": datasets.Value("string"), "text": datasets.Value("string"),
                                "speaker_id": datasets.Value("int64"), "audio": datasets.Audio(RATE)})  # fmt: skip
    for f in range(files):
        table = [{"id": f"u{f}{i}", "text": f"Row {i} of file {f}.", "speaker_id": f,
                  "audio": {"bytes": wav_bytes(0.6 + 0.1 * i, 200 + 50 * f), "path": None}} for i in range(rows)]
        pq.write_table(pa.Table.from_pylist(table, schema=schema.arrow_schema),
                       folder / f"train-{f:05d}-of-{files:05d}.parquet")  # fmt: skip
    return folder
