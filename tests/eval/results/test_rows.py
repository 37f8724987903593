"""Rows of a comparison: counts by hand, what each method is measured against, acceptance,
lengths, variety."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from compare_worker import made_record, made_result, made_timing
from hypothesis import given
from hypothesis import strategies as st

from dcar.text.wer import WordErrors
from dcar.tokens.warping import code_distances, warped_distances
from eval.report.table import table_text
from eval.results.rows import (
    FEWEST,
    MOST_BINS,
    acceptance,
    by_length,
    compare_records,
    length_bins,
    make_rows,
    power_of,
)
from eval.results.types import Position, Record
from eval.results.variety import longest_run, loops, repeated_stretch, variety


def test_corpus_counts_by_hand():
    first = dict(truncated=True, draft_passes=3, proposed=[2, 2], accepted=[2, 0])
    records = [
        made_record(
            "car-2",
            uid,
            seed=seed,
            words=WordErrors(*words),
            characters=WordErrors(*words),
            hypothesis=transcript,
            reference_duration=1.0,
            **(first if uid == "a" else {}),
        )
        for uid, seed, words, transcript in (
            ("a", 0, [1, 1, 0, 4], "x"),
            ("a", 1, [0, 0, 0, 4], "x"),
            ("b", 0, [0, 0, 9, 6], ""),
            ("b", 1, [1, 0, 0, 6], "x"),
        )
    ]
    (row,) = make_rows(records, ["car-2"], resamples=200)
    assert row.wer.value == 12 / 20
    assert row.wer_capped == (2 + 0 + 6 + 1) / 20
    assert (row.n, row.seeds, row.records, row.empty_transcripts) == (2, 2, 4, 1)
    assert (row.tokens_per_pass, row.truncation_rate, row.duration_ratio) == (2.0, 0.5, 2.0)
    assert (row.passes, row.draft_passes, row.acceptance.share.value) == (5.0, 1.5, 0.5)
    assert [p.rate for p in row.acceptance.by_position] == [0.5, 1.0]
    lines = table_text(made_result([row])).splitlines()
    assert lines[2].startswith("car-2") and len({len(line) for line in lines[:3]}) == 1


def test_errors_are_tested_at_the_same_sampling_and_speeds_on_one_clock():
    errors = {
        "far": 5,
        "car-1": 4,
        "car-2": 3,
        "far@t0": 4,
        "car-1@t0": 3,
        "car-2@t0": 2,
        "dcar@t0": 1,
        "car-2@t0.4": 2,
    }
    records = [made_record(m, uid, e) for m, e in errors.items() for uid in "abc"]
    times = [
        made_timing(m, uid, lm)
        for m, lm in (("far", 4.0), ("far@t0", 2.0), ("car-1", 3.0), ("dcar@t0", 1.0))
        for uid in "abc"
    ]
    rows = {r.method: r for r in make_rows(records, list(errors), times, resamples=200)}
    cold = rows["dcar@t0"]
    assert cold.tests["far"].difference == pytest.approx(0.1 - 0.4)
    assert cold.tests["car1"].difference == pytest.approx(0.1 - 0.3)
    assert cold.tests["best_car"].baseline == "car-2@t0"
    assert rows["far"].tests["best_car"].baseline == "car-2"
    assert "best_car" not in rows["car-2"].tests
    assert rows["car-2"].tests["far"].difference == pytest.approx(0.3 - 0.5)
    assert not {"far", "car1"} & rows["car-2@t0.4"].tests.keys()
    assert cold.speedups["far"].total == 4 and rows["far@t0"].speedups["far"].total == 2
    names = [m for m in errors if m.endswith("@t0")]
    mine = [r for r in records if r.method in names]
    only = {r.method: r for r in make_rows(mine, names, times, resamples=200)}["dcar@t0"]
    assert only.speedups["far"].total == 2 and "car1" not in only.speedups


def test_records_of_two_comparisons_are_tested_on_the_utterances_that_both_have():
    a = [made_record("far", u, e) for u, e in zip("abcde", [3, 0, 5, 1, 2], strict=True)]
    b = [made_record("car-2", u, e) for u, e in zip("cdefg", [1, 4, 0, 9, 6], strict=True)]
    both = compare_records(a, b, resamples=100)
    alone = compare_records(a[2:], b[:3], resamples=100)
    assert both == alone and both.difference == pytest.approx((8 - 5) / 30)


def test_the_detectable_difference_is_that_of_the_methods_tested_against_the_named_baseline():
    """With two samplings, those of the other one are tested against its own best CAR."""
    errors = {"car-2": [2, 3, 1, 2, 2], "far": [3, 3, 1, 4, 2]}
    cold = {"car-2@t0": [1, 1, 1, 1, 1], "far@t0": [9, 0, 9, 0, 9], "dcar@t0": [0, 9, 9, 0, 9]}

    def power(methods):
        records = [
            made_record(m, u, e)
            for m, of in methods.items()
            for u, e in zip("abcde", of, strict=True)
        ]
        return power_of(make_rows(records, list(methods), resamples=100))

    assert power(errors | cold) == power(errors)
    assert (power(errors).baseline, power(errors).tests) == ("car-2", 1)
    assert power(cold).tests == 2 and power(cold).absolute > power(errors).absolute
    assert power({"car-2": [2, 3, 1, 2, 2]}) is None


DRAFTED = ["sd", "sd:2", "ssd-0.4", "ssd-0.4:2", "car-3"]
COLD = ["sd", "sd@draft", "sd@t0.6", "sd@draft@t0.4", "ssd-0.4@t0.6", "ssd-0.4@draft@t0.6"]


@pytest.mark.parametrize(
    ("method", "methods", "baseline"),
    [
        ("ssd-0.4", DRAFTED, "sd"),
        ("ssd-0.4:2", DRAFTED, "sd:2"),
        ("pcg-0.5@draft", DRAFTED, "sd"),
        ("ssd-0.4-eos@draft", [*DRAFTED, "sd@draft"], "sd@draft"),
        ("ssd-0.4-eos", DRAFTED, "sd"),
        ("vadusa-2", DRAFTED, "sd"),
        ("ssd-0.4", ["car-3"], None),
        ("car-3", DRAFTED, None),
        ("sd", DRAFTED, None),
        ("ssd-0.4@t0.6", COLD, "sd@t0.6"),
        ("ssd-0.4@draft@t0.6", COLD, "sd@t0.6"),
        ("ssd-0.4@draft@t0.4", COLD, "sd@draft@t0.4"),
        ("ssd-0.4@draft@t0.6", [*COLD, "sd@draft@t0.6"], "sd@draft@t0.6"),
        ("ssd-0.4@t0.2", COLD, None),  # not the distribution of another temperature
        ("ssd-0.4", COLD, "sd"),
        ("sd@t0.6", COLD, None),
    ],
)
def test_relaxed_verifiers_are_measured_against_their_own_sd(method, methods, baseline):
    records = [made_record(m, uid) for m in {*methods, method} for uid in "abc"]
    rows = make_rows(records, list(dict.fromkeys([*methods, method])), resamples=100)
    test = next(row.tests.get("sd") for row in rows if row.method == method)
    assert (test and test.baseline) == baseline


# --- acceptance: counted by hand; a method that miscounts is refused ------------------------------


def rounds_of(uid: str, rounds: list[tuple[int, int]]) -> Record:
    proposed, accepted = map(list, zip(*rounds, strict=True))
    return made_record("sd", uid, proposed=proposed, accepted=accepted)


def test_counted_by_hand():
    # (drafted, accepted) of six passes, one of which had no room for a draft
    records = [rounds_of("a", [(3, 3), (3, 0), (3, 1)]), rounds_of("b", [(3, 2), (0, 0), (1, 1)])]
    got = acceptance(records, resamples=200)
    assert got.share.value == 7 / 13
    assert got.share.ends is None  # of two utterances
    copies = [replace(r, id=f"{r.id}{i}") for i in range(3) for r in records]
    six = acceptance(copies, 200).share
    assert six.value == 7 / 13 and six.ends[0] < 7 / 13 < six.ends[1]
    assert got.per_pass == 7 / 5
    assert got.by_position == [
        Position(1, judged=5, accepted=4),
        # the last pass accepted its only token: it has no second one to judge
        Position(2, judged=3, accepted=2),
        Position(3, judged=2, accepted=1),
    ]
    assert acceptance([made_record("car-2", "a")]) is None


# --- errors by length of the utterance ------------------------------------------------------------


def counted(method: str, uid: str, wrong: int, words: int, seed: int = 0) -> Record:
    return made_record(method, uid, seed=seed, words=WordErrors(wrong, 0, 0, words))


@given(st.lists(st.integers(1, 30), max_size=60))
def test_bins_cover_every_length_once_and_are_not_small(lengths):
    bins = length_bins(lengths)
    assert len(bins) <= MOST_BINS
    assert all(low <= high for low, high in bins)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(bins))
    if len(lengths) >= FEWEST:
        assert all(sum(low <= n <= high for low, high in bins) == 1 for n in lengths)
        assert all(sum(low <= n <= high for n in lengths) >= FEWEST for low, high in bins)
    else:
        assert bins == []


def test_rates_of_bins_are_corpus_rates_over_seeds():
    records = [
        counted("car-2", f"u{i}", wrong, words, seed)
        for seed in (0, 1)
        for i, (wrong, words) in enumerate([(1, 4), (0, 5), (0, 5), (3, 20), (2, 22), (seed, 30)])
    ]
    bins = by_length(records, ["car-2"], resamples=200)
    assert (bins.labels, bins.sizes) == (["4–5 words", "20–30 words"], [3, 3])
    short, long = bins.rates["car-2"]
    assert short.value == pytest.approx(2 / 28) and long.value == pytest.approx(11 / 144)
    assert short.ends is None  # of three utterances


# --- runs, loops, and how lively a method speaks --------------------------------------------------


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


def rendering(uid: str, tokens: list[int], seed: int = 0) -> Record:
    return made_record("car-2", uid, tokens=tokens, seed=seed, duration=len(tokens) / 50)


def test_variety_by_hand(distances):
    records = [
        rendering("a", [1, 2]),
        rendering("a", [3, 2], 1),
        rendering("a", [1, 2], 2),
        rendering("b", [4, 4, 4]),
        rendering("b", [4], 1),
        rendering("b", [], 2),
        rendering("c", [7] * 30),
        rendering("c", [], 1),
        rendering("c", [], 2),
    ]
    got = variety(records, distances, resamples=200)
    between = warped_distances([([1, 2], [3, 2])], distances)[0]
    # c has no pair: all but one are silent
    assert got.distance.value == pytest.approx((2 * between / 3 + 0.0) / 2)
    assert got.distance.ends is None  # of two utterances
    assert got.duration_spread == pytest.approx((0.0 + np.std([3, 1], ddof=1) / 2) / 2)
    assert got.longest_run_max == 30
    assert got.longest_run == pytest.approx((1 + 1 + 1 + 3 + 1 + 0 + 30) / 9)
    assert got.loop_rate == pytest.approx(1 / 9)


def test_what_cannot_be_computed_is_none(distances):
    once = variety([rendering("a", [1, 2]), rendering("b", [3])], distances)
    assert once.distance is once.duration_spread is None and once.loop_rate == 0
    twice = variety([rendering("a", [1, 2]), rendering("a", [3])], None)
    assert twice.distance is None and twice.duration_spread is not None
    alike = variety([rendering("a", [1, 2]), rendering("a", [1, 2], 1)], distances)
    assert alike.distance.value == 0 and alike.duration_spread == 0
