"""Checks that a decoder, its ids and a vocoder belong together.

Parts of different origin would run without an error and produce noise. Every command that combines
them calls `check_together`.
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
    """Raise DataError for ids of another speech tokenizer, phoneme inventory or text tokenizer than
    the decoder's; CheckpointError if the vocoder's tokens or their rate differ from the decoder's.

    info: origin of the ids, as in prepared.json (`prepared_info`) or from `made_by`; `where` names
    it in messages. Facts that a decoder or a vocoder does not record are not checked. A tokenizer's
    checksum covers everything that decides its codes, so the name before it is ignored.
    """
    config, made = decoder.config, info["tokenizer"]
    if config.tokenizer and config.tokenizer.rpartition("@")[2] != made["checksum"]:
        raise DataError(
            f"{where}: has tokens of {tokenizer_identity(info)}, but the decoder was trained on "
            f"tokens of {config.tokenizer}; use the decoder's own speech tokenizer, or prepare "
            "the corpus with it"
        )
    if made["vocab_size"] != config.speech_vocab_size:
        raise DataError(
            f"{where}: has {made['vocab_size']} speech codes, but the decoder has "
            f"{config.speech_vocab_size}; use the decoder's own speech tokenizer"
        )
    if config.phonemes and config.phonemes != info["phonemes"]["version"]:
        raise DataError(
            f"{where}: has text ids of {info['phonemes']['version']}, but the decoder was trained "
            f"on those of {config.phonemes}; prepare the corpus for this decoder (`dcar prepare`, "
            "followed by mode=retokenize for a language model with its own text tokenizer)"
        )
    if vocoder is not None:
        if vocoder.vocab_size != config.speech_vocab_size:
            raise CheckpointError(
                f"{where}: the vocoder has {vocoder.vocab_size} codes, but the decoder has "
                f"{config.speech_vocab_size}; use the vocoder of the decoder's tokenizer"
            )
        check_speaks(vocoder, info)


def made_by(tokenizer: SpeechTokenizer, phonemes: str) -> dict[str, Any]:
    """Return the facts that `check_together` needs about ids made in this process, not read from a
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
