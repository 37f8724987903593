"""Train a draft model for speculative decoding from a decoder's own layers.

    dcar train-draft --config draft_starter decoder=runs/car out=runs/draft
    accelerate launch -m dcar.cli train-draft --config draft_starter

SSD (Interspeech 2025), section 3: the target's bottom two and top six of 24 layers (the same shares
of another depth), embeddings and top layers frozen, bottom layers and output head trained with
cross entropy on the next token. As in the paper, the target may be a decoder on a pretrained
language model (`dcar convert-backbone`). Trainer, optimiser and data are those of stage one
(dcar/train/car.py).
"""

import dataclasses
import sys
from dataclasses import dataclass
from typing import cast

import torch

from dcar.config import load_config, setting
from dcar.model.backbones.decoder import BackboneDecoder
from dcar.model.car import CARDecoder
from dcar.model.draft import BackboneDraft, DraftDecoder, build_draft
from dcar.model.load import load_decoder
from dcar.prepare.prepared import load_split, prepared_info
from dcar.process import run_claimed, run_command
from dcar.prompts.together import check_together
from dcar.sources.shipped import resolve
from dcar.train.car import fit
from dcar.train.checkpoints import last_of
from dcar.train.plan import decoder_shape
from dcar.train.settings import BackboneTraining, TokenModelSettings, TrainConfig


@dataclass
class TrainDraftConfig(TokenModelSettings):
    """Settings of `dcar train-draft`; those that stage one has too mean the same."""

    decoder: str = setting(
        "runs/car", "Decoder that the draft model is for; starter = the shipped one."
    )
    out: str = "runs/draft"
    bottom_layers: int = setting(
        0,
        "Number of the decoder's bottom layers in the draft model, which are trained; 0 = the "
        "paper's share of the depth (2 of 24).",
        minimum=0,
    )
    top_layers: int = setting(
        0,
        "Number of the decoder's top layers in the draft model, which are frozen; 0 = the paper's "
        "share of the depth (6 of 24).",
        minimum=0,
    )


def run(config: TrainDraftConfig) -> DraftDecoder | BackboneDraft:
    """Train (or resume training) and save the draft model, with the checksum of its target, in
    `config.out`.

    Raises ConfigError if the target is too shallow, DataError if the data is broken or has other
    tokens or phonemes than the target, CheckpointError if out holds another draft model.
    """
    prepared = prepared_info(config.data)
    folder = resolve(config.decoder, "decoder")
    target = load_decoder(folder)
    check_together(target, prepared, config.data)
    torch.manual_seed(config.seed)
    draft = build_draft(target, config.bottom_layers, config.top_layers)
    last = last_of(config, type(draft).load_config, draft.config, "draft")
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(TokenModelSettings)}
    backbone = BackboneTraining()
    if isinstance(draft, BackboneDecoder):
        backbone.path = str(folder)  # whose text tokenizer is copied
    trained = fit(
        TrainConfig(model=decoder_shape(draft.config), backbone=backbone, **settings),
        cast(CARDecoder, draft),
        load_split(config.data, "train"),
        load_split(config.data, "dev"),
        prepared,
        config,
        last,
    )
    assert isinstance(trained, DraftDecoder | BackboneDraft)
    return trained


CONFIG = TrainDraftConfig


def main(arguments: list[str] | None = None) -> None:
    run_claimed(run, load_config(CONFIG, arguments), resumes=True)


if __name__ == "__main__":
    sys.exit(run_command("dcar.train.draft", main))
