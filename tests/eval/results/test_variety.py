"""Runs and loops, and the fields of a row that say how lively a method speaks."""

from __future__ import annotations

import numpy as np
import pytest

from dcar.tokens.warping import code_distances, warped_distances
from eval.results.variety import longest_run, loops, repeated_stretch, variety


@pytest.fixture(scope="module")
def distances():
    return code_distances(np.random.default_rng(0).normal(size=(30, 5)))


def test_runs_and_loops_by_hand():
    assert longest_run([]) == 0 and longest_run([5]) == 1 and longest_run([1, 2, 2, 2, 3, 3]) == 3
    assert repeated_stretch([1, 2, 1, 2, 1, 9], 2) == 5 and repeated_stretch([1, 2, 3], 2) == 2
    phrase = list(range(10))
    assert loops(phrase * 3) and not loops(phrase * 2 + phrase[:9]) and not loops(list(range(60)))
    assert loops([7] * 25) and not loops([7] * 24)  # half a second of one token
    assert loops([99] + list(range(25)) * 3 + [98]) and not loops(list(range(26)) * 3)
    assert not loops([]) and not loops([1])


def record(uid: str, tokens: list[int], seed: int = 0) -> dict:
    return {"id": uid, "seed": seed, "tokens": tokens, "duration": len(tokens) / 50}


def test_fields_of_a_row_by_hand(distances):
    records = [record("a", [1, 2]), record("a", [3, 2], 1), record("a", [1, 2], 2), record("b", [4, 4, 4]),
               record("b", [4], 1), record("b", [], 2), record("c", [7] * 30), record("c", [], 1), record("c", [], 2)]
    row = variety(records, distances, resamples=200)
    between = warped_distances([([1, 2], [3, 2])], distances)[0]
    assert row["variety"] == pytest.approx((2 * between / 3 + 0.0) / 2)  # c has no pair: all but one are silent
    assert row["variety_ci"][0] <= row["variety"] <= row["variety_ci"][1]
    assert row["duration_spread"] == pytest.approx((0.0 + np.std([3, 1], ddof=1) / 2) / 2)
    assert row["longest_run_max"] == 30 and row["longest_run"] == pytest.approx((1 + 1 + 1 + 3 + 1 + 0 + 30) / 9)
    assert row["loop_rate"] == pytest.approx(1 / 9)


def test_what_cannot_be_computed_is_none(distances):
    once = variety([record("a", [1, 2]), record("b", [3])], distances)
    assert once["variety"] is once["variety_ci"] is once["duration_spread"] is None and once["loop_rate"] == 0
    twice = variety([record("a", [1, 2]), record("a", [3])], None)
    assert twice["variety"] is None and twice["duration_spread"] is not None
    alike = variety([record("a", [1, 2]), record("a", [1, 2], 1)], distances)
    assert alike["variety"] == 0 and alike["duration_spread"] == 0
