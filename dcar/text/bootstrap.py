"""Bootstrap intervals of corpus error rates.

A corpus WER is a ratio of sums, sum of errors / sum of reference words, so its uncertainty is
estimated by resampling utterances (Bisani & Ney 2004). All seeds of an utterance stay together:
they share the text and its difficulty, and treating them as independent would make every interval
too narrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RESAMPLES = 4000
LEVEL = 0.95
FEWEST_UTTERANCES = 5
"""Number of utterances below which resampling says nothing of the spread among utterances: one has
an interval of zero width, two have three different resamples."""


@dataclass(frozen=True)
class Interval:
    """Corpus rate, the two ends of its percentile interval and its bootstrap standard error, all
    fractions; None for fewer than FEWEST_UTTERANCES utterances."""

    value: float
    ends: list[float] | None
    standard_error: float | None


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


def corpus_interval(
    errors: Sequence[float] | np.ndarray,
    words: Sequence[float] | np.ndarray,
    *,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the corpus rate with a 95 % percentile bootstrap interval over utterances.

    errors, words [U]: summed over the seeds of each utterance.
    """
    e, w = np.asarray(errors, np.float64), np.asarray(words, np.float64)
    rate = float(e.sum() / w.sum())
    if len(e) < FEWEST_UTTERANCES:
        return Interval(rate, None, None)
    rates = resampled_rates(e, w, resamples, seed=0)
    return Interval(rate, interval_ends(rates), float(rates.std(ddof=1)))


def interval_ends(resampled: np.ndarray) -> list[float]:
    """Return the ends of the percentile interval of resampled values [R]."""
    return [float(v) for v in np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])]
