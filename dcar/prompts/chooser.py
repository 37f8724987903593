"""Which utterance is the prompt of another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

VARIETY = 0.4
"""Share of the different codes of an utterance's best crop that every crop has."""


class PromptChooser:
    """Picks, for every utterance, another utterance of the same speaker and a crop of it."""

    def __init__(self, dataset, prompt_tokens: int):
        # a distilled corpus (launch/distil.py) has the recordings' tokens beside what a decoder spoke
        self.speech = dataset["recorded" if "recorded" in dataset.column_names else "speech"]
        self.prompt_tokens = prompt_tokens
        self.speakers = list(dataset["speaker"])
        self.by_speaker: dict[str, list[int]] = defaultdict(list)
        for i, speaker in enumerate(self.speakers):
            self.by_speaker[speaker].append(i)

    def choose(self, index: int, rng: np.random.Generator) -> int:
        """Index of the prompt utterance; the utterance itself only if its speaker has no other."""
        others = self.by_speaker[self.speakers[index]]
        if len(others) == 1:
            return index
        other = others[rng.integers(len(others) - 1)]
        return others[-1] if other == index else other

    def crop(self, tokens: Sequence[int], rng: np.random.Generator) -> list[int]:
        """At most `prompt_tokens` consecutive tokens; instead of silence the nearest that are speech.

        Silence is known by its few codes: a crop of the starter tokenizer has 3 to 12 different ones in silence, 20 to
        42 in speech.
        """
        tokens, length = list(tokens), self.prompt_tokens
        start = int(rng.integers(max(1, len(tokens) - length + 1)))
        crop = tokens[start : start + length]
        if len(crop) == len(tokens) or len(set(crop)) >= VARIETY * length:
            return crop
        windows = np.sort(np.lib.stride_tricks.sliding_window_view(tokens, length), axis=1)
        codes = np.count_nonzero(np.diff(windows), axis=1) + 1
        spoken = np.flatnonzero(codes >= VARIETY * codes.max())
        start = spoken[np.abs(spoken - start).argmin()]
        return tokens[start : start + length]
