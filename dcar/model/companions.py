"""Companions of a decoder: the encoder of its texts, and a chunk policy."""

import json
import logging
from collections.abc import Callable
from functools import cache
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

logger = logging.getLogger(__name__)


def load_policy(directory: str | Path, device: str | torch.device = "cpu") -> ChunkPolicy:
    """Load a policy in eval mode; "starter-t1.0" and "starter-t0.4" are those that ship. Raises
    CheckpointError if the folder contains none."""
    return ChunkPolicy.from_pretrained(resolve(str(directory), "policy"), device)


FAR_TEMPERATURE = 0.25
"""Difference of temperatures from which a policy no longer fits: it judges chances of tokens."""


@cache
def note_temperature(directory: str | Path, temperature: float) -> None:
    """Log a note, once, if a policy was trained at a temperature far from the one at which tokens
    are drawn, as far as its provenance.json says."""
    try:
        text = (resolve(str(directory), "policy") / "provenance.json").read_text(encoding="utf-8")
        trained = json.loads(text)["config"]["temperature"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # the weights of a policy are all that it needs
    if isinstance(trained, int | float) and abs(trained - temperature) >= FAR_TEMPERATURE:
        logger.warning(
            "note: policy %s was trained at temperature %g, but tokens are drawn at %g: set "
            "temperature=%g, or give a policy for this one",
            directory,
            trained,
            temperature,
            trained,
        )


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
