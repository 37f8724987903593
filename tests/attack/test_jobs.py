"""Jobs that are killed, whose disk fills up, or that run on two processes end as if nothing had
been (docs/reliability.md).

ATTACK_KILLS sets the kills of each job (10), ATTACK_SEED the seed.
"""

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
import torch
from tiny_data import write_prepared
from tiny_training import log_of, tiny_config
from transformers import TrainerCallback

from dcar.train import car

KILLS, SEED = int(os.environ.get("ATTACK_KILLS", "10")), int(os.environ.get("ATTACK_SEED", "0"))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, harness.Job]:
    return harness.jobs(tmp_path_factory.mktemp("attack"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["train", "dcpo", "prepare", "compare", "train2", "dcpo2", "compare2"]
)
def test_nothing_is_lost(name, jobs, tmp_path, capsys):
    ends = harness.attack(jobs[name], tmp_path, KILLS, random.Random(f"{SEED} {name}"))
    with capsys.disabled():
        print(f"\n{name}: {dict(ends)}")


@pytest.mark.slow
def test_the_attack_sees_what_is_lost(jobs, tmp_path):
    """A bit of the weights, a line of the log and a piece left behind are differences."""
    out = tmp_path / "whole"
    assert harness.run(jobs["train"], out).status == [0]
    expected = harness.outcome(out)
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 6, "eval_loss": 1}\n')
    (out / "left.part").write_text("")
    found = harness.differences(expected, harness.outcome(out))
    changed = {line.partition(":")[0].partition("/")[0] for line in found}
    assert changed == {"model.safetensors", "log.jsonl", "left.part"}
    killed = harness.run(jobs["train"], tmp_path / "killed", harness.Kill("write", 30))
    assert killed.status == [-9]


# --- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of its own: a small tmpfs where this user may mount one (root)."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("name", ["train", "dcpo", "compare", "prepare"])
def test_a_full_disk_is_said_and_survived(name, share, jobs, disk):
    whole, out = disk / "whole", disk / "run" / "out"
    end = harness.run(jobs[name], whole / "out")
    assert end.status == [0], end.said[-2000:]
    expected = harness.outcome(whole / "out")
    pages = sum(-(-p.stat().st_size // 4096) for p in whole.rglob("*") if p.is_file())
    shutil.rmtree(whole)
    # records contain times, so that another run may need a page or two less
    resize(disk, (int((pages - 2) * share) + 1) * 4096)
    end = harness.run(jobs[name], out)
    assert end.status == [1] and "Traceback" not in end.said, end.said[-2000:]
    assert " be written (" in end.said, end.said[-1000:]
    resize(disk, 64 << 20)
    again = harness.run(jobs[name], out)
    assert again.status == [0], again.said[-2000:]
    assert not harness.differences(expected, harness.outcome(out))


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


@pytest.mark.parametrize("name", ["train", "dcpo", "compare"])
def test_writes_that_fail_end_in_one_line(name, jobs, tmp_path, monkeypatch):
    """Without a file system of one's own: the third flush to the disk fails, as all after it."""
    sync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        end = harness.run(jobs[name], tmp_path / "out")
    assert end.status == [1] and "Traceback" not in end.said, end.said[-2000:]
    assert "No space left" in end.said and " GB " in end.said
    assert harness.run(jobs[name], tmp_path / "out").status == [0]


# --- processes ------------------------------------------------------------------------------------


class Gradients(TrainerCallback):
    """Writes what the optimiser sees at the first update."""

    def __init__(self, out: Path):
        self.out = out

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0 and state.is_world_process_zero:
            found = {
                name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()
            }
            torch.save(found, self.out / "gradients.pt")


def test_gradients_of_two_processes_are_those_of_one(tmp_path):
    """Eight utterances of equal length on one process, or as twice four: deviations are those of
    rounding."""
    data = write_prepared(tmp_path / "data", train=8)

    class Watched(car.CARTrainer):
        def __init__(self, config, *arguments, **keywords):
            super().__init__(config, *arguments, **keywords)
            self.add_callback(Gradients(Path(config.out)))

    def job(name: str, processes: int, batch: int, parts: int) -> dict[str, torch.Tensor]:
        def train(out: Path) -> None:
            car.CARTrainer = Watched  # in the forked process alone
            sizes = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=parts)
            once = dict(max_steps=1, max_grad_norm=0.0, ddp_timeout=60)
            car.run(tiny_config(data, out, {"dropout": 0.0}, **sizes, **once))

        end = harness.run(harness.Job(name, train, processes), tmp_path / name)
        assert set(end.status) == {0}, end.said[-3000:]
        return torch.load(tmp_path / name / "gradients.pt")

    one = job("one", 1, 8, 1)
    largest = max(float(g.abs().max()) for g in one.values() if g.numel())
    for name, two in (("two", job("two", 2, 4, 1)), ("steps", job("steps", 2, 2, 2))):
        apart = torch.cat([(one[weight] - two[weight]).flatten().abs() for weight in one]) / largest
        assert apart.max() < 1e-5 and apart.mean() < 1e-7
        losses = [log_of(tmp_path / folder)[0]["loss"] for folder in (name, "one")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
