"""Bootstrap intervals, paired tests and detectable differences against closed forms and known
cases."""

import math

import numpy as np
import pytest

from dcar.text.bootstrap import Interval, corpus_interval
from eval.results.stats import PairedTest, detectable_difference, paired_test, utterances_needed


def test_interval_of_equal_lengths_is_that_of_a_mean():
    """With equal reference lengths the corpus rate is a mean, whose bootstrap error is known: sd
    / sqrt(U)."""
    rng = np.random.default_rng(0)
    errors = rng.poisson(1.0, 200)
    got = corpus_interval(errors, np.full(200, 10), resamples=20_000)
    exact = errors.std() / math.sqrt(200) / 10
    assert got.value == pytest.approx(errors.sum() / 2000)
    assert got.standard_error == pytest.approx(exact, rel=0.03)
    ends = [got.value - 1.96 * exact, got.value + 1.96 * exact]
    assert got.ends == pytest.approx(ends, abs=0.15 * exact)


def test_a_rate_is_a_ratio_of_sums_and_without_spread_there_is_no_width():
    assert corpus_interval([1, 0], [2, 98], resamples=500).value == pytest.approx(0.01)
    got = corpus_interval([1] * 5, [4] * 5, resamples=300)
    assert (got.ends, got.standard_error) == ([0.25, 0.25], 0.0)


def test_interval_covers_the_truth():
    hits = 0
    for trial in range(200):
        errors = np.random.default_rng(trial).binomial(8, 0.2, 60)
        got = corpus_interval(errors, np.full(60, 8), resamples=400)
        hits += got.ends[0] <= 0.2 <= got.ends[1]
    assert 0.9 <= hits / 200 <= 0.99


def test_paired_test_is_antisymmetric():
    rng = np.random.default_rng(1)
    a, b, words = rng.poisson(1.0, 50), rng.poisson(1.2, 50), rng.integers(5, 15, 50)
    ab, ba = paired_test(a, words, b, words), paired_test(b, words, a, words)
    assert ab.difference == pytest.approx(-ba.difference)
    assert ab.p_value == ba.p_value
    assert ab.ends[0] == pytest.approx(-ba.ends[1])
    assert ab.detectable == pytest.approx(ba.detectable)
    itself = paired_test(a, words, a, words)
    assert (itself.difference, itself.p_value, itself.detectable) == (0.0, 1.0, 0.0)


def test_pairing_finds_what_separate_intervals_hide():
    """The utterances differ a lot, the methods by one word each: only the paired test can see
    it."""
    rng = np.random.default_rng(2)
    hard = rng.integers(0, 12, 80)
    words = np.full(80, 15)
    a, b = hard + 1, hard
    paired = paired_test(a, words, b, words, resamples=2000)
    separate_a, separate_b = corpus_interval(a, words), corpus_interval(b, words)
    assert separate_b.ends[1] > separate_a.ends[0]
    assert paired.p_value < 0.001


def test_p_values_are_uniform_when_nothing_differs():
    values = []
    for trial in range(300):
        rng = np.random.default_rng(1000 + trial)
        a, b = rng.poisson(2.0, 40), rng.poisson(2.0, 40)
        values.append(paired_test(a, np.full(40, 10), b, np.full(40, 10), resamples=300).p_value)
    assert 0.01 <= np.mean(np.array(values) < 0.05) <= 0.10


def test_detectable_difference_is_what_80_percent_of_experiments_find():
    assert detectable_difference(1.0) == pytest.approx(1.95996 + 0.84162, abs=1e-4)
    assert utterances_needed(100, 0.02, 0.01) == 400  # four times as many halve it
    rng = np.random.default_rng(3)
    utterances, words = 100, np.full(100, 10)
    # standard error of the difference of two Poisson(2) means
    spread = math.sqrt(2 * 2.0 / utterances) / 10
    shift = 10 * detectable_difference(spread)
    found = [
        paired_test(
            rng.poisson(2.0 + shift, utterances),
            words,
            rng.poisson(2.0, utterances),
            words,
            resamples=300,
        ).p_value
        < 0.05
        for _ in range(200)
    ]
    assert 0.7 <= np.mean(found) <= 0.92


def test_few_utterances_have_no_interval_and_no_test():
    """One utterance once had p = 0.010, the interval 9.09–9.09 and "needs about 1 utterances"."""
    one = paired_test([2], [11], [1], [11])
    assert one == PairedTest(pytest.approx(1 / 11), None, None, None)
    assert corpus_interval([1], [11]) == Interval(pytest.approx(1 / 11), None, None)
    assert corpus_interval([1, 2, 0, 1], [9] * 4).ends is None
    assert len(corpus_interval([1, 2, 0, 1, 1], [9] * 5).ends) == 2
    five = paired_test([1, 2, 0, 1, 1], [9] * 5, [1, 1, 0, 1, 2], [9] * 5)
    assert len(five.ends) == 2 and five.p_value == 1.0 and five.detectable > 0
