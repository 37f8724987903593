"""Report of a comparison with many verifying methods, from made-up records."""

import json

import numpy as np
import pytest
from compare_worker import made_record, made_result
from test_report import parsed

from eval.methods.sweeps import expand_names
from eval.report.page import write_report
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
    ):
        assert heading in page.text
    assert all(name in page.text for name in NAMES)
    assert not {"listen", "why-chunks-end-where-they-do", "training-of-the-policy-dcpo"} & {
        *page.ids
    }
    assert sum(tag == "img" for tag, _ in page.sources) == 2
    untimed = [{**r, "speedup_vs_far": None, "speedup_vs_car1": None} for r in comparison["rows"]]
    assert [p.name for p in draw_plots(untimed, tmp_path)] == ["compare.png"]
    assert not (tmp_path / "compare_speed.png").exists()
