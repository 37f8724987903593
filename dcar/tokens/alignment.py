"""Alignment of a text's phonemes to its speech tokens, without a recogniser.

A discrete hidden Markov model: the states of an utterance are its phonemes, and each emits codes
with p(code | phoneme). Those distributions are learned from the utterances themselves, from a flat
start, in a few rounds of Viterbi alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcar.errors import TextError
from dcar.text.base import SymbolUnits
from dcar.text.common import FIRST, PHRASE_MARKS, WORD_BOUNDARY

SILENCE = 0  # label of the state before and after the words; no phoneme has the id of padding
BOUNDARY, *MARKS = map(FIRST.index, (WORD_BOUNDARY, *PHRASE_MARKS))  # between words; for pauses
ENOUGH = 60  # utterances that suffice to fit an aligner for plots


@dataclass(frozen=True)
class Span:
    """A phoneme (empty: silence) and its tokens, from start to end - 1."""

    phoneme: str
    start: int
    end: int


class PhonemeAligner:
    """Aligner of texts to tokens, fitted on other utterances with the same tokens."""

    def __init__(self, emission: np.ndarray, units: SymbolUnits):
        """Store the model. emission: p(code | phoneme) [phonemes, codes]."""
        self._score, self._units = np.log2(emission), units

    @classmethod
    def fit(
        cls,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[str],
        vocab_size: int,
        units: SymbolUnits,
    ) -> PhonemeAligner | None:
        """Fit an aligner on the first utterances, at most ENOUGH, and their texts, read in `units`.
        Return None if no text can be aligned to its tokens (see `align`)."""
        first = list(zip(tokens, texts, strict=True))[:ENOUGH]
        pairs = [(np.asarray(speech), phoneme_states(_ids(text, units))) for speech, text in first]
        usable = [(codes, states) for codes, states in pairs if 2 < len(states) <= len(codes)]
        if not usable:
            return None
        codes, states = zip(*usable, strict=True)
        return cls(fit_alignment(codes, states, vocab_size, units.size), units)

    def align(self, tokens: Sequence[int], text: str) -> list[Span]:
        """Return the phonemes of a text in order, with silence at both ends and at the punctuation
        marks within.

        The list is empty if there are fewer tokens than phonemes, or if the text cannot be read.
        """
        ids = _ids(text, self._units)
        inner = [SILENCE if i in MARKS else i for i in ids[:-1] if i != BOUNDARY]
        sequence = np.array([SILENCE, *inner, SILENCE])
        if not ids or len(tokens) < len(sequence):
            return []
        states = best_states(self._score, np.asarray(tokens), sequence)
        first = np.searchsorted(states, np.arange(len(sequence) + 1))
        names = ["" if label == SILENCE else self._units.symbols[label] for label in sequence]
        return [
            Span(name, int(a), int(b))
            for name, a, b in zip(names, first[:-1], first[1:], strict=True)
        ]


def _ids(text: str, units: SymbolUnits) -> list[int]:
    """Return the ids of a text; none if it cannot be read."""
    try:
        return units(text)
    except TextError:
        return []


def phoneme_states(text: Sequence[int]) -> np.ndarray:
    """Return the labels of an utterance's states: its phonemes without marks, and silence at
    both ends."""
    return np.array([SILENCE, *(i for i in text if i != BOUNDARY and i not in MARKS), SILENCE])


def smoothed(
    codes: np.ndarray, labels: np.ndarray | None, vocab_size: int, num_labels: int
) -> np.ndarray:
    """Return p(code | label) [labels, codes], interpolated with the marginal, which is itself
    interpolated with the uniform distribution. labels: None for the marginal alone [1, codes]."""
    counts = np.bincount(codes, minlength=vocab_size).astype(np.float64)
    marginal = (counts + 0.5) / (counts.sum() + 0.5 * vocab_size)
    if labels is None:
        return marginal[None]
    table = np.bincount(labels * vocab_size + codes, minlength=num_labels * vocab_size).reshape(
        num_labels, vocab_size
    )
    strength = float(vocab_size)
    return (table + strength * marginal) / (table.sum(1, keepdims=True) + strength)


def fit_alignment(
    codes: Sequence[np.ndarray],
    sequences: Sequence[np.ndarray],
    vocab_size: int,
    num_labels: int,
    iterations: int = 6,
) -> np.ndarray:
    """Fit p(code | phoneme) of `num_labels` phonemes from a flat start: equal shares of time first,
    then `iterations` Viterbi alignments."""
    labels = [
        s[np.arange(len(c)) * len(s) // len(c)] for c, s in zip(codes, sequences, strict=True)
    ]
    every = np.concatenate(codes)
    for _ in range(iterations):
        emission = smoothed(every, np.concatenate(labels), vocab_size, num_labels)
        score = np.log2(emission)
        labels = [best_path(score, c, s) for c, s in zip(codes, sequences, strict=True)]
    return smoothed(every, np.concatenate(labels), vocab_size, num_labels)


def best_path(score: np.ndarray, codes: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """Return the best monotone labelling [T] of codes [T] by the states `sequence` [N ≤ T], each
    used at least once."""
    return sequence[best_states(score, codes, sequence)]


def best_states(score: np.ndarray, codes: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """Return the labelling of `best_path` as indices 0 … N - 1 into the sequence [T]."""
    frames = score[sequence, codes[:, None]]  # [T, N]
    length, states = frames.shape
    best, advanced = np.full((2, states), -np.inf)
    best[0] = frames[0, 0]
    moved = np.zeros((length, states), dtype=bool)
    for t in range(1, length):
        advanced[1:] = best[:-1]
        moved[t] = advanced > best
        best = np.maximum(advanced, best) + frames[t]
    path = np.empty(length, dtype=np.int64)
    state = states - 1
    for t in range(length - 1, -1, -1):
        path[t] = state
        state -= int(moved[t, state])
    return path
