"""Paired tests of corpus error rates by the bootstrap of `dcar.text.bootstrap`, and the smallest
difference that can be detected."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from dcar.text.bootstrap import FEWEST_UTTERANCES, LEVEL, RESAMPLES, interval_ends, resampled_rates

POWER = 0.8
Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class PairedTest:
    """Difference of two corpus rates (a - b) on the same utterances; the rest is None for fewer
    than FEWEST_UTTERANCES.

    ends: of the 95 % interval. p_value: two-sided, share of centred bootstrap differences at least
    as large as the observed one. detectable: the true absolute difference that such an experiment
    finds significant with 80 % probability. baseline: b, if it is named.
    """

    difference: float
    ends: list[float] | None
    p_value: float | None
    detectable: float | None
    baseline: str = ""

    @property
    def by_chance(self) -> bool:
        """True if chance alone may give such a difference (p > 0.05)."""
        return self.p_value is not None and self.p_value > 0.05


def paired_test(
    errors_a: Numbers,
    words_a: Numbers,
    errors_b: Numbers,
    words_b: Numbers,
    *,
    resamples: int = RESAMPLES,
) -> PairedTest:
    """Test whether method a's corpus rate differs from b's. Entry i of all four lists [U] is the
    same utterance."""
    return paired_contrast(
        [errors_a, errors_b], [words_a, words_b], [1.0, -1.0], resamples=resamples
    )


def paired_contrast(
    errors: Sequence[Numbers],
    words: Sequence[Numbers],
    weights: Sequence[float],
    *,
    resamples: int = RESAMPLES,
) -> PairedTest:
    """Test whether the weighted sum of several methods' corpus rates, sum_m weights[m] · rate_m,
    differs from zero.

    errors, words [M, U]: entry [m][u] is method m on utterance u. Every resample draws the same
    utterances for all methods. Points interpolated between methods are such sums, and so is the
    difference of two of them.
    """
    counts = [
        (np.asarray(e, np.float64), np.asarray(w, np.float64))
        for e, w in zip(errors, words, strict=True)
    ]
    observed = float(sum(c * e.sum() / w.sum() for c, (e, w) in zip(weights, counts, strict=True)))
    if len(counts[0][0]) < FEWEST_UTTERANCES:
        return PairedTest(observed, None, None, None)
    differences = np.zeros(resamples)
    for c, (e, w) in zip(weights, counts, strict=True):
        if c:
            differences += c * resampled_rates(e, w, resamples, seed=0)
    error = float(differences.std(ddof=1))
    # Under the null the centred differences are what chance gives; the observed sample counts as
    # one of them.
    reached = np.abs(differences - observed) >= abs(observed) - 1e-12
    p_value = (1 + int(reached.sum())) / (1 + resamples)
    return PairedTest(observed, interval_ends(differences), p_value, detectable_difference(error))


def detectable_difference(standard_error: float) -> float:
    """Return the smallest true difference that is found at significance 5 % (two-sided) with
    probability 80 %: (z_0.975 + z_0.8) · SE = 2.80 SE."""
    normal = NormalDist()
    return (normal.inv_cdf((1 + LEVEL) / 2) + normal.inv_cdf(POWER)) * standard_error


def utterances_needed(utterances: int, detectable: float, wanted: float) -> int:
    """Return the number of utterances (with as many seeds each) that would detect `wanted`: the
    error falls with the square root."""
    return int(np.ceil(utterances * (detectable / wanted) ** 2))
