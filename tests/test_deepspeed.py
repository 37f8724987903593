"""DeepSpeed through `accelerate launch`: ZeRO-2, two gloo processes on the CPU. Needs `pip install deepspeed`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_data import counting, write_prepared

ROOT = Path(__file__).parents[1]
SETTINGS = ["model.hidden_size=32", "model.num_layers=2", "model.num_attention_heads=2", "model.ffn_size=64",
            "model.text_vocab_size=64", "model.num_prediction_heads=3", "model.head_blocks=1", "model.bos=true",
            "model.dropout=0", "prompt_tokens=5", "batch_size=4", "max_steps=4", "save_steps=2", "eval_steps=4",
            "log_steps=1", "warmup_steps=1", "learning_rate=0.003"]
PLAIN, SHARDED = ["-m", "dcar.train"], [str(ROOT / "tests" / "deepspeed_cpu.py")]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install deepspeed")


def launch(config: str, program: list[str], data: Path, out: Path, **environment: str) -> list[dict]:
    """Train with two processes; the lines of the log. Fails with what the processes said."""
    done = launched(config, program, data, out, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def launched(config: str, program: list[str], data: Path, out: Path, **environment: str) -> subprocess.CompletedProcess:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "launch/accelerate" / config),
         "--num_processes", "2", *program, f"data={data}", f"out_dir={out}", *SETTINGS],
        env={**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "TORCH_EXTENSIONS_DIR": str(data.parent / "extensions"), **environment}, cwd=ROOT,
        capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@needs_deepspeed
def test_zero_2_trains_saves_and_resumes(tmp_path):
    """Its weights are those of plain data parallelism, and a run that goes on from its checkpoint ends in the same."""
    data = write_prepared(tmp_path / "data", train=24, dev=4, speech=counting)
    log = launch("deepspeed_zero2.yaml", SHARDED, data, tmp_path / "zero", DS_ACCELERATOR="cpu")
    assert json.loads((tmp_path / "zero" / "provenance.json").read_text())["processes"] == 2
    shards = sorted(p.name for p in (tmp_path / "zero" / "checkpoint-2").rglob("*optim_states.pt"))
    assert len(shards) == 2 and "rank_0" in shards[0] and "rank_1" in shards[1]  # each process keeps its half
    zero = load_file(tmp_path / "zero" / "model.safetensors")
    launch("cpu2.yaml", PLAIN, data, tmp_path / "plain", ACCELERATE_USE_CPU="true")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert zero.keys() == plain.keys()
    assert all((zero[n] - plain[n]).abs().max() < 1e-4 for n in plain)
    assert [line["loss"] for line in log if "loss" in line]
    (tmp_path / "zero" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "zero" / "checkpoint-4")
    again = launch("deepspeed_zero2.yaml", SHARDED, data, tmp_path / "zero", DS_ACCELERATOR="cpu")
    assert [line["step"] for line in again if "loss" in line][-2:] == [3, 4]
    resumed = load_file(tmp_path / "zero" / "model.safetensors")
    assert all((resumed[n] - zero[n]).abs().max() < 1e-6 for n in zero)


@pytest.mark.slow
@needs_deepspeed
def test_processes_that_accelerate_would_take_for_single_ones_are_refused(tmp_path):
    data = write_prepared(tmp_path / "data", train=6, dev=2)
    done = launched("deepspeed_zero2.yaml", PLAIN, data, tmp_path / "out", DS_ACCELERATOR="cpu")
    assert done.returncode and "DeepSpeed was asked for, but Accelerate does not shard on CPUs" in done.stderr
    assert not (tmp_path / "out" / "log.jsonl").exists()
