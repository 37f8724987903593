"""Log that a Trainer writes, and what it shows."""

import json
from pathlib import Path
from typing import Any, ClassVar

from transformers import TrainerCallback

from dcar.progress import Progress
from dcar.storage import finish_last_line, writing


class JsonlLog(TrainerCallback):
    """Callback that appends everything that a Trainer logs to `path`, one JSON object per line, on
    the main process.

    A resumed run first appends `{"step": S, "resumed": true}`: it repeats all steps after S, so
    lines of later steps above this one no longer count. The same line contains the settings that
    take effect from there on, `"changed": {name: [former value, value]}`. A run that starts from
    the beginning starts a new log.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.changed: dict[str, list[Any]] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        with writing(self.path):
            if not state.global_step:
                self.path.unlink(missing_ok=True)
            else:  # a kill or a full disk may have truncated the last line
                finish_last_line(self.path)
        if state.global_step:
            record: dict[str, Any] = {"step": state.global_step, "resumed": True}
            if self.changed:
                record["changed"] = self.changed
            self._append(record)

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if state.is_world_process_zero and logs:
            self._append({"step": state.global_step, "epoch": round(state.epoch or 0, 4), **logs})

    def _append(self, record: dict[str, Any]) -> None:
        with writing(self.path), self.path.open("a") as file:
            file.write(json.dumps(record, default=float) + "\n")


class ShownProgress(TrainerCallback):
    """Callback that shows the progress of a training on the main process, with the quantities that
    tell whether it is healthy, and one line per evaluation."""

    SHOWN: ClassVar[dict[str, str]] = {"loss": "loss"}  # name in the log -> name beside the bar

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.shown: dict[str, Any] = {}  # not every entry of the log has all quantities

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.bar = Progress(
                desc="train", unit="step", total=state.max_steps, initial=state.global_step
            )

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if self.bar is None or not logs:
            return
        self.shown |= {text: logs[name] for name, text in self.SHOWN.items() if name in logs}
        if self.shown:
            self.bar.set_postfix(self.shown, refresh=False)
        if line := self.evaluation(logs):
            self.bar.write(f"step {state.global_step}: {line}")

    def evaluation(self, logs: dict[str, Any]) -> str:
        """Return what to say of an evaluation; nothing for other entries of the log."""
        return f"loss on dev {logs['eval_loss']:.4f}" if "eval_loss" in logs else ""

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None
