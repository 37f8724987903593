"""Companions of a decoder: the encoder of its texts, and a chunk policy."""

from collections.abc import Callable
from pathlib import Path

import torch

from dcar.errors import CheckpointError
from dcar.model.backbones.causal_lm import TextTokenizer
from dcar.model.backbones.decoder import TEXT_TOKENIZER_FOLDER
from dcar.model.load import Shipped, load_decoder_config
from dcar.sources.shipped import resolve
from dcar.text.inventory import TEXT_TOKENIZER
from dcar.text.phonemes import text_to_ids
from heads.policy import ChunkPolicy


def load_policy(directory: str | Path, device: str | torch.device = "cpu") -> ChunkPolicy:
    """Load a policy in eval mode; "starter" is the shipped one, "starter-t0.4" the one trained
    at temperature 0.4. Raises CheckpointError if the folder contains none."""
    return ChunkPolicy.from_pretrained(resolve(str(directory), "policy"), device)


def text_encoder(directory: str | Path, starter: Shipped = "decoder") -> Callable[[str], list[int]]:
    """Return the function that encodes text as ids for the decoder in `directory`: its own
    tokenizer, or phonemes."""
    directory = resolve(str(directory), starter)
    config = load_decoder_config(directory)
    if not config.phonemes.startswith(TEXT_TOKENIZER):
        return text_to_ids
    tokenizer = TextTokenizer.from_pretrained((directory / TEXT_TOKENIZER_FOLDER).absolute())
    if tokenizer.name != config.phonemes:
        raise CheckpointError(
            f"{directory}/{TEXT_TOKENIZER_FOLDER}: is {tokenizer.name}, but the decoder was "
            f"trained with {config.phonemes}; copy the folder from where the model was converted"
        )
    return tokenizer
