"""What belongs together: a decoder, the ids that it reads and speaks, a vocoder.

Parts of different origin would work without an error and speak noise. Every command that puts them
together asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dcar.errors import CheckpointError, DataError
from dcar.prepare.prepared import tokenizer_identity
from dcar.vocoder.base import Vocoder, check_speaks

if TYPE_CHECKING:
    from dcar.model.draft import AnyDecoder
    from dcar.tokens.base import SpeechTokenizer


def check_together(
    decoder: AnyDecoder, info: Mapping[str, Any], where: str, vocoder: Vocoder | None = None
) -> None:
    """DataError where ids are of another speech tokenizer, phoneme inventory or text tokenizer than
    the decoder's; CheckpointError where the vocoder does not speak the decoder's tokens at their
    rate.

    info: where the ids come from, as prepared.json says (`prepared_info`) or `made_by`; `where`
    names it in messages. What a decoder or a vocoder does not say of itself is not checked. A
    tokenizer's checksum covers all that decides its codes, so the name before it does not matter.
    """
    config, made = decoder.config, info["tokenizer"]
    if config.tokenizer and config.tokenizer.rpartition("@")[2] != made["checksum"]:
        raise DataError(
            f"{where}: has tokens of {tokenizer_identity(info)}, but the decoder was trained on "
            "tokens of "
            f"{config.tokenizer}; load, or prepare the corpus with the decoder's own speech "
            "tokenizer"
        )
    if made["vocab_size"] != config.speech_vocab_size:
        raise DataError(
            f"{where}: has {made['vocab_size']} speech codes, the decoder "
            f"{config.speech_vocab_size}; use "
            "the decoder's own speech tokenizer"
        )
    if config.phonemes and config.phonemes != info["phonemes"]["version"]:
        raise DataError(
            f"{where}: has text ids of {info['phonemes']['version']}, but the decoder was trained "
            "on "
            f"those of {config.phonemes}; prepare the corpus for this decoder (dcar prepare, then "
            "dcar "
            "retokenize for a language model with a text tokenizer of its own)"
        )
    if vocoder is not None:
        if vocoder.vocab_size != config.speech_vocab_size:
            raise CheckpointError(
                f"the vocoder knows {vocoder.vocab_size} codes, the decoder speaks "
                f"{config.speech_vocab_size}; use the vocoder of the decoder's tokenizer"
            )
        check_speaks(vocoder, info)


def made_by(tokenizer: SpeechTokenizer, phonemes: str) -> dict[str, Any]:
    """What `check_together` wants to know of ids that were made here and now, not read from a
    prepared corpus.

    phonemes: PHONEME_VERSION, or the name of the text tokenizer.
    """
    return {
        "tokenizer": {
            "name": tokenizer.name,
            "checksum": tokenizer.checksum,
            "vocab_size": tokenizer.vocab_size,
            "rate_hz": tokenizer.rate_hz,
        },
        "phonemes": {"version": phonemes},
    }
