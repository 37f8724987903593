"""Pareto front by brute force; families at equal speed on curves whose difference is known."""

from dataclasses import replace

import numpy as np
import pytest
from compare_worker import made_measured, made_row

from eval.methods.families import Family
from eval.report.table import pair_row, rivals
from eval.results.pareto import (
    Curve,
    compare_curves,
    equal_speed,
    families_of,
    pareto_front,
    speed_axis,
)
from eval.results.rows import Counts
from eval.results.stats import paired_contrast, paired_test
from eval.results.types import Speedup


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
    curve = Curve(Family("f", "f"), {"a": 1.0, "c": 4.0, "b": 2.0})
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
    curve = Curve(Family("f", "f"), {"a": 1.0, "b": 2.0, "c": 2.0})
    assert curve.weights_at(1.5).tolist() == [0.5, 0.25, 0.25]
    assert curve.weights_at(2.0).tolist() == [0.0, 0.5, 0.5]
    near = Curve(
        Family("f", "f"), {"a": 1.0, "b": 2.0, "c": 2.04, "d": 3.0}
    )  # b and c are one knot at 2.02
    assert near.weights_at(2.02).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert near.weights_at(1.51) == pytest.approx([0.5, 0.25, 0.25, 0.0])
    assert near.mean_weights(1.0, 2.02) == pytest.approx([0.5, 0.25, 0.25, 0.0])


def counts_of(rates: dict[str, float], utterances: int = 40) -> dict[str, Counts]:
    """Every utterance of 10 words has 10 · rate errors: no spread, so the answer is exact."""
    words = np.full(utterances, 10.0)
    return {m: Counts(r * words, words) for m, r in rates.items()}


def test_known_difference_at_equal_speed():
    a, b = (
        Curve(Family("ssd", "ssd"), {"ssd-0": 1.0, "ssd-1": 3.0}),
        Curve(Family("car", "car"), {"car-1": 2.0, "car-2": 4.0}),
    )
    rates = {"ssd-0": 0.1, "ssd-1": 0.3, "car-1": 0.15, "car-2": 0.25}
    got = compare_curves("far", a, b, counts_of(rates), resamples=200)
    assert got.shared == (2.0, 3.0)
    assert got.wer_a == pytest.approx(0.25)  # from 0.2 to 0.3
    assert got.wer_b == pytest.approx(0.175)  # from 0.15 to 0.2
    assert got.test.difference == pytest.approx(0.075)
    assert got.test.ends == pytest.approx([0.075, 0.075])
    assert pair_row(got)[:5] == [
        "ssd − car",
        "time (2.00–3.00 × FAR)",
        "17.5",
        "+7.5",
        "+7.5 to +7.5",
    ]


def test_a_point_is_compared_with_a_line_and_lines_apart_are_not():
    line, point = (
        Curve(Family("car", "CAR-k"), {"car-1": 1.0, "car-2": 2.0}),
        Curve(Family("typical", "typical"), {"typical": 1.5}),
    )
    counts = counts_of({"car-1": 0.5, "car-2": 0.3, "typical": 0.2, "sd": 0.4})
    axis = "tokens_per_pass"
    got = compare_curves(axis, line, point, counts, resamples=200)
    assert got.test.difference == pytest.approx(0.2)
    assert pair_row(got)[1] == "tokens per pass (1.50)"
    apart = compare_curves(
        axis, line, Curve(Family("sd", "SD"), {"sd": 0.9}), counts, resamples=200
    )
    assert apart.shared is None
    assert pair_row(apart) == ["CAR-k − SD", "tokens per pass (none)", *["–"] * 5]
    # within what clocks can tell
    near = compare_curves(
        axis, line, Curve(Family("sd", "sd"), {"sd": 0.98}), counts, resamples=200
    )
    assert near.test.difference == pytest.approx(0.1)
    assert near.wer_a == pytest.approx(0.5)


def test_intervals_are_paired_and_hold_their_level():
    """Difference of two curves between noisy settings that share the difficulty of the
    utterances."""
    a, b = (
        Curve(Family("a", "a"), {"a-1": 1.0, "a-2": 2.0}),
        Curve(Family("b", "b"), {"b-1": 1.0, "b-2": 2.0}),
    )
    hits, widths, unpaired = 0, [], []
    for trial in range(150):
        rng = np.random.default_rng(trial)
        hard = rng.gamma(2.0, 1.0, 60)
        means = {"a-1": 1.0, "a-2": 2.0, "b-1": 1.5, "b-2": 1.5}
        errors = {m: rng.poisson(v * hard) for m, v in means.items()}
        words = np.full(60, 20.0)
        counts = {m: Counts(e, words) for m, e in errors.items()}
        shuffled = {m: Counts(rng.permutation(errors[m]), words) for m in ("b-1", "b-2")}
        low, high = compare_curves("far", a, b, counts, resamples=300).test.ends
        hits += low <= 0.0 <= high  # at 1.5 both curves have 1.5 · hard errors
        widths.append(high - low)
        apart = compare_curves("far", a, b, counts | shuffled, resamples=300)
        unpaired.append(apart.test.ends)
    assert 0.88 <= hits / 150 <= 0.99
    assert np.mean(widths) < 0.8 * np.mean([high - low for low, high in unpaired])


def test_contrast_of_two_is_the_paired_test():
    rng = np.random.default_rng(3)
    ea, eb, words = rng.poisson(1.0, 50), rng.poisson(1.4, 50), rng.integers(5, 15, 50)
    assert paired_contrast([ea, eb, ea], [words] * 3, [1.0, -1.0, 0.0]) == paired_test(
        ea, words, eb, words
    )


def test_all_pairs_and_those_that_matter():
    points = {
        "far": (1.0, 0.5),
        "car-1": (1.0, 0.4),
        "car-2": (2.0, 0.2),
        "dcar": (1.5, 0.3),
        "sd": (0.5, 0.5),
    }
    rows = [
        made_row(m, wer, speedups={"far": Speedup("far", speed, speed, (speed, speed))})
        for m, (speed, wer) in points.items()
    ]
    assert speed_axis(rows) == "far"
    counts = counts_of({m: wer for m, (_, wer) in points.items()})
    pairs = equal_speed(rows, counts, "far", resamples=200)
    assert [(pair.a.label, pair.b.label) for pair in pairs] == [
        ("CAR-k", "FAR"),
        ("DCAR", "FAR"),
        ("SD", "FAR"),
        ("DCAR", "CAR-k"),
        ("SD", "CAR-k"),
        ("SD", "DCAR"),
    ]  # method, baseline
    assert [f.label for f in families_of(made_measured(rows, pairs=pairs))] == [
        *("FAR", "CAR-k", "DCAR", "SD")
    ]
    # what shares no speed, or neither is a fixed size nor a policy, is left out
    assert [pair_row(pair)[:4] for pair in rivals(pairs)] == [
        ["CAR-k − FAR", "time (1.00 × FAR)", "50.0", "−10.0"],
        ["DCAR − CAR-k", "time (1.50 × FAR)", "30.0", "+0.0"],
    ]
    assert rivals([]) == []
    untimed = [replace(row, speedups={}) for row in rows]
    assert speed_axis(untimed) is None
    assert equal_speed(untimed, {}, "far") == []
