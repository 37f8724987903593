"""Train a draft model for speculative decoding out of a decoder's own layers.

    dcar train-draft --config launch/recipes/draft_starter.yaml target=runs/car out_dir=runs/draft
    accelerate launch -m dcar.train.draft --config launch/recipes/draft_starter.yaml

SSD (Interspeech 2025), section 3: the target's bottom two and top six of 24 layers (the same shares of another depth),
embeddings and top layers frozen, bottom layers and output head trained with cross entropy on the next token. The
target may be a decoder on a pretrained language model (`dcar convert-backbone`), as the paper's is. Trainer, optimiser
and data are those of stage one (dcar/train/car.py).
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from dcar.config import load_config
from dcar.errors import CheckpointError, ConfigError
from dcar.model.backbones.decoder import BackboneDecoder
from dcar.model.car import CARDecoder
from dcar.model.draft import BackboneDraft, DraftDecoder, build_draft
from dcar.model.load import load_decoder
from dcar.prepare.run import load_prepared, prepared_info
from dcar.process import run_command
from dcar.prompts.together import check_together
from dcar.sources.shipped import resolve
from dcar.train.car import BackboneTraining, TrainConfig, decoder_shape, differing, fit
from dcar.train.checkpoints import latest_checkpoint


@dataclass
class TrainDraftConfig:
    """Settings of a draft's training; those that stage one has too mean the same."""

    target: str = "runs/car"  # the decoder that the draft is for; "starter" = the shipped one
    data: str = "runs/prepared"  # folder written by `dcar prepare`, with the target's tokenizer
    out_dir: str = "runs/draft"
    bottom_layers: int = 0  # of the target, trained; 0 = the paper's share of the depth (2 of 24)
    top_layers: int = 0  # of the target, frozen; 0 = the paper's share (6 of 24)
    prompt_tokens: int = 50
    batch_size: int = 16
    gradient_accumulation: int = 1
    max_steps: int = 1000
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 100
    max_grad_norm: float = 1.0
    input_corruption: float = 0.0
    bf16: bool = False
    seed: int = 0
    eval_steps: int = 250
    save_steps: int = 250
    log_steps: int = 25
    workers: int = 0
    tensorboard: bool = False
    resume: bool = True  # go on from the last checkpoint in out_dir, bit for bit
    wait_minutes: float = 30.0  # how long processes wait for each other before they give up

    def __post_init__(self):
        if self.bottom_layers < 0 or self.top_layers < 0:
            raise ConfigError("bottom_layers and top_layers count layers of the target; 0 = the paper's share")


def run(config: TrainDraftConfig) -> DraftDecoder | BackboneDraft:
    """Train (or go on training) and save the draft, with the checksum of its target, into `config.out_dir`.

    Raises ConfigError where the target is too shallow, DataError where the data is broken or has other tokens or
    phonemes than the target, CheckpointError where out_dir holds another draft.
    """
    prepared = prepared_info(config.data)
    folder = resolve(config.target, "decoder")
    target = load_decoder(folder)
    check_together(target, prepared, config.data)
    torch.manual_seed(config.seed)
    draft = build_draft(target, config.bottom_layers, config.top_layers)
    last = latest_checkpoint(Path(config.out_dir)) if config.resume else None
    if last and (differences := differing(type(draft).load_config(last), draft.config)):
        raise CheckpointError(f"{last}: a checkpoint of another draft: {differences}; choose another out_dir, or "
                              "resume=false to start again")
    ours = {f.name for f in dataclasses.fields(TrainConfig)} - {"model", "backbone"}
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name in ours}
    backbone = BackboneTraining()
    if isinstance(draft, BackboneDecoder):
        backbone.path = str(folder)  # whose text tokenizer goes along
    trained = fit(TrainConfig(model=decoder_shape(draft.config), backbone=backbone, **settings),
                  cast(CARDecoder, draft), load_prepared(config.data, "train"), load_prepared(config.data, "dev"),
                  prepared, config, last)
    assert isinstance(trained, DraftDecoder | BackboneDraft)
    return trained


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(load_config(TrainDraftConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("dcar.train.draft", main))
