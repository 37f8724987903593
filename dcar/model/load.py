"""Decoders and drafts of either kind, by what their folder says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from dcar.errors import CheckpointError
from dcar.model.backbones.decoder import TEXT_TOKENIZER_FOLDER, BackboneConfig, BackboneDecoder
from dcar.model.backbones.text_tokens import TextTokenizer
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import BackboneDraft, DraftDecoder
from dcar.text.phonemes import TEXT_TOKENIZER, text_to_ids


def _class_of(directory: str | Path) -> type[CARDecoder] | type[BackboneDecoder]:
    path = Path(directory) / "config.json"
    try:
        kind = json.loads(path.read_text()).get("model_type")
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot read the model's configuration ({error}); give the directory of a "
                              "decoder, as `dcar train` and `dcar convert-backbone` write it") from error
    if kind in ("qwen2", "llama", "mistral", "qwen3"):
        raise CheckpointError(f"{path}: this is a '{kind}' language model as it was published; make a decoder of it "
                              f"first: dcar convert-backbone kind=… source={directory} out=…")
    known = {c.model_type: c for c in (BackboneDecoder, BackboneDraft, DraftDecoder)}
    return known.get(kind, CARDecoder)


def load_decoder(directory: str | Path, device: str | torch.device = "cpu") -> CARDecoder:
    """A decoder or a draft of either kind, in eval mode, by what its config.json says. CheckpointError if it is none.

    Typed as CARDecoder, whose interface all have.
    """
    return cast(CARDecoder, _class_of(directory).from_pretrained(directory, device))


def load_decoder_config(directory: str | Path) -> CARConfig | BackboneConfig:
    """Its configuration alone."""
    return _class_of(directory).load_config(directory)


def text_encoder(directory: str | Path) -> Callable[[str], list[int]]:
    """What turns text into the ids that the decoder in `directory` reads: its own tokenizer, or phonemes."""
    config = load_decoder_config(directory)
    if not config.phonemes.startswith(TEXT_TOKENIZER):
        return text_to_ids
    tokenizer = TextTokenizer.from_pretrained(Path(directory) / TEXT_TOKENIZER_FOLDER)
    if tokenizer.name != config.phonemes:
        raise CheckpointError(f"{directory}/{TEXT_TOKENIZER_FOLDER}: is {tokenizer.name}, but the decoder was trained "
                              f"with {config.phonemes}; copy the folder from where the model was converted")
    return tokenizer
