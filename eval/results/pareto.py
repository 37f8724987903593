"""Comparison at equal speed-up: the Pareto front, and two families of methods at the same speed.

Two methods at two speeds cannot be ranked unless one is better in both respects. A family is
therefore read as a curve, WER against speed, linear between the settings that were measured, and
two families are compared where both curves exist: in the middle of the shared range, and on average
over it. Both are weighted sums of measured corpus rates, so their intervals come from the same
paired bootstrap over utterances as all others. The speeds are taken as measured, those within
SAME_SPEED as equal; where curves are compared depends on speeds alone, never on the errors.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from dcar.text.bootstrap import RESAMPLES
from eval.methods.families import group_families
from eval.results.rows import Sums
from eval.results.stats import paired_contrast

# relative difference below which speeds count as equal; ranges with a smaller gap share a speed
SAME_SPEED = 0.03
SPEED_AXES = {
    "speedup_vs_far": ("time", " × FAR"),
    "speedup_vs_car1": ("time", " × CAR-1"),
    # the quantity, and the unit after its number
    "tokens_per_pass": ("tokens per pass", ""),
}


def pareto_front(speeds: Sequence[float], errors: Sequence[float]) -> list[int]:
    """Return the indices of the points that no other dominates, from slow to fast.

    A point is dominated by one that is at least as fast and makes no more errors, and is better in
    one of the two.
    """
    front: list[int] = []
    for i in sorted(range(len(speeds)), key=lambda i: (-speeds[i], errors[i])):
        last = front[-1] if front else i
        if (
            i == last
            or errors[i] < errors[last]
            or (speeds[i], errors[i]) == (speeds[last], errors[last])
        ):
            front.append(i)
    return front[::-1]


def front_rows(rows: Sequence[dict[str, Any]], axis: str) -> list[dict[str, Any]]:
    """Return the methods on the Pareto front of word errors against `axis` (a key of
    SPEED_AXES), from slow to fast. Methods that decoded fewer utterances than others are left out:
    their errors are those of other texts."""
    spoken = [r for r in rows if r["kind"] == "method"]
    most = max(r["n"] for r in spoken)
    points = [r for r in spoken if r["n"] == most and r.get(axis) is not None]
    return [points[i] for i in pareto_front([r[axis] for r in points], [r["wer"] for r in points])]


class Curve:
    """Family as a function of speed: settings sorted by speed [M], those of equal speed averaged.
    Speeds that clocks cannot tell apart (SAME_SPEED) are equal; otherwise a line from setting to
    setting would follow their noise.

    family: its label; knots: the speeds [K] between which it is linear, each the mean of its
    settings; belongs: the knot of every setting [M]. Beyond its ends it is constant.
    """

    def __init__(self, family: str, points: Mapping[str, float]):
        """Make the curve of at least one method. points: speed of each method."""
        self.family, self.methods = family, sorted(points, key=lambda m: (points[m], m))
        self.speeds = [points[m] for m in self.methods]
        groups: list[list[float]] = []
        for speed in self.speeds:
            if groups and speed <= groups[-1][0] * (1 + SAME_SPEED):
                groups[-1].append(speed)
            else:
                groups.append([speed])
        self.knots = np.array([np.mean(group) for group in groups])
        self.belongs = np.repeat(np.arange(len(groups)), [len(group) for group in groups])

    def weights_at(self, speed: float) -> np.ndarray:
        """Return weights [M] of the measured settings whose sum is the curve at this speed."""
        hats = np.array([np.interp(speed, self.knots, row) for row in np.eye(len(self.knots))])
        return (hats / np.bincount(self.belongs))[self.belongs]

    def mean_weights(self, low: float, high: float) -> np.ndarray:
        """Return weights [M] whose sum is exactly the curve's mean between two speeds."""
        if low == high:
            return self.weights_at(low)
        stops = np.unique([low, high, *[s for s in self.knots if low < s < high]])
        values = np.stack([self.weights_at(s) for s in stops])
        widths = np.diff(stops)[:, None]
        return (widths * (values[1:] + values[:-1]) / 2).sum(0) / (high - low)


