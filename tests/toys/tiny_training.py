"""Tiny stage one: a model and settings that train in a second."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dcar.errors import CheckpointError
from dcar.model.car import CARConfig, CARDecoder
from dcar.prepare.prepared import load_split
from dcar.train.batches import SpeechDataset
from dcar.train.car import CARTrainer, TrainConfig
from eval.report.plots import read_log

MODEL = dict(
    text_vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=2,
    ffn_size=64,
    num_prediction_heads=3,
    head_blocks=1,
    dropout=0.1,
    bos=True,
    speech_position_scale=0.3,
)


# settings of the small models next to a decoder: 8 steps, a checkpoint at 4
SMALL = dict(
    per_device_train_batch_size=6,
    max_steps=8,
    warmup_steps=2,
    learning_rate=1e-2,
    logging_steps=2,
    eval_steps=4,
    save_steps=4,
)


def tiny_config(data: Path, out: Path, model: dict | None = None, **changes) -> TrainConfig:
    settings = dict(
        prompt_tokens=5,
        per_device_train_batch_size=4,
        max_steps=6,
        warmup_steps=2,
        learning_rate=5e-3,
        logging_steps=1,
        eval_steps=1000,
        save_steps=1000,
    )
    return TrainConfig(
        data=str(data),
        out=str(out),
        model=CARConfig(**{**MODEL, **(model or {})}),
        **{**settings, **changes},
    )


def trainer_of(config: TrainConfig, model: CARDecoder) -> CARTrainer:
    datasets = (
        SpeechDataset(load_split(config.data, s), model.config, config.prompt_tokens, config.seed)
        for s in ("train", "dev")
    )
    return CARTrainer(dataclasses.replace(config, model=model.config), model, *datasets)


def log_of(out: Path | str, key: str = "") -> list[dict]:
    """Return the lines of a run's log, or those that contain `key`."""
    return [line for line in read_log(Path(out) / "log.jsonl") if not key or key in line]


def arguments(settings: dict) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def check_resumption(run: Callable, config_of: Callable, folder: Path) -> None:
    """Check how a training of 8 steps with a checkpoint at 4 resumes. config_of(out, **changes):
    settings of `run`.

    An interrupted run ends with the weights of an uninterrupted one; a finished run trains nothing;
    changed settings are used or refused; `resume_from_checkpoint=never` starts anew.
    """
    config, out = config_of(folder / "run"), folder / "run"
    whole = run(config).checksum()
    for name in ("model.safetensors", "log.jsonl"):
        (out / name).unlink()
    shutil.rmtree(out / "checkpoint-8")
    assert run(config).checksum() == whole
    losses = log_of(out, "loss")
    assert run(config).checksum() == whole and log_of(out, "loss") == losses
    with pytest.raises(CheckpointError, match="seed=0 .here 1.*resume_from_checkpoint=never"):
        run(config_of(out, seed=1))
    run(config_of(out, max_steps=9, learning_rate=7e-3))
    assert (
        '"changed": {"' in (out / "log.jsonl").read_text()
        and "learning_rate: 0.007" in (out / "config.yaml").read_text()
    )
    assert run(config_of(out, seed=1, resume_from_checkpoint="never")).checksum() != whole
