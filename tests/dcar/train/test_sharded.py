"""FSDP and DeepSpeed through `accelerate launch` and the Trainer, two gloo processes on CPUs
(sharded_cpu.py).

DeepSpeed's cases need `pip install deepspeed`.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_backbones import tiny_backbone
from tiny_data import counting, write_prepared

ROOT = Path(__file__).parents[3]
SETTINGS = (
    "prompt_tokens=5 per_device_train_batch_size=4 max_steps=4 save_steps=2 "
    "eval_steps=4 logging_steps=1 warmup_steps=1 learning_rate=0.003 "
    "gradient_checkpointing=true"
).split()
CAR = (
    "model.hidden_size=32 model.num_layers=2 model.num_attention_heads=2 model.ffn_size=64 "
    "model.text_vocab_size=64 model.num_prediction_heads=3 model.head_blocks=1 model.bos=true "
    "model.dropout=0"
).split()
PLAIN, SHARDED = ["-m", "dcar.train"], [str(ROOT / "tests/toys/sharded_cpu.py")]
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install deepspeed"
)


class Launcher:
    """Trains one model with two processes, in any way."""

    def __init__(self, folder: Path, kind: str):
        self.folder, self.model = folder, CAR
        self.data = write_prepared(folder / "data", train=24, dev=4, speech=counting)
        if kind == "llama":
            tiny_backbone(kind="llama").save_pretrained(folder / "llama")
            self.model = [f"backbone.path={folder / 'llama'}", "backbone.train=joint"]

    def launch(
        self, config: str, program: list[str], out: Path, **environment: str
    ) -> subprocess.CompletedProcess:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "accelerate.commands.launch",
                "--config_file",
                str(ROOT / "launch" / "accelerate" / f"{config}.yaml"),
                "--num_processes",
                "2",
                *program,
                f"data={self.data}",
                f"out={out}",
                *SETTINGS,
                *self.model,
            ],
            env={
                **variables,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "TORCH_EXTENSIONS_DIR": str(self.folder.parent / "extensions"),
                **environment,
            },
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=900,
        )

    def train(self, config: str, program: list[str], out: Path, **environment: str) -> dict:
        """The weights; fails with what the processes said."""
        done = self.launch(config, program, out, **environment)
        assert done.returncode == 0, done.stderr[-4000:]
        assert json.loads((out / "provenance.json").read_text())["processes"] == 2
        return load_file(out / "model.safetensors")


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    """A launcher and the weights of plain data parallelism, by kind of model, made when asked
    for."""
    made: dict[str, tuple[Launcher, dict]] = {}

    def get(kind: str) -> tuple[Launcher, dict]:
        if kind not in made:
            launcher = Launcher(tmp_path_factory.mktemp(kind), kind)
            made[kind] = (
                launcher,
                launcher.train("cpu2", PLAIN, launcher.folder / "plain", ACCELERATE_USE_CPU="true"),
            )
        return made[kind]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("fsdp", "car"),
        ("fsdp_8b", "llama"),
        *(
            pytest.param(c, k, marks=needs_deepspeed)
            for c, k in (
                ("deepspeed_zero2", "car"),
                ("deepspeed_zero3", "car"),
                ("deepspeed_zero3", "llama"),
            )
        ),
    ],
)
def test_sharded_training_saves_and_resumes(config, kind, launchers, tmp_path):
    """The weights are those of data parallelism; a run that goes on from its checkpoint ends in
    the same ones."""
    launcher, plain = launchers(kind)
    out = tmp_path / "out"
    weights = launcher.train(config, SHARDED, out)
    assert weights.keys() == plain.keys()
    worst = max((float((weights[n] - plain[n]).abs().max()), n) for n in plain)
    assert worst[0] < 1e-4, worst
    if config.startswith("deepspeed"):  # each process keeps its part of the optimiser
        parts = sorted(p.name for p in (out / "checkpoint-2").rglob("*optim_states.pt"))
        assert len(parts) == 2 and "rank_0" in parts[0] and "rank_1" in parts[1]
    (out / "model.safetensors").unlink()
    shutil.rmtree(out / "checkpoint-4")
    written = (out / "checkpoint-2" / "trainer_state.json").stat().st_mtime_ns
    resumed = launcher.train(config, SHARDED, out)
    assert (out / "checkpoint-4").is_dir()
    # it went on from there
    assert (out / "checkpoint-2" / "trainer_state.json").stat().st_mtime_ns == written
    assert max(float((resumed[n] - weights[n]).abs().max()) for n in weights) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp", pytest.param("deepspeed_zero2", marks=needs_deepspeed)])
def test_processes_that_accelerate_would_take_for_single_ones_are_refused(config, tmp_path):
    done = Launcher(tmp_path, "car").launch(config, PLAIN, tmp_path / "out")
    what = "FSDP" if config == "fsdp" else "DeepSpeed"
    assert done.returncode and f"{what} was requested" in done.stderr
    assert not (tmp_path / "out" / "log.jsonl").exists()