def compare_curves(
    a: Curve, b: Curve, counts: Mapping[str, Sums], resamples: int = RESAMPLES
) -> dict[str, Any]:
    """Compare the WER of two families at the same speed, a - b (method - baseline), with paired
    bootstrap intervals.

    counts: errors and reference words of each method by utterance. The families are compared on the
    utterances that all their methods have; n is their number, and `partial` is true if some method
    has more. Without a shared speed (differences up to SAME_SPEED, 3 %, are ignored, because clocks
    do not agree better) the result contains only the two ranges.
    """
    low, high = max(a.speeds[0], b.speeds[0]), min(a.speeds[-1], b.speeds[-1])
    if high < low <= high * (1 + SAME_SPEED):
        low = high = (low + high) / 2
    result: dict[str, Any] = {
        "a": a.family,
        "b": b.family,
        "range_a": [a.speeds[0], a.speeds[-1]],
        "range_b": [b.speeds[0], b.speeds[-1]],
        "shared": [low, high] if low <= high else None,
    }
    if low > high:
        return result
    methods = [*a.methods, *b.methods]
    shared = [i for i in counts[methods[0]] if all(i in counts[m] for m in methods)]
    errors, words = ([[counts[m][i][k] for i in shared] for m in methods] for k in (0, 1))
    rates = {m: sum(e) / sum(w) for m, e, w in zip(methods, errors, words, strict=True)}

    def test(weights_a: np.ndarray, weights_b: np.ndarray) -> dict[str, Any]:
        both = paired_contrast(errors, words, [*weights_a, *-weights_b], resamples=resamples)
        wers = [
            sum(w * rates[m] for w, m in zip(weights, curve.methods, strict=True))
            for weights, curve in ((weights_a, a), (weights_b, b))
        ]
        return {
            "wer_a": float(wers[0]),
            "wer_b": float(wers[1]),
            "difference": both.difference,
            "ci": both.ends,
            "p": both.p_value,
            "detectable": both.detectable,
        }

    at = (low + high) / 2
    return {
        **result,
        "n": len(shared),
        "partial": any(len(counts[m]) > len(shared) for m in methods),
        "at": at,
        **test(a.weights_at(at), b.weights_at(at)),
        "average": test(a.mean_weights(low, high), b.mean_weights(low, high)),
    }


def equal_speed(
    rows: Sequence[dict[str, Any]],
    counts: Mapping[str, Sums],
    axis: str,
    resamples: int = RESAMPLES,
) -> list[dict[str, Any]]:
    """Compare every pair of families at equal `axis` (a key of SPEED_AXES). The earlier in the
    order of KINDS is the baseline b."""
    curves = [
        Curve(family.label, {r["method"]: float(r[axis]) for r in members})
        for family, members in group_families([r for r in rows if r.get(axis) is not None]).items()
    ]
    return [
        {"axis": axis, **compare_curves(b, a, counts, resamples)}
        for a, b in combinations(curves, 2)
    ]


def speed_axis(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return the measured speed-up, end to end, that all timed methods have: against FAR, else
    CAR-1; None without timings."""
    return next(
        (
            axis
            for axis in ("speedup_vs_far", "speedup_vs_car1")
            if any(r.get(axis) is not None for r in rows)
        ),
        None,
    )


def sentence(pair: dict[str, Any]) -> str:
    """Return the comparison as a sentence."""
    a, b = pair["a"], pair["b"]
    equal, unit = SPEED_AXES[pair["axis"]]
    if pair["shared"] is None:
        ours, theirs = speed_range(pair["range_a"]), speed_range(pair["range_b"])
        return (
            f"{a} ({ours}{unit}) and {b} ({theirs}) have no {equal} in common, so they cannot be "
            "compared."
        )
    low, high = pair["shared"]
    where = "" if low == high else f", the middle of {speed_range([low, high])}"
    text = (
        f"At equal {equal} ({pair['at']:.2f}{unit}{where}), {a} makes {100 * pair['wer_a']:.1f} % "
        f"word errors and {b} {100 * pair['wer_b']:.1f} %{common_texts(pair)}: "
        f"{_points(pair)}"
    )
    if pair["p"] is not None and pair["p"] > 0.05:
        text += (
            f"; this could be chance (a true difference of {100 * pair['detectable']:.1f} points "
            "would be detected)"
        )
    average = f" Averaged over that range: {_points(pair['average'])}." if low < high else ""
    return f"{text}.{average}"


def common_texts(pair: dict[str, Any]) -> str:
    """Return how many utterances a comparison is on, if some methods have more; else nothing."""
    return f" on the {pair['n']} utterances that both have" if pair.get("partial") else ""


def difference(pair: dict[str, Any]) -> str:
    """Return the difference of two families at equal speed in a few words, averaged over the speeds
    that both reach."""
    equal, unit = SPEED_AXES[pair["axis"]]
    if pair["shared"] is None:
        return f"no {equal} in common"
    test = pair["average"]
    chance = ", could be chance" if test["p"] is not None and test["p"] > 0.05 else ""
    where = f"at equal {equal} ({speed_range(pair['shared'])}{unit})"
    return f"{_points(test)} {where}{chance}"


def speed_range(ends: Sequence[float]) -> str:
    """Return a range as text: 1.30–2.05, or one number."""
    low, high = (f"{end:.2f}" for end in ends)
    return low if low == high else f"{low}–{high}"


def _points(test: dict[str, Any]) -> str:
    difference, *ends = (
        f"{round(100 * v, 1) + 0:+.1f}".replace("-", "−")  # + 0: no −0.0
        for v in (test["difference"], *(test["ci"] or ()))
    )
    if not ends:
        return f"{difference} points (too few utterances for an interval)"
    low, high = ends
    p = "p < 0.001" if test["p"] < 0.001 else f"p = {test['p']:.3f}"
    return f"{difference} points (95 % interval {low} to {high}, {p})"
