"""Checks that a decoder, its ids and a vocoder belong together.

Parts of different origin would run without an error and produce noise. Every command that combines
them calls `check_together`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dcar.errors import CheckpointError, DataError
from dcar.text.base import TextUnits
from dcar.text.languages import language_of
from dcar.tokens.origin import Origin, TokenizerInfo
from dcar.vocoder.base import Vocoder, check_speaks

if TYPE_CHECKING:
    from dcar.model.base import DecoderConfig
    from dcar.model.draft import AnyDecoder
    from dcar.tokens.base import SpeechTokenizer


def check_together(
    decoder: AnyDecoder, origin: Origin, where: str, vocoder: Vocoder | None = None
) -> None:
    """Raise DataError for ids of another speech tokenizer, phoneme inventory or text tokenizer than
    the decoder's; CheckpointError if the vocoder's tokens or their rate differ from the decoder's.

    origin: of the ids (`prepared_info`, `made_by`); `where` names it in messages. Facts that a
    decoder or a vocoder does not record are not checked, nor is the name of a tokenizer.
    """
    config, tokens_of = decoder.config, origin.tokenizer
    if config.tokenizer and config.tokenizer.rpartition("@")[2] != tokens_of.checksum:
        raise DataError(
            f"{where}: has tokens of {tokens_of.identity}, but the decoder was trained on "
            f"tokens of {config.tokenizer}; use the decoder's own speech tokenizer, or prepare "
            "the corpus with it"
        )
    if tokens_of.vocab_size != config.speech_vocab_size:
        raise DataError(
            f"{where}: has {tokens_of.vocab_size} speech codes, but the decoder has "
            f"{config.speech_vocab_size}; use the decoder's own speech tokenizer"
        )
    if config.phonemes and config.phonemes != origin.phonemes:
        raise DataError(
            f"{where}: has text ids of {origin.phonemes}, but the decoder was trained "
            f"on those of {config.phonemes}; prepare the corpus for this decoder (`dcar prepare`, "
            "followed by mode=retokenize for a language model with its own text tokenizer)"
        )
    _check_languages(decoder.config, origin.languages, where)
    if vocoder is not None:
        if vocoder.vocab_size != config.speech_vocab_size:
            raise CheckpointError(
                f"{where}: the vocoder has {vocoder.vocab_size} codes, but the decoder has "
                f"{config.speech_vocab_size}; use the vocoder of the decoder's tokenizer"
            )
        check_speaks(vocoder, tokens_of)


def _check_languages(config: DecoderConfig, languages: Iterable[str], where: str) -> None:
    """Raise DataError for a language that a decoder was not trained on, as far as it says."""
    strange = set(languages) - set(config.languages)
    if config.languages and strange:
        names = ", ".join(sorted(language_of(code).name for code in strange))
        known = ", ".join(language_of(code).name for code in config.languages)
        raise DataError(
            f"{where}: {names}, but the decoder was trained on {known}; use a decoder for it, or "
            "train this one on a corpus that has both"
        )


def made_by(tokenizer: SpeechTokenizer, units: TextUnits) -> Origin:
    """Return the origin of ids made in this process. units: of the texts."""
    info = TokenizerInfo(
        tokenizer.name, tokenizer.checksum, tokenizer.vocab_size, tokenizer.rate_hz
    )
    return Origin(info, units.name, languages=units.languages)
