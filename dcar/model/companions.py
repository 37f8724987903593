"""Companions of a decoder: the encoder of its texts, and a chunk policy."""

import json
import logging
from functools import cache
from pathlib import Path

import torch

from dcar.errors import CheckpointError, ConfigError
from dcar.model.backbones.causal_lm import TextTokenizer
from dcar.model.backbones.decoder import TEXT_TOKENIZER_FOLDER
from dcar.model.base import DecoderConfig
from dcar.model.load import Shipped, load_decoder_config
from dcar.sources.shipped import resolve
from dcar.text.base import TextUnits
from dcar.text.languages import UNDETERMINED, language_of
from dcar.text.units import TEXT_TOKENIZER, units_for, units_named
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


def language_for(
    units: TextUnits, config: DecoderConfig, asked: str = "", where: str = "language"
) -> str:
    """Return the language in which a decoder is to read a text: the one asked for, or the only one
    that it knows; UNDETERMINED if it does not say. Raises ConfigError for a language that it was
    not trained on, and if none of several is asked for."""
    known = units.languages or config.languages
    names = ", ".join(f"{code} ({language_of(code).name})" for code in known)
    if asked:
        code = language_of(asked).code
        if known and code not in known:
            raise ConfigError(
                f"{where}={asked}: the decoder was not trained on {language_of(code).name}, but on "
                f"{names}"
            )
        return code
    if len(known) > 1:
        raise ConfigError(f"{where} is not set: the decoder speaks {names}; choose one")
    return known[0] if known else UNDETERMINED


def text_units(directory: str | Path, starter: Shipped = "decoder") -> TextUnits:
    """Return the units in which the decoder in `directory` reads text: phonemes, characters, or the
    tokens of its own tokenizer. Raises CheckpointError or AssetError if they are missing."""
    directory = resolve(str(directory), starter)
    config = load_decoder_config(directory)
    if not config.phonemes:
        return units_for()
    if not config.phonemes.startswith(TEXT_TOKENIZER):
        return units_named(config.phonemes, directory)
    normalize = config.phonemes.partition("+")[2]
    tokenizer = TextTokenizer.from_pretrained(
        (directory / TEXT_TOKENIZER_FOLDER).absolute(), normalize
    )
    if tokenizer.name != config.phonemes:
        raise CheckpointError(
            f"{directory}/{TEXT_TOKENIZER_FOLDER}: is {tokenizer.name}, but the decoder was "
            f"trained with {config.phonemes}; copy the folder from where the model was converted"
        )
    return tokenizer
