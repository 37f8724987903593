"""Choice of the prompt utterance for each utterance of a split."""

import logging
from collections.abc import Sequence

import numpy as np

from dcar.errors import DataError
from dcar.prepare.columns import Split

logger = logging.getLogger(__name__)

VARIETY = 0.4
"""Least number of different codes in a crop, as a share of the most that any crop of the
utterance has."""


def own_prompt(split: Split) -> np.ndarray:
    """Return True for each utterance of a split that could only be its own prompt, bool [N]: its
    speaker has no other, and the corpus names no prompt."""
    speaker = split.columns["speaker"]
    return (np.bincount(speaker)[speaker] == 1) & (split.columns["has_prompt"] == 0)


def with_prompts(split: Split, where: str) -> Split:
    """Return a split without the utterances that could only be their own prompts, because a
    decoder would read there what it is to say. Their number is logged.

    where: name of the split in messages. Raises DataError if no utterance is left.
    """
    own = own_prompt(split)
    if not own.any():
        return split
    if own.all():
        raise DataError(
            f"{where}: no speaker has two utterances, so each would be its own prompt; name the "
            "speakers, raise dev_fraction or test_fraction of dcar prepare, or give rows a "
            "prompt_audio"
        )
    logger.warning(
        "%s: %d of %d utterances are left out: their speakers have no other one, so each would be "
        "its own prompt",
        where,
        own.sum(),
        len(own),
    )
    return split.select(np.flatnonzero(~own))


class PromptChooser:
    """Choice, for every utterance, of another utterance of the same speaker and of a crop of it.
    Speakers are known from the columns of the split, so only the chosen row is read."""

    def __init__(self, split: Split, prompt_tokens: int):
        # a distilled corpus (launch/distil.py) stores the recordings' tokens in addition to those
        # that a decoder generated
        recorded = "recorded" in split.rows.column_names
        self.speech = split.rows["recorded" if recorded else "speech"]
        self.prompt_tokens = prompt_tokens
        self.speakers = split.columns["speaker"]
        # the rows of the first speaker, then those of the second, …
        self.grouped = np.argsort(self.speakers, kind="stable")
        self.ends = np.cumsum(np.bincount(self.speakers))  # end of each speaker's rows in `grouped`

    def choose(self, index: int, rng: np.random.Generator) -> int:
        """Return the index of the prompt utterance: the utterance itself only if its speaker has
        no other."""
        speaker = self.speakers[index]
        first = self.ends[speaker - 1] if speaker else 0
        others = self.grouped[first : self.ends[speaker]]
        if len(others) == 1:
            return index
        other = int(others[rng.integers(len(others) - 1)])
        return int(others[-1]) if other == index else other

    def crop(self, tokens: Sequence[int], rng: np.random.Generator) -> list[int]:
        """Return at most `prompt_tokens` consecutive tokens, beginning at a place drawn by
        `start`."""
        start = self.start(tokens, rng)
        return list(tokens[start : start + self.prompt_tokens])

    def start(self, tokens: Sequence[int], rng: np.random.Generator) -> int:
        """Draw the place where a crop begins. If it is silent, return the nearest place with
        speech.

        Silence is recognised by its few codes: a crop of the starter tokenizer has 3 to 12
        different codes in silence, 20 to 42 in speech.
        """
        tokens, length = list(tokens), self.prompt_tokens
        start = int(rng.integers(max(1, len(tokens) - length + 1)))
        crop = tokens[start : start + length]
        if len(crop) == len(tokens) or len(set(crop)) >= VARIETY * length:
            return start
        windows = np.sort(np.lib.stride_tricks.sliding_window_view(tokens, length), axis=1)
        codes = np.count_nonzero(np.diff(windows), axis=1) + 1
        with_speech = np.flatnonzero(codes >= VARIETY * codes.max())
        return int(with_speech[np.abs(with_speech - start).argmin()])
