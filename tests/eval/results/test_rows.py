"""Rows of a comparison: counts by hand, and what each method is measured against."""

from __future__ import annotations

import pytest
from compare_worker import made_record

from eval.report.table import table_text
from eval.results.rows import make_rows, strict_baseline


def test_corpus_counts_by_hand():
    first = dict(truncated=True, draft_passes=3, rounds_proposed=[2, 2], rounds_accepted=[2, 0], proposed=4, accepted=2)
    records = [made_record("car-2", uid, seed=seed, words=words, characters=words, hypothesis=heard,
                           reference_duration=1.0, **(first if uid == "a" else {}))
               for uid, seed, words, heard in (("a", 0, [1, 1, 0, 4], "x"), ("a", 1, [0, 0, 0, 4], "x"),
                                               ("b", 0, [0, 0, 9, 6], ""), ("b", 1, [1, 0, 0, 6], "x"))]
    (row,) = make_rows(records, ["car-2"], resamples=200)
    assert row["wer"] == 12 / 20
    assert row["wer_capped"] == (2 + 0 + 6 + 1) / 20
    assert (row["n"], row["seeds"], row["empty_transcripts"]) == (2, 2, 1)
    assert (row["tokens_per_pass"], row["truncation_rate"], row["duration_ratio"]) == (2.0, 0.5, 2.0)
    assert (row["target_passes"], row["draft_passes"], row["acceptance_rate"]) == (5.0, 1.5, 0.5)
    assert [p["rate"] for p in row["acceptance_by_position"]] == [0.5, 1.0]
    lines = table_text([row], {"seeds": [0, 1], "asr": "j", "normalizer": "n", "power": None}).splitlines()
    assert lines[2].startswith("car-2") and len({len(line) for line in lines[:3]}) == 1


def test_errors_are_tested_at_the_same_sampling_and_speeds_on_one_clock():
    errors = {"far": 5, "car-1": 4, "car-2": 3, "far@t0": 4, "car-1@t0": 3, "car-2@t0": 2, "dcar@t0": 1,
              "car-2@t0.4": 2}
    records = [made_record(m, uid, e) for m, e in errors.items() for uid in "abc"]
    times = [{"method": m, "id": uid, "lm": lm, "vocoder": 0.0, "audio": 1.0, "policy": 0.0, "tokens": 10}
             for m, lm in (("far", 4.0), ("far@t0", 2.0), ("car-1", 3.0), ("dcar@t0", 1.0)) for uid in "abc"]
    rows = {r["method"]: r for r in make_rows(records, list(errors), times, resamples=200)}
    assert rows["dcar@t0"]["difference_vs_far"] == pytest.approx(0.1 - 0.4)
    assert rows["dcar@t0"]["difference_vs_car1"] == pytest.approx(0.1 - 0.3)
    assert rows["dcar@t0"]["best_car"] == "car-2@t0" and rows["car-2"]["best_car"] == "car-2"
    assert rows["car-2"]["difference_vs_far"] == pytest.approx(0.3 - 0.5)
    assert rows["car-2@t0.4"]["difference_vs_far"] is rows["car-2@t0.4"]["difference_vs_car1"] is None
    assert rows["dcar@t0"]["speedup_vs_far"] == 4 and rows["far@t0"]["speedup_vs_far"] == 2
    cold = [m for m in errors if m.endswith("@t0")]
    only = {r["method"]: r for r in make_rows([r for r in records if r["method"] in cold], cold, times, resamples=200)}
    assert only["dcar@t0"]["speedup_vs_far"] == 2 and only["dcar@t0"]["speedup_vs_car1"] is None


DRAFTED = ["sd", "sd@heads", "ssd-0.4", "ssd-0.4@heads", "car-3"]
COLD = ["sd", "sd@draft", "sd@t0.6", "sd@draft@t0.4", "ssd-0.4@t0.6", "ssd-0.4@draft@t0.6"]


@pytest.mark.parametrize(("method", "methods", "baseline"), [
    ("ssd-0.4", DRAFTED, "sd"), ("ssd-0.4@heads", DRAFTED, "sd@heads"), ("pcg-0.5@draft", DRAFTED, "sd"),
    ("ssd-0.4-eos@draft", [*DRAFTED, "sd@draft"], "sd@draft"), ("ssd-0.4-eos", DRAFTED, "sd"),
    ("vadusa-2", DRAFTED, "sd"), ("ssd-0.4", ["car-3"], None), ("car-3", DRAFTED, None), ("sd", DRAFTED, None),
    ("ssd-0.4@t0.6", COLD, "sd@t0.6"), ("ssd-0.4@draft@t0.6", COLD, "sd@t0.6"),
    ("ssd-0.4@draft@t0.4", COLD, "sd@draft@t0.4"),
    ("ssd-0.4@draft@t0.6", [*COLD, "sd@draft@t0.6"], "sd@draft@t0.6"),
    ("ssd-0.4@t0.2", COLD, None),  # not the distribution of another temperature
    ("ssd-0.4", COLD, "sd"), ("sd@t0.6", COLD, None),
])
def test_relaxed_verifiers_are_measured_against_their_own_sd(method, methods, baseline):
    assert strict_baseline(method, methods) == baseline
