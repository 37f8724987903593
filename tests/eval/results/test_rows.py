"""Rows of a comparison: counts by hand, what each method is measured against, acceptance,
lengths, variety."""

import itertools

import numpy as np
import pytest
from compare_worker import made_record, made_result
from hypothesis import given
from hypothesis import strategies as st

from dcar.tokens.warping import code_distances, warped_distances
from eval.report.table import table_text
from eval.results.rows import (
    FEWEST,
    MOST_BINS,
    acceptance,
    by_length,
    length_bins,
    make_rows,
    power_statement,
)
from eval.results.variety import longest_run, loops, repeated_stretch, variety


def test_corpus_counts_by_hand():
    first = dict(truncated=True, draft_passes=3, proposed=[2, 2], accepted=[2, 0])
    records = [
        made_record(
            "car-2",
            uid,
            seed=seed,
            words=words,
            characters=words,
            hypothesis=heard,
            reference_duration=1.0,
            **(first if uid == "a" else {}),
        )
        for uid, seed, words, heard in (
            ("a", 0, [1, 1, 0, 4], "x"),
            ("a", 1, [0, 0, 0, 4], "x"),
            ("b", 0, [0, 0, 9, 6], ""),
            ("b", 1, [1, 0, 0, 6], "x"),
        )
    ]
    (row,) = make_rows(records, ["car-2"], resamples=200)
    assert row["wer"] == 12 / 20
    assert row["wer_capped"] == (2 + 0 + 6 + 1) / 20
    assert (row["n"], row["seeds"], row["empty_transcripts"]) == (2, 2, 1)
    assert (row["tokens_per_pass"], row["truncation_rate"], row["duration_ratio"]) == (
        2.0,
        0.5,
        2.0,
    )
    assert (row["passes"], row["draft_passes"], row["accepted"]) == (5.0, 1.5, 0.5)
    assert [p["rate"] for p in row["accepted_by_position"]] == [0.5, 1.0]
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
        {
            "method": m,
            "id": uid,
            "lm": lm,
            "vocoder": 0.0,
            "audio": 1.0,
            "policy": 0.0,
            "first_audio": 0.1,
            "tokens": 10,
        }
        for m, lm in (("far", 4.0), ("far@t0", 2.0), ("car-1", 3.0), ("dcar@t0", 1.0))
        for uid in "abc"
    ]
    rows = {r["method"]: r for r in make_rows(records, list(errors), times, resamples=200)}
    assert rows["dcar@t0"]["difference_vs_far"] == pytest.approx(0.1 - 0.4)
    assert rows["dcar@t0"]["difference_vs_car1"] == pytest.approx(0.1 - 0.3)
    assert rows["dcar@t0"]["best_car"] == "car-2@t0" and rows["car-2"]["best_car"] == "car-2"
    assert rows["car-2"]["difference_vs_far"] == pytest.approx(0.3 - 0.5)
    assert (
        rows["car-2@t0.4"]["difference_vs_far"] is rows["car-2@t0.4"]["difference_vs_car1"] is None
    )
    assert rows["dcar@t0"]["speedup_vs_far"] == 4 and rows["far@t0"]["speedup_vs_far"] == 2
    cold = [m for m in errors if m.endswith("@t0")]
    only = {
        r["method"]: r
        for r in make_rows([r for r in records if r["method"] in cold], cold, times, resamples=200)
    }
    assert only["dcar@t0"]["speedup_vs_far"] == 2 and only["dcar@t0"]["speedup_vs_car1"] is None


def test_methods_are_tested_on_the_utterances_that_both_have():
    """Every subset of five utterances that one method may have: the test is that of a comparison
    on the subset alone."""
    errors = {"far": [3, 0, 5, 1, 2], "car-2": [1, 4, 0, 0, 6], "car-3": [9, 9, 9, 9, 9]}
    every = {
        m: [made_record(m, u, e) for u, e in zip("abcde", of, strict=True)]
        for m, of in errors.items()
    }
    whole = [*every["far"], *every["car-2"], *every["car-3"]]
    for size in range(1, 6):
        for subset in itertools.combinations("abcde", size):
            few = [{**r, "method": "sd", "settings": {"method": "sd"}} for r in every["car-2"]]
            few = [r for r in few if r["id"] in subset]
            row = make_rows([*whole, *few], [*every, "sd"], resamples=100)[-1]
            of_subset = [r for r in whole if r["id"] in subset]
            alone = make_rows([*of_subset, *few], [*every, "sd"], resamples=100)[-1]
            tested = {k: v for k, v in row.items() if "_vs_far" in k or "_vs_best_car" in k}
            assert tested == {k: alone[k] for k in tested}
            wrong = sum(errors["far"]["abcde".index(u)] for u in subset)
            assert row["difference_vs_far"] == pytest.approx(row["wer"] - wrong / (10 * size))
            assert (row["n"], row["best_car"]) == (size, "car-2")


