"""The prompts of a prepared split that a decoder can speak, and the vocoder that gives them a voice: chosen and checked
alike by stage two, by comparisons and by analyses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dcar.errors import DataError
from dcar.model.draft import AnyDecoder
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.prepare.recordings import source_utterances
from dcar.prompts.items import PromptItem, make_prompts
from dcar.prompts.together import check_together
from dcar.vocoder.base import PromptAudio, Vocoder
from dcar.vocoder.load import hears_prompts, load_vocoder
from dcar.voices.speech import find_speech


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
            return find_speech(*found).cut(*found), found[1]  # what the corpus was prepared from
        return sources[utterance_id].load()

    return recording
