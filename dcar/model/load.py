"""Loading of decoders and draft models of either kind; "starter" is the one that ships with the
package."""

from pathlib import Path
from typing import Literal

import torch

from dcar.errors import CheckpointError
from dcar.model.backbones.decoder import BackboneDecoder
from dcar.model.base import DecoderConfig
from dcar.model.car import CARDecoder
from dcar.model.draft import AnyDecoder, BackboneDraft, DraftDecoder
from dcar.model.precision import cast_decoder, chosen_dtype
from dcar.sources.shipped import resolve
from heads.checkpoint import read_config

Shipped = Literal["decoder", "far"]
"""Name of the shipped decoder that "starter" stands for: the one with several heads, or the
next-token decoder."""


def _class_of(directory: str | Path) -> type[CARDecoder] | type[BackboneDecoder]:
    kind = read_config(
        directory,
        "give the directory of a decoder, as `dcar train` and `dcar convert-backbone` write it",
    ).get("model_type")
    if kind in ("qwen2", "llama", "mistral", "qwen3"):
        raise CheckpointError(
            f"{directory}: a published '{kind}' language model; make a decoder from it first: "
            f"dcar convert-backbone kind=… source={directory} out=…"
        )
    classes = {c.model_type: c for c in (BackboneDecoder, BackboneDraft, DraftDecoder)}
    return classes.get(str(kind), CARDecoder)


def load_decoder(
    directory: str | Path,
    device: str | torch.device = "cpu",
    starter: Shipped = "decoder",
    dtype: str | None = None,
) -> AnyDecoder:
    """Load a decoder or a draft model of either kind, in eval mode, as its config.json says. Raises
    CheckpointError if it is neither.

    directory: "starter" is the shipped decoder called `starter`. dtype: the setting of commands
    that decode (`chosen_dtype`); None = float32, for training or comparison with others.
    """
    folder = resolve(str(directory), starter)
    decoder = _class_of(folder).from_pretrained(folder)
    if dtype is not None:
        decoder = cast_decoder(decoder, chosen_dtype(dtype, device))
    return decoder.to(device)


def load_decoder_config(directory: str | Path, starter: Shipped = "decoder") -> DecoderConfig:
    """Load only the configuration of a decoder."""
    folder = resolve(str(directory), starter)
    return _class_of(folder).load_config(folder)
