"""Our rows beside the papers': transcription, matching, and a whole report of many verifying
methods."""

import json

import numpy as np
import pytest
from compare_worker import made_record, made_result
from test_report import parsed

from eval.methods.sweeps import expand_names
from eval.report.page import write_report
from eval.report.papers import SETUPS, beside_papers, cells, setup_text, speedup
from eval.report.plots import PLOTS, draw_plots
from eval.results.pareto import equal_speed, speed_axis
from eval.results.rows import counts_of, make_rows
from eval.results.store import RESYNTHESIS

NAMES = expand_names(
    [
        "far",
        "car-{1,2,3}",
        "dcar",
        "entropy-{1,2}",
        "mtp-viterbi-{2,3}",
        "sd",
        "ssd-{0,0.4}",
        "pcg-{0.4,0.5}",
        "vadusa-{2,3}",
        "typical",
        "topk-verify-{5,10}",
    ]
)


@pytest.fixture(scope="module")
def comparison() -> dict:
    """Made-up records of every family: ten utterances, verifiers accept the first of two drafted
    tokens."""
    rng = np.random.default_rng(0)
    records, timings = [], []
    for m, name in enumerate([RESYNTHESIS, *NAMES]):
        checks = name.startswith(("sd", "ssd", "pcg", "vadusa", "typical", "topk"))
        for u in range(10):
            records.append(
                made_record(
                    name,
                    f"u{u}",
                    int(rng.integers(0, 8)),
                    passes=10,
                    tokens=[1] * (20 + m),
                    actions=[],
                    emitted=[],
                    proposed=20 * checks,
                    accepted=10 * checks,
                    rounds_proposed=[2] * 10 * checks,
                    rounds_accepted=[1] * 10 * checks,
                )
            )
            timings.append(
                {
                    "method": name,
                    "id": f"u{u}",
                    "lm": 1 / (1 + 0.1 * m),
                    "vocoder": 0.1,
                    "policy": 0.0,
                    "audio": 1.0,
                    "tokens": 20,
                }
            )
    rows = make_rows(records, [RESYNTHESIS, *NAMES], timings, resamples=200)
    counts = {n: counts_of([r for r in records if r["method"] == n]) for n in NAMES}
    pairs = [
        p
        for axis in (speed_axis(rows), "tokens_per_pass")
        for p in equal_speed(rows, counts, axis, 200)
    ]
    return made_result(rows, equal_speed=pairs)


def test_derived_speedups_follow_from_printed_times():
    """Where a paper prints speed-ups and times, both agree; what is derived is marked."""
    results = [r for s in SETUPS for r in s["results"]]
    by_name = {r["name"]: speedup(r) for r in results}
    assert by_name["β = 0.4"] == pytest.approx(1.4, abs=0.001)  # the text says 1.4x
    assert by_name["n = 8, k = 3 (Table II)"] == pytest.approx(5.34, abs=0.005)
    for r in results:
        assert 1 < r["wer"] < 20  # in per cent
        assert not ("times" in r and "speedup" in r)
        assert ("times" in r) == (speedup(r) is not None and round(speedup(r), 2) != speedup(r))
    for s in SETUPS:
        assert all(
            s[key] for key in ("paper", "table", "model", "data", "recognizer", "machine")
        ) and setup_text(s)


def test_rows_stand_beside_results_of_the_same_setting(comparison):
    rows = comparison["rows"]
    matched = {
        (s["table"], theirs["name"]): (s, theirs, ours)
        for s, pairs in beside_papers(rows)
        for theirs, ours in pairs
    }
    exact = matched["Tables 1 and 3", "β = 0.4"]
    # not spoken here
    assert exact[2]["method"] == "ssd-0.4" and ("Tables 1 and 3", "β = 0.1") not in matched
    strict = [
        *rows,
        {**exact[2], "method": "ssd-0.4-eos"},
        {**exact[2], "method": "ssd-0.4-eos@t0.4"},
    ]
    same = {theirs["name"]: ours for _, pairs in beside_papers(strict) for theirs, ours in pairs}
    assert same["β = 0.4"]["method"] == "ssd-0.4-eos"  # its whole name, at the common sampling
    car1 = next(r for r in rows if r["method"] == "car-1")
    shown = cells(*exact, rows)
    assert shown[:4] == ["β = 0.4", "5.70", f"{5.70 / 3.67:.2f}", "1.40*"]
    assert shown[7:9] == [
        f"{exact[2]['wer'] / car1['wer']:.2f}",
        f"{exact[2]['lm_speedup_vs_car1']:.2f}",
    ]
    few = [r for r in rows if r["method"] in ("car-2", "dcar")]
    assert {ours["method"] for _, pairs in beside_papers(few) for _, ours in pairs} == {
        "car-2",
        "dcar",
    }
    # no baseline here
    assert cells(exact[0], exact[1], few[0], few)[7] == "–" and beside_papers([]) == []


def test_report_of_many_methods_has_all_sections(comparison, tmp_path):
    (tmp_path / "compare.json").write_text(json.dumps(comparison))
    assert [p.name for p in draw_plots(comparison["rows"], tmp_path)] == list(PLOTS)
    page = parsed(write_report(tmp_path, out=tmp_path / "sub" / "report.html"))
    for heading in (
        "Errors and speed",
        "Fewest word errors",
        "Errors against chunk size",
        "Comparison at equal speed",
        "Passes and acceptance",
        "Published results",
    ):
        assert heading in page.text
    assert all(name in page.text for name in NAMES)
    assert not {"listen", "why-chunks-end-where-they-do", "training-of-the-policy-dcpo"} & {
        *page.ids
    }
    assert (tmp_path / "sub" / "report_tables" / "ssd-tables-1-and-3.csv").exists()
    assert sum(tag == "img" for tag, _ in page.sources) == 2
    assert "CosyVoice 2" in page.text and "Whisper-large-v3" in page.text
    untimed = [{**r, "speedup_vs_far": None, "speedup_vs_car1": None} for r in comparison["rows"]]
    assert [p.name for p in draw_plots(untimed, tmp_path)] == ["compare.png"]
    assert not (tmp_path / "compare_speed.png").exists()
