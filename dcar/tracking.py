"""What a run leaves behind besides its model: a JSONL log, and where everything came from."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

PACKAGES = ("dcar", "torch", "transformers", "trl", "accelerate", "datasets", "nemo_toolkit", "jiwer", "numpy")


class JsonlLog(TrainerCallback):
    """Append everything that a Trainer logs to `<output_dir>/log.jsonl`, one object a line, on the main process.

    A resumed run drops the lines past its checkpoint, so that the log reads as if it had never stopped.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() and state.global_step else []
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        self.path.write_text("".join(line + "\n" for line in kept))

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if state.is_world_process_zero and logs:
            with self.path.open("a") as file:
                record = {"step": state.global_step, "epoch": round(state.epoch or 0, 4), **logs}
                file.write(json.dumps(record, default=float) + "\n")


class TensorBoardLog(TrainerCallback):
    """Scalars of a run for TensorBoard, in `<directory>`; a list becomes one scalar per entry (name/1, name/2, …).

    transformers' own callback needs a `PreTrainedConfig` and complains about lists.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.writer: Any = None  # a SummaryWriter from the first line on

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(log_dir=str(self.directory))
        for name, value in logs.items():
            for i, number in enumerate(value if isinstance(value, list) else [value], start=1):
                tag = f"{name}/{i}" if isinstance(value, list) else name
                self.writer.add_scalar(tag, float(number), state.global_step)
        self.writer.flush()

    def on_train_end(self, args, state, control, **kwargs):
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The last checkpoint that was written completely (its trainer_state.json, written last, can be read)."""
    found = sorted((p for p in Path(output_dir).glob("checkpoint-*") if p.name.split("-")[1].isdigit()),
                   key=lambda p: int(p.name.split("-")[1]), reverse=True)
    for path in found:
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, json.JSONDecodeError):
            logger.warning("%s is not complete and is left out", path)
            continue
        return path
    return None


def machine() -> str:
    """The processor (or GPU) that figures were taken on."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def provenance(**inputs: Any) -> dict[str, Any]:
    """Versions, machine, source revision, command line and the given inputs, for the file beside a checkpoint."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    try:
        revision = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True,
            check=True, timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        revision = "unknown (not a git checkout)"
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "revision": revision, "python": sys.version,
        "versions": versions, "machine": machine(), "command": [Path(sys.argv[0]).name, *sys.argv[1:]], **inputs,
    }


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON so that the file is either the old one or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2, default=float) + "\n")
    part.replace(path)
