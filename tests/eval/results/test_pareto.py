"""Pareto front by brute force; families at equal speed on curves whose difference is known."""

import re

import numpy as np
import pytest
from compare_worker import mapping_of

from eval.report.table import rival_sentences
from eval.results.pareto import (
    Curve,
    compare_curves,
    equal_speed,
    pareto_front,
    sentence,
    speed_axis,
)
from eval.results.stats import paired_contrast, paired_test


def test_front_equals_brute_force():
    rng = np.random.default_rng(0)
    for trial in range(200):
        # few values, so there are ties
        speeds, errors = (rng.integers(0, 6, 8).astype(float) for _ in range(2))
        brute = {
            i
            for i in range(8)
            if not any(
                speeds[j] >= speeds[i]
                and errors[j] <= errors[i]
                and (speeds[j] > speeds[i] or errors[j] < errors[i])
                for j in range(8)
            )
        }
        front = pareto_front(speeds.tolist(), errors.tolist())
        assert set(front) == brute, trial
        assert len(front) == len(brute)
        assert sorted(front, key=lambda i: (speeds[i], errors[i])) == sorted(
            front, key=lambda i: speeds[i]
        )
        assert [speeds[i] for i in front] == sorted(speeds[i] for i in front)


def test_weights_interpolate_and_integrate():
    curve = Curve("f", {"a": 1.0, "c": 4.0, "b": 2.0})
    values = np.array([10.0, 20.0, 0.0])  # of a, b, c: sorted by speed
    assert curve.methods == ["a", "b", "c"]
    for speed in (1.0, 1.25, 2.0, 3.1, 4.0):
        assert curve.weights_at(speed) @ values == pytest.approx(
            np.interp(speed, [1, 2, 4], values)
        )
    fine = np.linspace(1.5, 3.7, 200_001)
    assert curve.mean_weights(1.5, 3.7) @ values == pytest.approx(
        np.interp(fine, [1, 2, 4], values).mean(), rel=1e-5
    )
    # trapezoids rule-based
    assert curve.mean_weights(1, 4) @ values == pytest.approx((15 * 1 + 10 * 2) / 3)
    assert curve.weights_at(2.5).sum() == pytest.approx(1)


def test_settings_of_equal_speed_are_averaged():
    curve = Curve("f", {"a": 1.0, "b": 2.0, "c": 2.0})
    assert curve.weights_at(1.5).tolist() == [0.5, 0.25, 0.25]
    assert curve.weights_at(2.0).tolist() == [0.0, 0.5, 0.5]
    near = Curve("f", {"a": 1.0, "b": 2.0, "c": 2.04, "d": 3.0})  # b and c are one knot at 2.02
    assert near.weights_at(2.02).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert near.weights_at(1.51) == pytest.approx([0.5, 0.25, 0.25, 0.0])
    assert near.mean_weights(1.0, 2.02) == pytest.approx([0.5, 0.25, 0.25, 0.0])


def counts_of(rates: dict[str, float], utterances: int = 40) -> dict:
    """Every utterance of 10 words has 10 · rate errors: no spread, so the answer is exact."""
    return {m: sums_of([10 * r] * utterances, [10] * utterances) for m, r in rates.items()}


def sums_of(errors, words) -> dict[str, tuple[float, float]]:
    """Errors and words by utterance."""
    return {f"u{i:03}": pair for i, pair in enumerate(zip(errors, words, strict=True))}


def test_known_difference_at_equal_speed():
    a, b = Curve("ssd", {"ssd-0": 1.0, "ssd-1": 3.0}), Curve("car", {"car-1": 2.0, "car-2": 4.0})
    got = compare_curves(
        a, b, counts_of({"ssd-0": 0.1, "ssd-1": 0.3, "car-1": 0.15, "car-2": 0.25}), resamples=200
    )
    assert (got["shared"], got["at"]) == ([2.0, 3.0], 2.5)
    assert got["wer_a"] == pytest.approx(0.25)  # 0.1 + 0.75 · 0.2
    assert got["wer_b"] == pytest.approx(0.175)  # 0.15 + 0.25 · 0.1
    assert got["difference"] == pytest.approx(0.075)
    assert got["ci"] == pytest.approx([0.075, 0.075])
    # a runs from 0.2 to 0.3 over the shared range, b from 0.15 to 0.2
    assert got["average"]["difference"] == pytest.approx(0.25 - 0.175)
    assert "+7.5 points (95 % interval +7.5 to +7.5" in sentence({**got, "axis": "speedup_vs_far"})


def test_families_are_compared_on_the_utterances_that_all_their_methods_have():
    """The result is that of the shared utterances alone, whatever the others hold."""
    rng = np.random.default_rng(1)
    words = rng.integers(5, 15, 40)
    whole = {m: sums_of(rng.poisson(1.0, 40), words) for m in ("car-1", "car-2", "sd")}
    line, point = Curve("CAR-k", {"car-1": 1.0, "car-2": 2.0}), Curve("SD", {"sd": 1.5})
    few = {**whole, "sd": dict(list(whole["sd"].items())[10:22])}
    got = compare_curves(point, line, few, resamples=200)
    alone = {m: {i: sums[i] for i in few["sd"]} for m, sums in whole.items()}
    expected = compare_curves(point, line, alone, resamples=200)
    assert (got["n"], got["partial"], expected["partial"]) == (12, True, False)
    assert got == {**expected, "partial": True}
    rates = {
        m: sum(e for e, _ in s.values()) / sum(w for _, w in s.values()) for m, s in alone.items()
    }
    assert got["wer_a"] == pytest.approx(rates["sd"])
    assert got["wer_b"] == pytest.approx((rates["car-1"] + rates["car-2"]) / 2)
    assert "on the 12 utterances that both have" in sentence({**got, "axis": "tokens_per_pass"})


