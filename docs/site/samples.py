"""Make the audio samples of the documentation: one test sentence, recorded and synthesised.

    python docs/site/samples.py

Voice and sentence are from the starter corpus' test split, on which no shipped model was trained.
Temperature 1.0, no top-k, seed 0, as in the first table of docs/results.md. MP3, 24 kHz, mono.
"""

from __future__ import annotations

import io
import subprocess
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import soundfile

ROOT = Path(__file__).resolve().parents[2]
SENTENCE, PROMPT = "bf_isabella_0114", "bf_isabella_0142"
METHODS = {
    "far": ["method=far"],
    "car-5": ["method=car-5"],
    "car-14": ["method=car-14"],
    "dcar": ["method=dcar", "policy=starter-t1.0"],
}


def write(name: str, wave: object, rate: int) -> None:
    """Write an MP3 file of 16 to 32 kbit/s."""
    folder = ROOT / "docs/audio"
    folder.mkdir(exist_ok=True)
    soundfile.write(folder / f"{name}.mp3", wave, rate, format="MP3", compression_level=0.8)


if __name__ == "__main__":
    rows = pq.read_table(ROOT / "dcar/assets/starter_corpus/test.parquet").to_pylist()
    found = {row["id"]: row for row in rows if row["id"] in (SENTENCE, PROMPT)}
    write("recording", *soundfile.read(io.BytesIO(found[SENTENCE]["audio"]["bytes"])))
    with tempfile.TemporaryDirectory() as folder:
        prompt, out = Path(folder) / "prompt.wav", Path(folder) / "out.wav"
        soundfile.write(prompt, *soundfile.read(io.BytesIO(found[PROMPT]["audio"]["bytes"])))
        for name, settings in METHODS.items():
            subprocess.run(
                [
                    "dcar",
                    "speak",
                    found[SENTENCE]["text"],
                    f"voice={prompt}",
                    f"out={out}",
                    *settings,
                    "temperature=1.0",
                    "top_k=0",
                    "seed=0",
                ],
                check=True,
            )
            write(name, *soundfile.read(out))
