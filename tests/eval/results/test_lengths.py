"""WER by length of the utterance: bins that share the utterances out, rates counted rule-based."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.results.lengths import FEWEST, MOST_BINS, by_length, length_bins


def record(method: str, uid: str, wrong: int, words: int, seed: int = 0) -> dict:
    return {"method": method, "id": uid, "seed": seed, "words": [wrong, 0, 0, words]}


@given(st.lists(st.integers(1, 30), max_size=60))
def test_bins_cover_every_length_once_and_are_not_small(lengths):
    bins = length_bins(lengths)
    assert len(bins) <= MOST_BINS
    assert all(low <= high for low, high in bins)
    assert all(a[1] < b[0] for a, b in zip(bins, bins[1:], strict=False))
    if len(lengths) >= FEWEST:
        assert all(sum(low <= n <= high for low, high in bins) == 1 for n in lengths)
        assert all(sum(low <= n <= high for n in lengths) >= FEWEST for low, high in bins)
    else:
        assert bins == []


def test_bins_share_evenly():
    assert length_bins(range(1, 13)) == [(1, 3), (4, 6), (7, 9), (10, 12)]
    assert length_bins([5] * 20) == [(5, 5)]


def test_rates_of_bins_are_corpus_rates_over_seeds():
    records = [record("a", f"u{i}", wrong, words, seed) for seed in (0, 1)
               for i, (wrong, words) in enumerate([(1, 4), (0, 5), (0, 5), (3, 20), (2, 22), (seed, 30)])]
    found = by_length(records, ["a"], resamples=200)
    assert found["bins"] == [{"words": [4, 5], "n": 3}, {"words": [20, 30], "n": 3}]
    short, long = found["methods"]["a"]
    assert short["wer"] == pytest.approx(2 / 28) and long["wer"] == pytest.approx(11 / 144)
    assert short["ci"][0] <= short["wer"] <= short["ci"][1]


def test_nothing_to_set_apart():
    assert by_length([record("a", f"u{i}", 0, 5) for i in range(9)], ["a"]) is None
    assert by_length([record("a", "u", 0, 5)], ["a"]) is None
