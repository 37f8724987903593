"""The prompts of a prepared split that a decoder can speak, and the vocoder that gives them a voice: chosen and checked
alike by stage two, by comparisons and by analyses.

What belongs together is checked here as well: a decoder, the ids that it reads and speaks, a vocoder. Parts
of different origin would work without an error and speak noise. Every command that puts them together asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dcar.errors import CheckpointError, DataError
from dcar.model.draft import AnyDecoder
from dcar.prepare.prepared import load_prepared, prepared_info, source_utterances, tokenizer_identity
from dcar.prompts.items import PromptItem, make_prompts
from dcar.tokens.base import SpeechTokenizer
from dcar.vocoder.base import PromptAudio, Vocoder, check_speaks
from dcar.vocoder.load import hears_prompts, load_vocoder


def all_prompts(data: str, split: str, decoder: AnyDecoder, prompt_tokens: int, seed: int) -> list[PromptItem]:
    """A prompt for every utterance of a prepared split (`make_prompts`); DataError if the corpus is of another
    tokenizer or phoneme inventory than the decoder."""
    check_together(decoder, prepared_info(data), data)
    return make_prompts(load_prepared(data, split), prompt_tokens, seed, decoder.config.bos)


def load_prompts(data: str, split: str, base: AnyDecoder, prompt_tokens: int, seed: int, limit: int | None = None,
                 min_seconds: float = 0.0) -> list[PromptItem]:
    """At most `limit` of `all_prompts`, of `min_seconds` or more, chosen by `seed`; DataError if there are none."""
    items = [i for i in all_prompts(data, split, base, prompt_tokens, seed) if i.duration >= min_seconds]
    if not items:
        raise DataError(f"{data}: split {split} has no utterance of {min_seconds} s or more")
    order = np.random.default_rng([seed, 7]).permutation(len(items))
    return [items[i] for i in order[: limit or len(items)]]


def vocoder_for(decoder: AnyDecoder, data: str, items: Sequence[PromptItem], spec: str, device: str = "cpu",
                prompts: PromptAudio | None = None) -> Vocoder:
    """The vocoder of a setting (`dcar.vocoder.load`) for prompts of a prepared corpus. CheckpointError if it speaks
    tokens of another tokenizer than the decoder's or at another rate than the corpus has.

    prompts: recordings of the items' voices; read from the corpus where they are not given and the vocoder needs them.
    """
    if prompts is None and hears_prompts(spec):
        prompts = PromptAudio.of_items(items, corpus_recordings(data))
    vocoder = load_vocoder(spec, device, prompts)
    check_together(decoder, prepared_info(data), data, vocoder)
    return vocoder


def corpus_recordings(prepared: str) -> Callable[[str], tuple[np.ndarray, int]]:
    """Recordings (waveform, rate in Hz) of a prepared corpus by utterance id; "ID (prompt)" is the prompt that the
    corpus gives for ID. DataError where the corpus is not there, or what is asked of it is not."""
    sources = source_utterances(prepared)

    def recording(utterance_id: str) -> tuple[np.ndarray, int]:
        if utterance_id.endswith(" (prompt)"):
            found = sources[utterance_id.removesuffix(" (prompt)")].load_prompt()
            if found is None:
                raise DataError(f"{prepared}: {utterance_id} has no audio in the corpus any more; prepare it again")
            return found
        return sources[utterance_id].load()

    return recording


def check_together(decoder: AnyDecoder, info: Mapping[str, Any], where: str,
                   vocoder: Vocoder | None = None) -> None:
    """DataError where ids are of another speech tokenizer, phoneme inventory or text tokenizer than the decoder's;
    CheckpointError where the vocoder does not speak the decoder's tokens at their rate.

    info: where the ids come from, as prepared.json says (`prepared_info`) or `made_by`; `where` names it in messages.
    What a decoder or a vocoder does not say of itself is not checked. A tokenizer's checksum covers all that decides
    its codes, so the name before it does not matter.
    """
    config, made = decoder.config, info["tokenizer"]
    if config.tokenizer and config.tokenizer.rpartition("@")[2] != made["checksum"]:
        raise DataError(f"{where}: has tokens of {tokenizer_identity(info)}, but the decoder was trained on tokens of "
                        f"{config.tokenizer}; load, or prepare the corpus with the decoder's own speech tokenizer")
    if made["vocab_size"] != config.speech_vocab_size:
        raise DataError(f"{where}: has {made['vocab_size']} speech codes, the decoder {config.speech_vocab_size}; use "
                        "the decoder's own speech tokenizer")
    if config.phonemes and config.phonemes != info["phonemes"]["version"]:
        raise DataError(f"{where}: has text ids of {info['phonemes']['version']}, but the decoder was trained on "
                        f"those of {config.phonemes}; prepare the corpus for this decoder (dcar prepare, then dcar "
                        "retokenize for a language model with a text tokenizer of its own)")
    if vocoder is not None:
        if vocoder.vocab_size != config.speech_vocab_size:
            raise CheckpointError(f"the vocoder knows {vocoder.vocab_size} codes, the decoder speaks "
                                  f"{config.speech_vocab_size}; use the vocoder of the decoder's tokenizer")
        check_speaks(vocoder, info)


def made_by(tokenizer: SpeechTokenizer, phonemes: str) -> dict[str, Any]:
    """What `check_together` wants to know of ids that were made here and now, not read from a prepared corpus.

    phonemes: PHONEME_VERSION, or the name of the text tokenizer.
    """
    return {"tokenizer": {"name": tokenizer.name, "checksum": tokenizer.checksum, "vocab_size": tokenizer.vocab_size,
                          "rate_hz": tokenizer.rate_hz},
            "phonemes": {"version": phonemes}}
