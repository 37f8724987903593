"""Stage one in miniature: a model and settings that train in a second."""

import json
import shutil
from collections.abc import Callable
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


def check_resumption(run: Callable, config_of: Callable, folder: Path) -> None:
    """A training of 8 steps with a checkpoint at 4 that was cut off ends in the weights of one that was not; a finished
    one trains nothing; `resume=False` starts anew. config_of(out, **changes): settings of `run`."""
    whole, out = run(config_of(folder / "whole")), folder / "halves"
    run(config_of(out))
    for name in ("model.safetensors", "log.jsonl"):
        (out / name).unlink()
    shutil.rmtree(out / "checkpoint-8")
    assert run(config_of(out)).checksum() == whole.checksum()
    lines = len(log_of(folder / "whole"))
    assert run(config_of(folder / "whole")).checksum() == whole.checksum()
    assert len(log_of(folder / "whole")) == lines
    assert run(config_of(folder / "whole", seed=1, resume=False)).checksum() != whole.checksum()
