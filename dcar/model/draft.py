"""Draft models for speculative decoding: a smaller decoder that speaks about the same ids as its target.

Two kinds. A draft that `dcar train-draft` makes of the target's own layers (SSD, section 3) belongs to that target and
is refused by any other. Any other decoder with the same text ids, speech ids and layout of the prompt may draft as
well: LLaSA-1B for LLaSA-8B, a small CAR for a large one. Both are decoders: alone they decode like any with one head.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dcar.errors import CheckpointError, ConfigError
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder
from dcar.model.base import DecoderConfig
from dcar.model.car import CARConfig, CARDecoder
from dcar.text.phonemes import TEXT_TOKENIZER
from heads.inherit import inherit, inherited_layers

AnyDecoder = CARDecoder | BackboneDecoder
"""A decoder with weights of its own, drafts included; `dcar.model.base.Decoder` is what decoding asks of it."""

SHARED = ("speech_vocab_size", "text_vocab_size", "bos", "tokenizer", "phonemes")
"""What draft and target must have in common: their ids and the layout of the prompt."""


@dataclass
class DraftConfig(CARConfig):
    """Shape of a draft model, and the target that it was made for."""

    num_prediction_heads: int = 1
    target_checksum: str = ""  # of the decoder whose layers and embeddings it inherited
    inherited_layers: tuple[int, ...] = ()  # indices of those layers, bottom to top
    bottom_layers: int = 1  # how many of them are the target's first; the others are its last


@dataclass
class BackboneDraftConfig(BackboneConfig):
    """The same for a draft made of a pretrained language model."""

    num_prediction_heads: int = 1
    target_checksum: str = ""
    inherited_layers: tuple[int, ...] = ()
    bottom_layers: int = 1


class Inherited:
    """Mixin of drafts that belong to one target."""

    config: Any

    def check_target(self, target: AnyDecoder) -> None:
        """CheckpointError if the draft was made for another decoder, ConfigError if their vocabularies differ."""
        check_vocabulary(self.config, target.config)
        found = target.checksum()
        if self.config.target_checksum != found:
            raise CheckpointError(
                f"this draft model was made for the decoder {self.config.target_checksum[:12]}…, not for "
                f"{found[:12]}…: load its own decoder, or train a draft for this one with `dcar train-draft`")


class DraftDecoder(Inherited, CARDecoder):
    """p(y_{t+1} | y_1..y_t, x) at a fraction of the target's cost. Decodes like any CARDecoder with one head."""

    config_class = DraftConfig
    model_type = "dcar-draft"
    config: DraftConfig


class BackboneDraft(Inherited, BackboneDecoder):
    """The same of a pretrained language model. Decodes like any BackboneDecoder with one head."""

    config_class = BackboneDraftConfig
    model_type = "dcar-backbone-draft"
    config: BackboneDraftConfig


def check_draft(draft: AnyDecoder, target: AnyDecoder) -> None:
    """ConfigError where draft and target do not speak about the same ids, CheckpointError where the draft was made of
    another decoder's layers."""
    if isinstance(draft, Inherited):
        draft.check_target(target)
    check_vocabulary(draft.config, target.config)


def check_vocabulary(other: DecoderConfig, target: DecoderConfig, what: str = "draft model",
                     remedy: str = "train a draft for this target with `dcar train-draft`") -> None:
    """ConfigError where another decoder and the target do not speak about the same ids; `what` the other is."""
    for name in SHARED:
        if name == "text_vocab_size" and target.phonemes.startswith(TEXT_TOKENIZER):
            continue  # the tokenizer is the same; tables of models of one family are padded to different sizes
        ours, theirs = getattr(target, name), getattr(other, name)
        if ours != theirs:
            raise ConfigError(f"the {what} has {name} {theirs!r}, the target {ours!r}: both must speak about the same "
                              f"ids; {remedy}")


def build_draft(target: AnyDecoder, bottom: int = 0,
                top: int = 0) -> DraftDecoder | BackboneDraft:
    """An untrained draft of the target's first `bottom` and last `top` layers (0 = the paper's shares of the depth).

    Its embeddings, top layers and final norm are frozen copies; its bottom layers and head start as copies and are
    to be trained. ConfigError where the target is too shallow, or has adapters that are not merged.
    """
    trained, frozen = inherited_layers(target.config.num_layers, bottom, top)
    layers = trained + frozen
    own = {"num_prediction_heads": 1, "target_checksum": target.checksum(), "inherited_layers": layers,
           "bottom_layers": len(trained)}
    draft: Any
    if isinstance(target, BackboneDecoder):
        if target.config.lora:
            raise ConfigError("the target has adapters that are not merged: give the decoder that `dcar train` left in "
                              "its folder, not a checkpoint of the run")
        shape = {f.name: getattr(target.config, f.name) for f in dataclasses.fields(BackboneConfig)}
        # transformers fills in the kinds of the layers again; a list of the target's length would not fit
        architecture = {k: v for k, v in target.config.architecture.items() if k != "layer_types"}
        draft = BackboneDraft(BackboneDraftConfig(
            **{**shape, **own, "architecture": {**architecture, "num_hidden_layers": len(layers)}}))
    else:
        shape = {f.name: getattr(target.config, f.name) for f in dataclasses.fields(CARConfig)}
        draft = DraftDecoder(DraftConfig(**{**shape, **own, "num_layers": len(layers)}))
    inherit(draft, target, layers, len(trained))
    return draft.to(target.speech_embedding.weight.device)
