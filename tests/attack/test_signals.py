"""Signals from outside: to one process, to a launcher of two, from the batch scripts; a second
Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import LAUNCH, ROOT, environment
from tiny_training import MODEL, log_of

from dcar.train.checkpoints import latest_checkpoint, why_incomplete

HANGS = 180
"""Seconds after which a process is taken to hang, also on a busy machine."""
TWO = [*LAUNCH[1:], "-m", "dcar.train"]


def start(data: Path, out: Path, program: list[str]) -> subprocess.Popen:
    """Stage one of very many steps, in processes of its own; returns when it has made some."""
    model = [f"model.{k}={str(v).lower()}" for k, v in MODEL.items()]
    settings = (
        "prompt_tokens=5 per_device_train_batch_size=4 max_steps=100000 logging_steps=1 "
        "save_steps=100000"
    ).split()
    process = subprocess.Popen(
        [sys.executable, *program, *model, f"data={data}", f"out={out}", *settings],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + HANGS
    while not (out / "log.jsonl").exists() or len((out / "log.jsonl").read_text().splitlines()) < 3:
        assert time.monotonic() < end and process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.1)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "status"),
    [(["-m", "dcar.train"], 75), (["-m", "dcar.cli", "train"], 75), (TWO, None)],
    ids=["module", "command", "two"],
)
def test_sigterm_saves_and_leaves(program, status, data, tmp_path):
    """A launcher of several passes the signal on, and has a status of its own."""
    process = start(data, tmp_path, program)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=HANGS)
    assert process.returncode == status if status else process.returncode != 0
    assert f"SIGTERM: {tmp_path}/checkpoint-" in said
    found = latest_checkpoint(tmp_path)
    assert found is not None and not why_incomplete(found)
    steps = [line["step"] for line in log_of(tmp_path) if "loss" in line]
    assert steps == list(range(1, int(found.name[11:]) + 1))
    if status:
        assert "Traceback" not in said


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_without_a_traceback(data, tmp_path):
    process = start(data, tmp_path, ["-m", "dcar.cli", "train"])
    process.send_signal(signal.SIGSTOP)  # so that both come before the step ends
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 130 and "Traceback" not in said


@pytest.mark.slow
def test_a_killed_process_ends_the_other_with_an_error_that_says_so(data, tmp_path):
    process = start(data, tmp_path, TWO)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    said, _ = process.communicate(timeout=HANGS)
    assert process.returncode and ("process" in said or "SIGTERM" in said)


@pytest.mark.parametrize(
    "script", sorted(p.name for p in (ROOT / "launch" / "slurm").glob("*.sbatch"))
)
@pytest.mark.parametrize(
    ("sent", "status", "queued"),
    [(True, 143, True), (False, 75, True), (False, 1, False), (False, 0, False), (True, 0, False)],
)
def test_batch_scripts_queue_again_what_was_stopped(script, sent, status, queued, tmp_path):
    """With an srun that waits for SIGTERM, or ends by itself, and a scontrol that notes what it
    is asked."""
    tools = tmp_path / "bin"
    tools.mkdir()
    ends = (
        f"trap 'exit {status}' TERM; touch {tmp_path}/running; while true; do sleep 0.05; done"
        if sent
        else (f"exit {status}")
    )
    for name, text in (
        ("srun", ends),
        ("scontrol", f'[ "$1" = show ] && echo node1 || echo "$@" >> {tmp_path}/asked'),
    ):
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("")
    process = subprocess.Popen(
        ["bash", ROOT / "launch" / "slurm" / script, "recipe.yaml", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={
            "PATH": f"{tools}:{os.environ['PATH']}",
            "DCAR_VENV": str(tmp_path / "venv"),
            "SLURM_GPUS_ON_NODE": "2",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_JOB_ID": "17",
            "SLURM_NNODES": "1",
        },
    )
    if sent:
        end = time.monotonic() + HANGS
        while not (tmp_path / "running").exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=HANGS)
    assert process.returncode == status, said
    asked = tmp_path / "asked"
    assert asked.exists() == queued and (not queued or asked.read_text() == "requeue 17\n"), said
    assert said.count("queueing job 17 again") == int(queued)
