"""Bootstrap intervals of corpus error rates.

A corpus WER is a ratio of sums, sum of errors / sum of reference words, so its uncertainty is
estimated by resampling utterances (Bisani & Ney 2004). All seeds of an utterance stay together:
they share the text and its difficulty, and treating them as independent would make every interval
too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dcar.errors import DataError

RESAMPLES = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """Corpus rate, its bootstrap standard error and percentile interval, all fractions."""

    value: float
    low: float
    high: float
    standard_error: float


@lru_cache(maxsize=4)
def _weights(utterances: int, resamples: int, seed: int) -> np.ndarray:
    """Return how often each utterance is drawn in each resample, [R, U]. It is the same for all
    methods, so they can be paired."""
    rng = np.random.default_rng([seed, utterances])
    drawn = rng.integers(0, utterances, size=(resamples, utterances))
    rows = np.arange(resamples)[:, None] * utterances
    counts = np.bincount((drawn + rows).ravel(), minlength=resamples * utterances)
    return counts.reshape(resamples, utterances).astype(np.float64)


def resampled_rates(errors: np.ndarray, words: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Return the corpus rate [R] of every resample of errors and words [U]."""
    weights = _weights(len(errors), resamples, seed)
    return (weights @ errors) / (weights @ words)


def checked(errors: Sequence[float], words: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return both as float64 [U]. Raises DataError for lists of unequal length, without
    utterances, or with utterances without words."""
    e, w = np.asarray(errors, np.float64), np.asarray(words, np.float64)
    if e.shape != w.shape or e.ndim != 1:
        raise DataError(
            f"statistics: errors {e.shape} and reference words {w.shape} must be lists of equal "
            "length"
        )
    if len(e) == 0 or not (w > 0).all():
        raise DataError(
            "statistics: there must be at least one utterance, each with at least one reference "
            "word"
        )
    return e, w


def corpus_interval(
    errors: Sequence[float], words: Sequence[float], *, resamples: int = RESAMPLES
) -> Interval:
    """Return the corpus rate with a 95 % percentile bootstrap interval over utterances.

    errors, words [U]: summed over the seeds of each utterance. A single utterance has an interval
    of zero width, which is meaningless; report it with its n.
    """
    e, w = checked(errors, words)
    rates = resampled_rates(e, w, resamples, seed=0)
    low, high = np.quantile(rates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(e.sum() / w.sum()), float(low), float(high), float(rates.std(ddof=1)))
