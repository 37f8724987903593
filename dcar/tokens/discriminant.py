"""A projection of encoder states that keeps what tells phonemes apart, for k-means codes that carry words.

k-means spends its codes where the states vary, and much of what varies is the voice and the place in the utterance.
Linear discriminant analysis (Fisher 1936; in recognisers Haeb-Umbach and Ney 1992) finds the directions in which the
means of phonemes differ most, measured in units of the spread within a phoneme. Which phoneme sounds when is found by
aligning the text to the codes of a first k-means (`dcar.tokens.fit`); each phoneme is split into thirds, so that
transitions are told apart as well. The papers' S3 tokens are supervised by a recogniser for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np
import scipy.linalg

from dcar.errors import ConfigError

PARTS = 3
"""Beginning, middle and end of a phoneme are classes of their own."""


def parts_of_phonemes(labels: np.ndarray) -> np.ndarray:
    """Phoneme of every frame [T] -> class of every frame [T]: PARTS · phoneme + the part of its stretch."""
    changes = np.flatnonzero(np.concatenate(([True], labels[1:] != labels[:-1], [True])))
    part = np.concatenate([np.arange(n) * PARTS // n for n in np.diff(changes)])
    return labels * PARTS + part


def discriminant_projection(states: np.ndarray, classes: np.ndarray, size: int, shrinkage: float = 0.01) -> np.ndarray:
    """The `size` most discriminative directions: states [N, D], classes [N] -> [D, size] float32.

    Projected states have unit spread within a class, on average. shrinkage: share of the mean variance that is added to
    every direction of the within-class covariance. Raises ConfigError if there are fewer classes than directions.
    """
    found, index = np.unique(classes, return_inverse=True)
    dimensions = states.shape[1]
    if not 0 < size <= min(dimensions, len(found) - 1):
        raise ConfigError(
            f"projection_size={size}: {len(found)} parts of phonemes in the speech and {dimensions} dimensions allow "
            f"1 to {min(dimensions, len(found) - 1)}"
        )
    counts = np.bincount(index).astype(np.float64)
    sums = np.zeros((len(found), dimensions))
    np.add.at(sums, index, states.astype(np.float64))
    means = sums / counts[:, None]
    centred = states - means[index]
    within = centred.T @ centred / len(states)
    within += shrinkage * np.trace(within) / dimensions * np.eye(dimensions)
    deviations = means - states.mean(0)
    between = (deviations * counts[:, None]).T @ deviations / len(states)
    # between v = λ within v, the largest λ first; v' within v = 1. scikit-learn's LDA shrinks `between` as well.
    directions = scipy.linalg.eigh(between, within)[1][:, : -size - 1 : -1]
    # The sign of an eigenvector is arbitrary: fixed, so that the codes' checksum repeats.
    signs = np.sign(directions[np.abs(directions).argmax(0), np.arange(size)])
    return (directions * signs).astype(np.float32)


def in_turn(speakers: Sequence[str]) -> Iterator[int]:
    """Indices of utterances, the speakers taking turns: whoever stops early has heard all alike, as far as they have
    speech. The order within a speaker is kept."""
    queues: dict[str, list[int]] = {}
    for i, speaker in enumerate(speakers):
        queues.setdefault(speaker, []).append(i)
    for row in zip_longest(*queues.values()):
        yield from (i for i in row if i is not None)
