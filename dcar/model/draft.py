"""Draft models for speculative decoding: a smaller decoder with the vocabulary of its target.

There are two kinds. `dcar train-draft` makes a draft model from the target's own layers (SSD,
Interspeech 2025, section 3: the bottom two and the top six of 24). It uses the target's embeddings
and belongs to that target; any other rejects it. Any other decoder with the same text ids, speech
ids and prompt layout may draft as well: LLaSA-1B for LLaSA-8B, a small CAR for a large one. Both
are decoders: alone they decode like any with one head.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcar.errors import ConfigError
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder
from dcar.model.base import DecoderConfig
from dcar.model.car import CARConfig, CARDecoder
from dcar.text.units import TEXT_TOKENIZER
from heads.checkpoint import check_trained_for

AnyDecoder = CARDecoder | BackboneDecoder
"""Decoder with its own weights, including draft models; `dcar.decoding.reader.Reader` decodes
with them."""

BOTTOM_SHARE, TOP_SHARE = 2 / 24, 6 / 24
"""Shares of the target's depth in the paper."""

SHARED = ("speech_vocab_size", "text_vocab_size", "bos", "tokenizer", "phonemes")
"""Settings that draft model and target must have in common: their ids and the layout of the
prompt."""


@dataclass
class InheritedConfig:
    """Settings of a draft model that identify the target that it was made for."""

    num_prediction_heads: int = 1
    target_checksum: str = ""  # of the decoder whose layers and embeddings it inherited
    inherited_layers: tuple[int, ...] = ()  # indices of those layers, bottom to top
    bottom_layers: int = 1  # how many of them are the target's first; the others are its last


@dataclass
class DraftConfig(InheritedConfig, CARConfig):
    """Shape of a draft model made from a CAR decoder."""


@dataclass
class BackboneDraftConfig(InheritedConfig, BackboneConfig):
    """Shape of a draft model made from a pretrained language model."""


class DraftDecoder(CARDecoder):
    """Draft model: p(y_{t+1} | y_1..y_t, x) at a fraction of the target's cost. Decodes like any
    CARDecoder with one head."""

    config_class = DraftConfig
    model_type = "dcar-draft"
    config: DraftConfig


class BackboneDraft(BackboneDecoder):
    """Draft model made from a pretrained language model. Decodes like any BackboneDecoder with
    one head."""

    config_class = BackboneDraftConfig
    model_type = "dcar-backbone-draft"
    config: BackboneDraftConfig


def check_draft(
    draft: AnyDecoder, target: AnyDecoder, checksum: Callable[[], str] | None = None
) -> None:
    """Raise ConfigError if the vocabularies of draft model and target differ, and
    CheckpointError if the draft model was made from another decoder's layers. checksum: function
    that returns the target's, if it was computed before."""
    check_vocabulary(draft.config, target.config)
    if isinstance(draft, DraftDecoder | BackboneDraft):
        own = target.checksum() if checksum is None else checksum()
        check_trained_for(draft.config.target_checksum, own, "draft model", "dcar train-draft")


def check_vocabulary(
    other: DecoderConfig,
    target: DecoderConfig,
    what: str = "draft model",
    remedy: str = "train a draft for this target with `dcar train-draft`",
) -> None:
    """Raise ConfigError if another decoder (called `what`) and the target have different
    vocabularies."""
    for name in SHARED:
        if name == "text_vocab_size" and target.phonemes.startswith(TEXT_TOKENIZER):
            # the tokenizer is the same; tables of models of one family are padded to different
            # sizes
            continue
        expected, actual = getattr(target, name), getattr(other, name)
        if actual != expected:
            raise ConfigError(
                f"the {what} has {name} {actual!r}, the target {expected!r}: both must use the "
                f"same ids; {remedy}"
            )


def build_draft(target: AnyDecoder, bottom: int = 0, top: int = 0) -> DraftDecoder | BackboneDraft:
    """Build an untrained draft model from the target's first `bottom` and last `top` layers (0 =
    the paper's shares of the depth).

    Its embeddings, top layers and final norm are frozen copies; its bottom layers and head start as
    copies and are trained. Raises ConfigError if the target is too shallow, or has adapters that
    are not merged.
    """
    trained, frozen = inherited_layers(target.config.num_layers, bottom, top)
    layers = trained + frozen
    draft_class: Any = BackboneDraft if isinstance(target, BackboneDecoder) else DraftDecoder
    shape = {f.name: getattr(target.config, f.name) for f in dataclasses.fields(target.config)}
    shape |= {
        "num_prediction_heads": 1,
        "target_checksum": target.checksum(),
        "inherited_layers": layers,
        "bottom_layers": len(trained),
    }
    if isinstance(target, BackboneDecoder):
        if target.config.lora:
            raise ConfigError(
                "the target has adapters that are not merged: give the decoder in the folder of a "
                "finished `dcar train`, not a checkpoint of the run"
            )
        # transformers fills in the kinds of the layers again; a list of the target's length would
        # not fit
        architecture = {k: v for k, v in target.config.architecture.items() if k != "layer_types"}
        shape["architecture"] = {**architecture, "num_hidden_layers": len(layers)}
    else:
        shape["num_layers"] = len(layers)
    draft: Any = draft_class(draft_class.config_class(**shape))
    modules = [*draft.inputs, *draft.layers, draft.norm, draft.heads.base]
    sources = [
        *target.inputs,
        *(target.layers[index] for index in layers),
        target.norm,
        target.heads.base,
    ]
    for module, source in zip(modules, sources, strict=True):
        module.load_state_dict(source.state_dict())
    for module in (*draft.inputs, *draft.layers[len(trained) :], draft.norm):
        module.requires_grad_(False)
    return draft.to(target.speech_embedding.weight.device)


def inherited_layers(
    depth: int, bottom: int = 0, top: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of the target's layers that a draft model inherits: its first `bottom` and
    its last `top` of `depth`.

    0 means the paper's share of the depth, rounded, at least one: 2 + 6 of 24, 1 + 3 of 12, 1 + 2
    of 8. Raises ConfigError if that is more than the target has.
    """
    bottom = bottom or max(1, round(BOTTOM_SHARE * depth))
    top = top or max(1, round(TOP_SHARE * depth))
    if bottom < 1 or top < 1 or bottom + top > depth:
        raise ConfigError(
            f"bottom_layers={bottom} and top_layers={top} do not fit a decoder of {depth} layers; "
            "choose at least one of each, and together no more than the decoder has"
        )
    return tuple(range(bottom)), tuple(range(depth - top, depth))