def test_a_method_with_fewer_utterances_is_not_the_best_car_and_not_in_what_is_said_of_all():
    records = [made_record(m, f"u{i}", e) for m, e in (("far", 3), ("car-2", 2)) for i in range(8)]
    records += [made_record("car-3", f"u{i}", 0) for i in range(6)]
    rows = make_rows(records, ["far", "car-2", "car-3"], resamples=100)
    assert {r["best_car"] for r in rows} == {"car-2"}
    assert [r["n"] for r in rows] == [8, 8, 6]
    assert by_length(
        [{**r, "words": [0, 0, 0, 1 + int(r["id"][1])]} for r in records], ["far", "car-3"]
    )["methods"].keys() == {"far"}


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
        return power_statement(make_rows(records, list(methods), resamples=100))

    assert power(errors | cold) == power(errors)
    assert (power(errors)["baseline"], power(errors)["tests"]) == ("car-2", 1)
    assert power(cold)["tests"] == 2 and power(cold)["absolute"] > power(errors)["absolute"]
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
    assert next(r["sd_baseline"] for r in rows if r["method"] == method) == baseline


# --- acceptance: counted by hand; a method that miscounts is refused ------------------------------


def rounds_of(uid: str, rounds: list[tuple[int, int]]) -> dict:
    return {"id": uid, "proposed": [p for p, _ in rounds], "accepted": [a for _, a in rounds]}


def test_counted_by_hand():
    # (drafted, accepted) of six passes, one of which had no room for a draft
    records = [rounds_of("a", [(3, 3), (3, 0), (3, 1)]), rounds_of("b", [(3, 2), (0, 0), (1, 1)])]
    got = acceptance(records, resamples=200)
    assert got["accepted"] == 7 / 13
    assert got["accepted_ci"] is None  # of two utterances
    six = acceptance([r | {"id": f"{r['id']}{i}"} for i in range(3) for r in records], 200)
    assert six["accepted"] == 7 / 13
    assert six["accepted_ci"][0] < 7 / 13 < six["accepted_ci"][1]
    assert got["accepted_per_pass"] == 7 / 5
    assert got["accepted_by_position"] == [
        {"position": 1, "judged": 5, "accepted": 4, "rate": 4 / 5},
        # the last pass accepted its only token: it has no second one to judge
        {"position": 2, "judged": 3, "accepted": 2, "rate": 2 / 3},
        {"position": 3, "judged": 2, "accepted": 1, "rate": 1 / 2},
    ]


# --- errors by length of the utterance ------------------------------------------------------------


def counted(method: str, uid: str, wrong: int, words: int, seed: int = 0) -> dict:
    return {"method": method, "id": uid, "seed": seed, "words": [wrong, 0, 0, words]}


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
        counted("a", f"u{i}", wrong, words, seed)
        for seed in (0, 1)
        for i, (wrong, words) in enumerate([(1, 4), (0, 5), (0, 5), (3, 20), (2, 22), (seed, 30)])
    ]
    found = by_length(records, ["a"], resamples=200)
    assert found["bins"] == [{"words": [4, 5], "n": 3}, {"words": [20, 30], "n": 3}]
    short, long = found["methods"]["a"]
    assert short["wer"] == pytest.approx(2 / 28) and long["wer"] == pytest.approx(11 / 144)
    assert short["ci"] is None  # of three utterances


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


def said(uid: str, tokens: list[int], seed: int = 0) -> dict:
    return {"id": uid, "seed": seed, "tokens": tokens, "duration": len(tokens) / 50}


def test_fields_of_a_row_by_hand(distances):
    records = [
        said("a", [1, 2]),
        said("a", [3, 2], 1),
        said("a", [1, 2], 2),
        said("b", [4, 4, 4]),
        said("b", [4], 1),
        said("b", [], 2),
        said("c", [7] * 30),
        said("c", [], 1),
        said("c", [], 2),
    ]
    row = variety(records, distances, resamples=200)
    between = warped_distances([([1, 2], [3, 2])], distances)[0]
    # c has no pair: all but one are silent
    assert row["variety"] == pytest.approx((2 * between / 3 + 0.0) / 2)
    assert row["variety_ci"] is None  # of two utterances
    assert row["duration_spread"] == pytest.approx((0.0 + np.std([3, 1], ddof=1) / 2) / 2)
    assert row["longest_run_max"] == 30 and row["longest_run"] == pytest.approx(
        (1 + 1 + 1 + 3 + 1 + 0 + 30) / 9
    )
    assert row["loop_rate"] == pytest.approx(1 / 9)


def test_what_cannot_be_computed_is_none(distances):
    once = variety([said("a", [1, 2]), said("b", [3])], distances)
    assert (
        once["variety"] is once["variety_ci"] is once["duration_spread"] is None
        and once["loop_rate"] == 0
    )
    twice = variety([said("a", [1, 2]), said("a", [3])], None)
    assert twice["variety"] is None and twice["duration_spread"] is not None
    alike = variety([said("a", [1, 2]), said("a", [1, 2], 1)], distances)
    assert alike["variety"] == 0 and alike["duration_spread"] == 0
