"""The prompts of a prepared split that a decoder can speak, chosen and checked alike by stage two and by analyses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dcar.errors import DataError
from dcar.model.car import CARDecoder
from dcar.prepare.prepared import load_prepared, prepared_info, source_utterances, tokenizer_identity
from dcar.prompts.items import PromptItem, make_prompts


def check_prepared(data: str, decoder: CARDecoder) -> None:
    """DataError if a prepared corpus is of another tokenizer or phoneme inventory than the decoder."""
    info, config = prepared_info(data), decoder.config
    for kind, ours, theirs in (
        ("tokenizer", config.tokenizer, tokenizer_identity(info)),
        ("phoneme inventory", config.phonemes, str(info["phonemes"]["version"])),
    ):
        if ours and str(ours) != theirs:
            raise DataError(f"{data}: prepared with the {kind} {theirs}, but the decoder was trained with {ours}; "
                            "prepare the corpus with the decoder's own")


def load_prompts(data: str, split: str, base: CARDecoder, prompt_tokens: int, seed: int, limit: int | None = None,
                 min_seconds: float = 0.0) -> list[PromptItem]:
    """Prompts of a prepared split, at most `limit`, chosen by `seed`; DataError if it is of another tokenizer or
    phoneme inventory than the decoder."""
    check_prepared(data, base)
    items = [i for i in make_prompts(load_prepared(data, split), prompt_tokens, seed, base.config.bos)
             if i.duration >= min_seconds]
    if not items:
        raise DataError(f"{data}: split {split} has no utterance of {min_seconds} s or more")
    order = np.random.default_rng([seed, 7]).permutation(len(items))
    return [items[i] for i in order[: limit or len(items)]]


def corpus_recordings(prepared: str) -> Callable[[str], tuple[np.ndarray, int]]:
    """Recordings (waveform, rate in Hz) of a prepared corpus by utterance id; "ID (prompt)" is the prompt that the
    corpus gives for ID. DataError where the corpus is not there, or the prompt no longer is."""
    sources = source_utterances(prepared)

    def recording(utterance_id: str) -> tuple[np.ndarray, int]:
        if utterance_id.endswith(" (prompt)"):
            found = sources[utterance_id.removesuffix(" (prompt)")].load_prompt()
            if found is None:
                raise DataError(f"{prepared}: {utterance_id} has no audio in the corpus any more; prepare it again")
            return found
        return sources[utterance_id].load()

    return recording
