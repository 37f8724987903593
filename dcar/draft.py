"""A draft model for speculative decoding: a shallow CARDecoder with one head that belongs to one target."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dcar.errors import CheckpointError, ConfigError
from dcar.model import CARConfig, CARDecoder
from heads.draft import inherit, inherited_layers

SHARED = ("speech_vocab_size", "text_vocab_size", "bos", "tokenizer", "phonemes")
"""What draft and target must have in common: their ids and the layout of the prompt."""


@dataclass
class DraftConfig(CARConfig):
    """Shape of a draft model, and the target that it was made for."""

    num_prediction_heads: int = 1
    target_checksum: str = ""  # of the decoder whose layers and embeddings it inherited
    inherited_layers: tuple[int, ...] = ()  # indices of those layers, bottom to top
    bottom_layers: int = 1  # how many of them are the target's first; the others are its last


class DraftDecoder(CARDecoder):
    """p(y_{t+1} | y_1..y_t, x) at a fraction of the target's cost. Decodes like any CARDecoder with one head."""

    config_class = DraftConfig
    model_type = "dcar-draft"
    config: DraftConfig

    def check_target(self, target: CARDecoder) -> None:
        """CheckpointError if the draft was made for another decoder, ConfigError if their vocabularies differ."""
        check_vocabulary(self.config, target.config)
        found = target.checksum()
        if self.config.target_checksum != found:
            raise CheckpointError(
                f"this draft model was made for the decoder {self.config.target_checksum[:12]}…, not for "
                f"{found[:12]}…: load its own decoder, or train a draft for this one with `dcar train-draft`")


def check_vocabulary(draft: CARConfig, target: CARConfig) -> None:
    """ConfigError where draft and target do not speak about the same ids."""
    for name in SHARED:
        ours, theirs = getattr(target, name), getattr(draft, name)
        if ours != theirs:
            raise ConfigError(f"the draft model has {name} {theirs!r}, the target {ours!r}: verification needs the "
                              "same ids on both sides; train a draft for this target with `dcar train-draft`")


def build_draft(target: CARDecoder, bottom: int = 0, top: int = 0) -> DraftDecoder:
    """An untrained draft of the target's first `bottom` and last `top` layers (0 = the paper's shares of the depth).

    Its embeddings, top layers and final norm are frozen copies; its bottom layers and head start as copies and are
    to be trained. ConfigError where the target is too shallow.
    """
    trained, frozen = inherited_layers(target.config.num_layers, bottom, top)
    layers = trained + frozen
    shape = {f.name: getattr(target.config, f.name) for f in dataclasses.fields(CARConfig)}
    draft = DraftDecoder(DraftConfig(**{
        **shape, "num_layers": len(layers), "num_prediction_heads": 1, "target_checksum": target.checksum(),
        "inherited_layers": layers, "bottom_layers": len(trained),
    }))
    inherit(draft, target, layers, len(trained))
    return draft.to(target.norm.weight.device)
