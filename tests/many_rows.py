"""Prepared corpora with a given number of rows, and the time that commands take to start on them.

    python tests/many_rows.py 20000 1000000 5000000

prints seconds and memory of a process from its first line to the first batch of stage one, to the
prompts of stage two (max_train_prompts=8), and to the end of what `dcar compare limit=4` loads; the
seconds of the imports alone are in parentheses. A million rows of the usual size take 2 GB of disk
in the folder for temporary files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from dcar.prepare.prepared import TABLE, _describe_dataset, features, prepared_info, put_in_place

AT_ONCE = 10_000


def write_many(
    out: Path, rows: int, tokens: int = 300, voice: int = 298, speakers: int = 3000, audio: str = ""
) -> Path:
    """Write a prepared corpus of the shipped tokenizer with a training split of `rows` rows and a
    dev split of eight.

    tokens: mean length of the lists `speech`; voice: length of the lists `voice`; audio: recording
    that all rows name.
    """
    info = prepared_info("starter")
    columns = features(info["tokenizer"]["vocab_size"])
    building = out.parent / f".{out.name}.partial" / "building"
    for split, count in (("train", rows), ("dev", 8)):
        (building / split).mkdir(parents=True)
        rng = np.random.default_rng(count)
        with (
            pa.OSFile(str(building / split / TABLE), "wb") as sink,
            pa.ipc.new_stream(sink, columns.arrow_schema) as writer,
        ):
            for first in range(0, count, AT_ONCE):
                writer.write_table(
                    _rows(
                        first,
                        min(AT_ONCE, count - first),
                        columns,
                        rng,
                        tokens,
                        voice,
                        speakers,
                        audio,
                    )
                )
        _describe_dataset(building / split, columns, f"{rows} {split}")
    put_in_place(
        building, out, {**info, "counts": {"train": {"utterances": rows}, "dev": {"utterances": 8}}}
    )
    return out


def _rows(
    first: int,
    count: int,
    columns,
    rng: np.random.Generator,
    tokens: int,
    voice: int,
    speakers: int,
    audio: str,
) -> pa.Table:
    lengths = rng.integers(tokens // 2, tokens + tokens // 2, count)
    names = np.arange(first, first + count)
    strings = {
        "id": [f"u{(n * 7919) % 10_000_019:08}" for n in names],
        "text": ["A red house."] * count,
        "speaker": [f"s{n}" for n in rng.integers(speakers, size=count)],
        "audio": [audio] * count,
        "source": [f"made:{n}" for n in names],
        "prompt_text": [""] * count,
    }
    lists = {
        "text_ids": _lists(rng.integers(1, 60, 40 * count), np.full(count, 40)),
        "speech": _lists(rng.integers(0, 1024, lengths.sum()), lengths),
        "voice": _lists(rng.random(voice * count, np.float32) + 5, np.full(count, voice)),
        **dict.fromkeys(
            ("prompt_speech", "prompt_voice"), _lists(np.zeros(0), np.zeros(count, int))
        ),
    }
    numbers = {"duration": lengths / 50, "speed": np.ones(count)}
    schema = columns.arrow_schema
    made = {**{k: pa.array(v) for k, v in (strings | numbers).items()}, **lists}
    return pa.table({name: made[name] for name in schema.names}).cast(schema)


def _lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), values
    )


STARTS = {
    "stage one": """
from dcar.model.car import CARConfig, CARDecoder
from dcar.prepare.prepared import prepared_info
from dcar.train.car import CARTrainer, SpeechDataset
from dcar.train.plan import data_identity
from dcar.train.settings import TrainConfig
import dcar.train.car as car
imported()
load = getattr(car, "load_split", None) or car.load_prepared
model = CARConfig(**data_identity(prepared_info(data)), hidden_size=32, ffn_size=32, num_layers=1,
                  num_attention_heads=2, bos=True)
config = TrainConfig(data=data, out=out, model=model)
trainer = CARTrainer(config, CARDecoder(model), *(SpeechDataset(load(data, s), model, 50, 0) for s in ("train", "dev")))
next(iter(trainer.get_train_dataloader()))
""",
    "stage two": """
from dcar.model.load import load_decoder
from rl.data import prompts_of
from rl.config import DCPOConfig
imported()
decoder = load_decoder("starter")
args = DCPOConfig(out, use_cpu=True, data=data, max_train_prompts=8, eval_strategy="no")
assert len(prompts_of(args, decoder, None, None)[0]) == 8
""",
    "compare": """
from eval.compare.run import CompareConfig, load_tools
imported()
tools = load_tools(CompareConfig(data=data, split="train", decoder="starter", limit=4), "cpu")
tools.choose(4, [0])
assert len(tools.items) == 4
""",
}
MEASURED = """
import json, re, sys, time
from pathlib import Path
began, (data, out) = time.perf_counter(), sys.argv[1:]
def imported():
    global ready
    ready = time.perf_counter()
{code}
now = time.perf_counter()
largest = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())  # maxrss would count the parent's
print(json.dumps([now - began, ready - began, int(largest[1]) * 1024 / 1e9]))
"""


def measure(start: str, data: Path) -> tuple[float, float, float]:
    """Return seconds of a process until a command has started, seconds of its imports, and its
    largest resident memory in GB."""
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED.format(code=STARTS[start]), data, out],
            text=True,
            capture_output=True,
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def main(counts: list[int]) -> None:
    import soundfile

    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            audio = Path(folder) / "a.wav"
            soundfile.write(audio, np.random.default_rng(0).normal(size=32_000) / 10, 16_000)
            began = time.perf_counter()
            data = write_many(Path(folder) / "data", count, audio=str(audio))
            size = sum(f.stat().st_size for f in data.rglob("*") if f.is_file()) / 1e9
            print(f"{count:,} rows, {size:.2f} GB, written in {time.perf_counter() - began:.0f} s")
            for start in STARTS:
                seconds, imports, memory = measure(start, data)
                print(
                    f"  {start:10} {seconds:6.1f} s (imports {imports:.1f}), {memory:.2f} GB",
                    flush=True,
                )


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1:]])