def test_a_point_is_compared_with_a_line_and_lines_apart_are_not():
    line, point = Curve("CAR-k", {"car-1": 1.0, "car-2": 2.0}), Curve("typical", {"typical": 1.5})
    counts = counts_of({"car-1": 0.5, "car-2": 0.3, "typical": 0.2, "sd": 0.4})
    got = compare_curves(line, point, counts, resamples=200)
    assert got["difference"] == got["average"]["difference"] == pytest.approx(0.2)
    assert "Averaged" not in sentence({**got, "axis": "tokens_per_pass"})
    apart = compare_curves(line, Curve("SD", {"sd": 0.9}), counts, resamples=200)
    assert apart["shared"] is None
    assert sentence({**apart, "axis": "tokens_per_pass"}) == (
        "CAR-k (1.00–2.00) and SD (0.90) have no tokens per pass in common, so they cannot "
        "be compared."
    )
    # within what clocks can tell
    near = compare_curves(line, Curve("sd", {"sd": 0.98}), counts, resamples=200)
    assert near["difference"] == pytest.approx(0.1)
    assert near["wer_a"] == pytest.approx(0.5)


def test_intervals_are_paired_and_hold_their_level():
    """Difference of two curves between noisy settings that share the difficulty of the
    utterances."""
    a, b = Curve("a", {"a-1": 1.0, "a-2": 2.0}), Curve("b", {"b-1": 1.0, "b-2": 2.0})
    hits, widths, unpaired = 0, [], []
    for trial in range(150):
        rng = np.random.default_rng(trial)
        hard = rng.gamma(2.0, 1.0, 60)
        means = {"a-1": 1.0, "a-2": 2.0, "b-1": 1.5, "b-2": 1.5}
        errors = {m: rng.poisson(v * hard) for m, v in means.items()}
        counts = {m: sums_of(e, np.full(60, 20)) for m, e in errors.items()}
        got = compare_curves(a, b, counts, resamples=300)
        hits += got["ci"][0] <= 0.0 <= got["ci"][1]  # at 1.5 both curves have 1.5 · hard errors
        widths.append(got["ci"][1] - got["ci"][0])
        unpaired.append(
            compare_curves(
                a,
                b,
                {
                    **counts,
                    "b-1": sums_of(rng.permutation(errors["b-1"]), np.full(60, 20)),
                    "b-2": sums_of(rng.permutation(errors["b-2"]), np.full(60, 20)),
                },
                resamples=300,
            )["ci"]
        )
    assert 0.88 <= hits / 150 <= 0.99
    assert np.mean(widths) < 0.8 * np.mean([high - low for low, high in unpaired])


def test_contrast_of_two_is_the_paired_test():
    rng = np.random.default_rng(3)
    ea, eb, words = rng.poisson(1.0, 50), rng.poisson(1.4, 50), rng.integers(5, 15, 50)
    assert paired_contrast([ea, eb, ea], [words] * 3, [1.0, -1.0, 0.0]) == paired_test(
        ea, words, eb, words
    )


def rows_of(points: dict[str, tuple[float, float]]) -> list[dict]:
    return [
        {
            "method": m,
            "settings": mapping_of(m),
            "kind": "method",
            "speedup_vs_far": x,
            "tokens_per_pass": 1.0,
            "wer": y,
            "n": 40,
        }
        for m, (x, y) in points.items()
    ]


def test_all_pairs_and_their_sentences():
    points = {
        "far": (1.0, 0.5),
        "car-1": (1.0, 0.4),
        "car-2": (2.0, 0.2),
        "dcar": (1.5, 0.3),
        "sd": (0.5, 0.5),
    }
    rows = rows_of(points)
    assert speed_axis(rows) == "speedup_vs_far"
    pairs = equal_speed(
        rows, counts_of({m: y for m, (_, y) in points.items()}), "speedup_vs_far", resamples=200
    )
    assert [(p["a"], p["b"]) for p in pairs] == [
        ("CAR-k", "FAR"),
        ("DCAR", "FAR"),
        ("SD", "FAR"),
        ("DCAR", "CAR-k"),
        ("SD", "CAR-k"),
        ("SD", "DCAR"),
    ]  # method, baseline
    said = rival_sentences(rows, pairs)
    assert len(said) == 2  # car against far, dcar against car; what shares no speed is left out
    assert (
        re.findall(r"DCAR|CAR-k|[+]?\d+\.\d+", said[1])[:6]
        == "1.50 DCAR 30.0 CAR-k 30.0 +0.0".split()
    )
    assert rival_sentences(rows, []) == []
    untimed = [{**r, "speedup_vs_far": None} for r in rows]
    assert speed_axis(untimed) is None
    assert equal_speed(untimed, {}, "speedup_vs_far") == []
