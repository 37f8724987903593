"""Which utterance is the prompt of another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcar.prepare.columns import Split

VARIETY = 0.4
"""Share of the different codes of an utterance's best crop that every crop has."""


class PromptChooser:
    """Picks, for every utterance, another utterance of the same speaker and a crop of it. Who
    speaks is known from the columns of the split, so only the chosen row is read."""

    def __init__(self, split: Split, prompt_tokens: int):
        # a distilled corpus (launch/distil.py) has the recordings' tokens beside what a decoder
        # spoke
        self.speech = split.rows["recorded" if "recorded" in split.rows.column_names else "speech"]
        self.prompt_tokens = prompt_tokens
        self.speakers = split.columns["speaker"]
        # the rows of the first speaker, then of the second, …
        self.grouped = np.argsort(self.speakers, kind="stable")
        self.ends = np.cumsum(np.bincount(self.speakers))  # of every speaker's rows in `grouped`

    def choose(self, index: int, rng: np.random.Generator) -> int:
        """Index of the prompt utterance; the utterance itself only if its speaker has no other."""
        speaker = self.speakers[index]
        others = self.grouped[self.ends[speaker - 1] if speaker else 0 : self.ends[speaker]]
        if len(others) == 1:
            return index
        other = int(others[rng.integers(len(others) - 1)])
        return int(others[-1]) if other == index else other

    def crop(self, tokens: Sequence[int], rng: np.random.Generator) -> list[int]:
        """At most `prompt_tokens` consecutive tokens, from `start` on."""
        start = self.start(tokens, rng)
        return list(tokens[start : start + self.prompt_tokens])

    def start(self, tokens: Sequence[int], rng: np.random.Generator) -> int:
        """Draw where a crop begins; instead of silence the nearest place that is speech.

        Silence is known by its few codes: a crop of the starter tokenizer has 3 to 12 different
        ones in silence, 20 to 42 in speech.
        """
        tokens, length = list(tokens), self.prompt_tokens
        start = int(rng.integers(max(1, len(tokens) - length + 1)))
        crop = tokens[start : start + length]
        if len(crop) == len(tokens) or len(set(crop)) >= VARIETY * length:
            return start
        windows = np.sort(np.lib.stride_tricks.sliding_window_view(tokens, length), axis=1)
        codes = np.count_nonzero(np.diff(windows), axis=1) + 1
        spoken = np.flatnonzero(codes >= VARIETY * codes.max())
        return int(spoken[np.abs(spoken - start).argmin()])
