"""Load decoders and drafts of either kind, policies and text tokenizers; "starter" is what ships with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from dcar.errors import CheckpointError
from dcar.model.backbones.causal_lm import TextTokenizer
from dcar.model.backbones.decoder import TEXT_TOKENIZER_FOLDER, BackboneDecoder
from dcar.model.base import DecoderConfig
from dcar.model.car import CARDecoder
from dcar.model.draft import AnyDecoder, BackboneDraft, DraftDecoder
from dcar.sources.shipped import resolve
from dcar.text.phonemes import TEXT_TOKENIZER, text_to_ids
from heads.checkpoint import read_config
from heads.policy import ChunkPolicy

Shipped = Literal["decoder", "far"]
"""Which of the shipped decoders "starter" means: the one with seven heads, or the next-token decoder."""


def _class_of(directory: str | Path) -> type[CARDecoder] | type[BackboneDecoder]:
    kind = read_config(directory, "give the directory of a decoder, as `dcar train` and `dcar convert-backbone` write "
                                  "it").get("model_type")
    if kind in ("qwen2", "llama", "mistral", "qwen3"):
        raise CheckpointError(f"{directory}: this is a '{kind}' language model as it was published; make a decoder of "
                              f"it first: dcar convert-backbone kind=… source={directory} out=…")
    known = {c.model_type: c for c in (BackboneDecoder, BackboneDraft, DraftDecoder)}
    return known.get(str(kind), CARDecoder)


def load_decoder(directory: str | Path, device: str | torch.device = "cpu",
                 starter: Shipped = "decoder") -> AnyDecoder:
    """A decoder or a draft of either kind, in eval mode, by what its config.json says. CheckpointError if it is none.

    directory "starter" is the shipped decoder called `starter`.
    """
    folder = resolve(str(directory), starter)
    return _class_of(folder).from_pretrained(folder, device)


def load_decoder_config(directory: str | Path, starter: Shipped = "decoder") -> DecoderConfig:
    """Its configuration alone."""
    folder = resolve(str(directory), starter)
    return _class_of(folder).load_config(folder)


def load_policy(directory: str | Path, device: str | torch.device = "cpu") -> ChunkPolicy:
    """A policy in eval mode; "starter" is the shipped one, "starter-t0.4" the one trained at temperature 0.4.
    CheckpointError if the folder holds none."""
    return ChunkPolicy.from_pretrained(resolve(str(directory), "policy"), device)


def text_encoder(directory: str | Path, starter: Shipped = "decoder") -> Callable[[str], list[int]]:
    """What turns text into the ids that the decoder in `directory` reads: its own tokenizer, or phonemes."""
    directory = resolve(str(directory), starter)
    config = load_decoder_config(directory)
    if not config.phonemes.startswith(TEXT_TOKENIZER):
        return text_to_ids
    tokenizer = TextTokenizer.from_pretrained(directory / TEXT_TOKENIZER_FOLDER)
    if tokenizer.name != config.phonemes:
        raise CheckpointError(f"{directory}/{TEXT_TOKENIZER_FOLDER}: is {tokenizer.name}, but the decoder was trained "
                              f"with {config.phonemes}; copy the folder from where the model was converted")
    return tokenizer
