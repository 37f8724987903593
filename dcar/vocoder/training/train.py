"""Train the vocoder on one device from a pack: acoustic model and renderer at the same time.

    dcar train-vocoder data=vocoder_pack.safetensors out=runs/vocoder max_minutes=20

All data is on the device as flat tensors, from which crops are cut there, so no data loader is
needed. The acoustic model learns true log-mels and pitch from tokens at every step; the renderer
learns waves from true log-mels and true pitch at every `renderer_every`-th step, by a mel distance
at three resolutions. A moving average (EMA) of the weights is exported.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dcar.config import load_config
from dcar.config.resume import changed_settings, settings_stamp
from dcar.errors import CheckpointError, DCARError
from dcar.process import own_device, run_claimed
from dcar.progress import Progress
from dcar.storage import replacing
from dcar.tracking import write_json
from dcar.vocoder.training.pack import VocoderData, pack_digest
from dcar.vocoder.training.trainer import Trainer, TrainVocoderConfig


def run(config: TrainVocoderConfig) -> Path:
    """Train, resuming from `out`/checkpoint.pt if it exists, and return the folder of the exported
    vocoder.

    Raises CheckpointError if the checkpoint was trained on other data, or with settings that cannot
    change within a run.
    """
    device, out = torch.device(own_device(config.device)), Path(config.out)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    packs = config.data.split(",")
    data = VocoderData.join([VocoderData.load(path, device) for path in packs])
    trainer = Trainer(config, data, device)
    trainer.run = {
        "settings": settings_stamp(config),
        "data": {"path": config.data, "packs": [pack_digest(path) for path in packs]},
    }
    checkpoint = out / "checkpoint.pt"
    changed: dict[str, Any] = {}
    if checkpoint.exists():
        try:
            state = torch.load(checkpoint, map_location=device, weights_only=True)
            over = 0 < 60 * config.max_minutes <= state["seconds"]
            steps = min(config.max_steps, state["step"]) if over else config.max_steps
            changed = changed_settings(checkpoint, state["run"], trainer.run, state["step"], steps)
            trainer.load_state(state)
        except (RuntimeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint}: belongs to another configuration; choose another out: {error}"
            ) from error
    write_json(out / "config.json", asdict(config))
    with (out / "log.jsonl").open("a") as log:
        for record in _train(trainer, out):
            if changed and record["event"] == "start":
                record["changed"] = changed
            log.write(json.dumps(record) + "\n")
            log.flush()
    return out / "export"


def _train(trainer: Trainer, out: Path) -> Iterator[dict[str, Any]]:
    """Train until the budget is spent; yield log records, write checkpoints and exports. Raises
    DCARError if training diverges."""
    config = trainer.config
    speech = float(trainer.data.lengths.sum()) / trainer.data.token_rate / 3600
    parameters = sum(p.numel() for p in trainer.generator.parameters())
    yield {
        "event": "start",
        "step": trainer.step_index,
        "rows": len(trainer.data.lengths),
        "hours": speech,
        "size": parameters,
    }
    bar = Progress(
        initial=trainer.step_index,
        total=config.max_steps if config.max_steps < 1_000_000 else None,
        desc="train",
        unit="step",
    )
    mark, mark_step = time.perf_counter(), trainer.step_index
    while trainer.progress() < 1.0:
        begin = time.perf_counter()
        logs = trainer.step()
        bar.update()
        if trainer.step_index % config.logging_steps == 0:
            values = {key: float(value) for key, value in logs.items()}  # waits for the device
            if not all(math.isfinite(v) for v in values.values()):
                raise DCARError(
                    f"vocoder training diverged at step {trainer.step_index}: {values}; the "
                    f"checkpoint in {out} is intact: run the command again with a lower "
                    "learning_rate or bf16=false"
                )
            rate = (trainer.step_index - mark_step) / (time.perf_counter() - mark)
            mark, mark_step = time.perf_counter(), trainer.step_index
            bar.set_postfix_str(
                " ".join(f"{k} {v:.3g}" for k, v in values.items() if "norm" not in k)
            )
            yield {
                "event": "train",
                "step": trainer.step_index,
                "seconds": trainer.seconds,
                "steps_per_second": rate,
                **values,
            }
        trainer.seconds += time.perf_counter() - begin
        if trainer.step_index % config.eval_steps == 0:
            yield _save(trainer, out)
            mark, mark_step = time.perf_counter(), trainer.step_index
    if trainer.step_index % config.eval_steps:
        yield _save(trainer, out)
    bar.close()


def _save(trainer: Trainer, out: Path) -> dict[str, Any]:
    values = trainer.validate()
    with replacing(out / "checkpoint.pt") as part:
        torch.save(trainer.state(), part)
    trainer.average.save_pretrained(out / "export", half=True)
    return dict(event="validation", step=trainer.step_index, seconds=trainer.seconds, **values)


CONFIG = TrainVocoderConfig


def main(arguments: list[str] | None = None) -> None:
    run_claimed(run, load_config(CONFIG, arguments), resumes=True)
