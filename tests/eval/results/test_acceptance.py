"""Acceptance rates counted rule-based; a method that miscounts is refused."""

from __future__ import annotations

import pytest

from dcar.errors import DataError
from eval.results.acceptance import acceptance, check_rounds


def record(uid: str, rounds: list[tuple[int, int]]) -> dict:
    return {"id": uid, "proposed": sum(p for p, _ in rounds), "accepted": sum(a for _, a in rounds),
            "rounds_proposed": [p for p, _ in rounds], "rounds_accepted": [a for _, a in rounds]}


def test_counted_by_hand():
    # (drafted, accepted) of six passes, one of which had no room for a draft
    got = acceptance([record("a", [(3, 3), (3, 0), (3, 1)]), record("b", [(3, 2), (0, 0), (1, 1)])], resamples=200)
    assert got["acceptance_rate"] == 7 / 13
    assert got["acceptance_rate_ci"][0] <= 7 / 13 <= got["acceptance_rate_ci"][1]
    assert got["mean_accepted"] == 7 / 5
    assert got["acceptance_by_position"] == [
        {"position": 1, "judged": 5, "accepted": 4, "rate": 4 / 5},
        # the last pass accepted its only token: it has no second one to judge
        {"position": 2, "judged": 3, "accepted": 2, "rate": 2 / 3},
        {"position": 3, "judged": 2, "accepted": 1, "rate": 1 / 2},
    ]


def test_positions_that_were_never_judged_are_not_listed():
    got = acceptance([record("a", [(5, 1), (5, 0)])], resamples=100)
    assert [(p["position"], p["rate"]) for p in got["acceptance_by_position"]] == [(1, 0.5), (2, 0.0)]


def test_nothing_verified_has_no_rate():
    got = acceptance([record("a", [])])
    assert set(got.values()) == {None}


@pytest.mark.parametrize(("proposed", "accepted"), [([3], [4]), ([3], [-1]), ([3, 3], [1])])
def test_miscounting_methods_are_named(proposed, accepted):
    with pytest.raises(DataError, match="utt-1: ssd-0.4 .* counts wrongly"):
        check_rounds("utt-1", "ssd-0.4", proposed, accepted)
    check_rounds("utt-1", "ssd-0.4", [3, 2], [3, 0])
