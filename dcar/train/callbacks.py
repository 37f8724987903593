"""What a Trainer leaves behind besides its model: logs, and the checkpoint to go on from."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)


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
