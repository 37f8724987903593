"""Stage one in miniature: a model and settings that train in a second."""

from __future__ import annotations

import json
from pathlib import Path

from dcar.model.car import CARConfig
from dcar.train.car import TrainConfig

MODEL = dict(text_vocab_size=64, hidden_size=32, num_layers=2, num_attention_heads=2, ffn_size=64,
             num_prediction_heads=3, head_blocks=1, dropout=0.1, bos=True, speech_position_scale=0.3)


def tiny_config(data: Path, out: Path, model: dict | None = None, **changes) -> TrainConfig:
    settings = dict(prompt_tokens=5, batch_size=4, max_steps=6, warmup_steps=2, learning_rate=5e-3, log_steps=1,
                    eval_steps=1000, save_steps=1000)
    return TrainConfig(data=str(data), out=str(out), model=CARConfig(**{**MODEL, **(model or {})}),
                       **{**settings, **changes})


def log_of(out: Path | str) -> list[dict]:
    return [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
