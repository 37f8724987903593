"""Which phoneme is spoken when: a text laid along its speech tokens, without a recogniser.

A discrete hidden Markov model: the states of an utterance are its phonemes, each emits the codes of
p(code | phoneme). Those distributions are learned from the utterances themselves, from a flat
start, by a few rounds of Viterbi alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcar.errors import TextError
from dcar.text.inventory import PHONEMES, PHRASE_MARKS, WORD_BOUNDARY
from dcar.text.phonemes import encode_phonemes, text_to_ids

SILENCE = 0  # label of the state before and behind the words; no phoneme has the id of padding
BOUNDARY, *MARKS = encode_phonemes([WORD_BOUNDARY, *PHRASE_MARKS])  # between words; of pauses
ENOUGH = 60  # utterances to learn from, where a picture is all that is wanted


@dataclass(frozen=True)
class Span:
    """A phoneme (empty: silence) and the tokens start … end - 1 in which it is spoken."""

    phoneme: str
    start: int
    end: int


class PhonemeAligner:
    """Lays texts along tokens, by what other utterances of the same tokens have taught."""

    def __init__(self, emission: np.ndarray):
        """emission: p(code | phoneme) [phonemes, codes]."""
        self._score = np.log2(emission)

    @classmethod
    def fit(
        cls, tokens: Sequence[Sequence[int]], texts: Sequence[str], vocab_size: int
    ) -> PhonemeAligner | None:
        """From the first utterances, ENOUGH at most, and what is said in them; None where none
        can be laid along its tokens (`align`)."""
        said = list(zip(tokens, texts, strict=True))[:ENOUGH]
        pairs = [(np.asarray(spoken), phoneme_states(_ids(text))) for spoken, text in said]
        usable = [(t, s) for t, s in pairs if 2 < len(s) <= len(t)]
        if not usable:
            return None
        return cls(fit_alignment([t for t, _ in usable], [s for _, s in usable], vocab_size))

    def align(self, tokens: Sequence[int], text: str) -> list[Span]:
        """The phonemes of a text in the order spoken, silence at its ends and at the marks within.

        Nothing where there are fewer tokens than phonemes, or where the text cannot be read as
        English.
        """
        ids = _ids(text)
        inner = [SILENCE if i in MARKS else i for i in ids[:-1] if i != BOUNDARY]
        sequence = np.array([SILENCE, *inner, SILENCE])
        if not ids or len(tokens) < len(sequence):
            return []
        states = best_states(self._score, np.asarray(tokens), sequence)
        first = np.searchsorted(states, np.arange(len(sequence) + 1))
        names = ["" if label == SILENCE else PHONEMES[label] for label in sequence]
        return [
            Span(name, int(a), int(b))
            for name, a, b in zip(names, first[:-1], first[1:], strict=True)
        ]


def _ids(text: str) -> list[int]:
    """Of a text that cannot be read as English, none."""
    try:
        return text_to_ids(text)
    except TextError:
        return []


def phoneme_states(text: Sequence[int]) -> np.ndarray:
    """Labels of an utterance's states: its phonemes without marks, silence at both ends."""
    return np.array([SILENCE, *(i for i in text if i != BOUNDARY and i not in MARKS), SILENCE])


def smoothed(
    codes: np.ndarray, labels: np.ndarray | None, vocab_size: int, num_labels: int
) -> np.ndarray:
    """p(code | label) [labels, codes], interpolated with the marginal, which is interpolated
    with uniform."""
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
    iterations: int = 6,
) -> np.ndarray:
    """p(code | phoneme) from a flat start: equal shares of time first, then `iterations` Viterbi
    alignments."""
    labels = [
        s[np.arange(len(c)) * len(s) // len(c)] for c, s in zip(codes, sequences, strict=True)
    ]
    every = np.concatenate(codes)
    for _ in range(iterations):
        emission = smoothed(every, np.concatenate(labels), vocab_size, len(PHONEMES))
        score = np.log2(emission)
        labels = [viterbi(score, c, s) for c, s in zip(codes, sequences, strict=True)]
    return smoothed(every, np.concatenate(labels), vocab_size, len(PHONEMES))


def viterbi(score: np.ndarray, codes: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """Best monotone labelling [T] of codes [T] by the states `sequence` [N ≤ T], each used at
    least once."""
    return sequence[best_states(score, codes, sequence)]


def best_states(score: np.ndarray, codes: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """As `viterbi`, the states [T] by their places 0 … N - 1 in the sequence."""
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
