"""The logs that a Trainer leaves behind."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ProgressCallback

from dcar.storage import write_text, writing

logger = logging.getLogger(__name__)

SUMMARY = "train_runtime"  # stands in the line that Trainer writes when all steps are done


class JsonlLog(TrainerCallback):
    """Append everything that a Trainer logs to `<output_dir>/log.jsonl`, one object a line, on the main process.

    A resumed run drops the lines past its checkpoint, and those of an end that was not the end, so that the log reads
    as if it had never stopped.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._rewrite(self._until(state.global_step) if state.global_step else [])

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if state.is_world_process_zero and logs:
            record = {"step": state.global_step, "epoch": round(state.epoch or 0, 4), **logs}
            with writing(self.path), self.path.open("a") as file:
                file.write(json.dumps(record, default=float) + "\n")

    def finished(self, state: TrainerState) -> None:
        """Before the final evaluation of a run that had all its steps already: the log as it was before that
        evaluation, with the summary that a kill may have kept from being written."""
        if not state.is_world_process_zero:
            return
        lines = self._until(state.global_step)
        summary = [line for line in self._read() if SUMMARY in line and line["step"] == state.global_step][:1]
        if not summary:
            losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
            steps = [step - before for (step, _), before in zip(losses, [0, *(s for s, _ in losses)], strict=False)]
            mean = sum(n * loss for n, (_, loss) in zip(steps, losses, strict=True)) / max(1, sum(steps))
            summary = [{"step": state.global_step, "epoch": round(state.epoch or 0, 4), SUMMARY: 0.0,
                        "train_loss": mean}]
        self._rewrite([*lines, *summary])

    def _until(self, step: int) -> list[dict[str, Any]]:
        """The lines up to a step, without the summary and the evaluation that close a run."""
        lines = itertools.takewhile(lambda line: SUMMARY not in line, self._read())
        return [line for line in lines if line["step"] <= step]

    def _read(self) -> list[dict[str, Any]]:
        """The lines that can be read; a full disk or a power cut may have left pieces of others."""
        found = []
        for number, text in enumerate(self.path.read_bytes().split(b"\n") if self.path.exists() else [], start=1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
                line["step"] + 0, line.get("loss", 0) + 0  # TypeError where they are no numbers
            except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
                logger.warning("%s:%d was cut off and is dropped", self.path, number)
                continue
            found.append(line)
        return found

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        with writing(self.path):
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))


class LossBar(ProgressCallback):
    """Trainer's bar with the loss beside it, instead of a line of raw numbers under it at every log."""

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.3g}")
