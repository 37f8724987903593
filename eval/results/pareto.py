"""Comparison at equal speed-up: the Pareto front, and two families of methods at the same speed.

Two methods at two speeds cannot be ranked unless one is better in both respects. A family is
therefore read as a curve, WER against speed, linear between the settings that were measured, and
two families are compared on average over the speeds that both curves reach. That is a weighted sum
of measured corpus rates, so its interval comes from the same paired bootstrap over utterances as
all others. The speeds are taken as measured, those within SAME_SPEED as equal; where curves are
compared depends on speeds alone, never on the errors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from dcar.text.bootstrap import RESAMPLES
from eval.methods.families import Family, group_families
from eval.results.rows import Counts
from eval.results.stats import PairedTest, paired_contrast
from eval.results.types import Measured, Pair, Row

# relative difference below which speeds count as equal; ranges with a smaller gap share a speed
SAME_SPEED = 0.03


@dataclass(frozen=True)
class Axis:
    """Speed that methods are compared at. quantity: what is equal; short: the same in one word;
    unit: after its number; label: of a plot; of: returns it for a row, None if it was not
    measured."""

    quantity: str
    short: str
    unit: str
    label: str
    of: Callable[[Row], float | None]


def _speedup_over(baseline: str) -> Callable[[Row], float | None]:
    return lambda row: row.speedups[baseline].total if baseline in row.speedups else None


AXES = {
    "far": Axis("time", "time", " × FAR", "× FAR, end to end (batch 1)", _speedup_over("far")),
    "car1": Axis(
        "time", "time", " × CAR-1", "× CAR-1, end to end (batch 1)", _speedup_over("car1")
    ),
    "tokens_per_pass": Axis(
        "tokens per pass",
        "tokens",
        "",
        "tokens per forward pass of the decoder",
        lambda row: row.tokens_per_pass,
    ),
}


def speeds_of(rows: Sequence[Row], axis: str) -> dict[str, float]:
    """Return the speed of every method that has one, by its name."""
    speeds = {row.method: AXES[axis].of(row) for row in rows}
    return {method: speed for method, speed in speeds.items() if speed is not None}


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


def front_rows(rows: Sequence[Row], axis: str) -> list[Row]:
    """Return the methods on the Pareto front of word errors against an axis, from slow to fast."""
    speeds = speeds_of(rows, axis)
    points = [row for row in rows if row.method in speeds]
    front = pareto_front([speeds[r.method] for r in points], [r.wer.value for r in points])
    return [points[i] for i in front]


class Curve:
    """Family as a function of speed: settings sorted by speed [M], those of equal speed averaged.
    Speeds that clocks cannot tell apart (SAME_SPEED) are equal; otherwise a line from setting to
    setting would follow their noise.

    knots: the speeds [K] between which it is linear, each the mean of its
    settings; belongs: the knot of every setting [M]. Beyond its ends it is constant.
    """

    def __init__(self, family: Family, points: Mapping[str, float]):
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
    axis: str, a: Curve, b: Curve, counts: Mapping[str, Counts], resamples: int = RESAMPLES
) -> Pair:
    """Compare the WER of two families at the same speed, a - b (method - baseline), with paired
    bootstrap intervals.

    counts: errors and words of each method, of the same utterances. Without a shared speed
    (differences up to SAME_SPEED, 3 %, are ignored, because clocks do not agree better) the result
    contains only the two families.
    """
    low, high = max(a.speeds[0], b.speeds[0]), min(a.speeds[-1], b.speeds[-1])
    if high < low <= high * (1 + SAME_SPEED):
        low = high = (low + high) / 2
    pair = Pair(axis, a.family, b.family)
    if low > high:
        return pair
    methods = [*a.methods, *b.methods]
    errors, words = ([counts[m][k] for m in methods] for k in (0, 1))
    rates = np.array([e.sum() / w.sum() for e, w in zip(errors, words, strict=True)])

    of_a, of_b = a.mean_weights(low, high), b.mean_weights(low, high)
    pair.shared = (low, high)
    pair.wer_a = float(of_a @ rates[: len(of_a)])
    pair.wer_b = float(of_b @ rates[len(of_a) :])
    pair.test = paired_contrast(errors, words, [*of_a, *-of_b], resamples=resamples)
    return pair


def equal_speed(
    rows: Sequence[Row], counts: Mapping[str, Counts], axis: str, resamples: int = RESAMPLES
) -> list[Pair]:
    """Compare every pair of families at an equal speed. The one that was registered earlier is the
    baseline b."""
    speeds = speeds_of(rows, axis)
    families = group_families([row for row in rows if row.method in speeds], lambda row: row.spec)
    curves = [
        Curve(family, {row.method: speeds[row.method] for row in members})
        for family, members in families.items()
    ]
    return [compare_curves(axis, b, a, counts, resamples) for a, b in combinations(curves, 2)]


def speed_axis(rows: Sequence[Row]) -> str | None:
    """Return the measured speed-up, end to end, that timed methods have: against FAR, else CAR-1;
    None without timings."""
    return next((axis for axis in ("far", "car1") if speeds_of(rows, axis)), None)


def families_of(measured: Measured) -> list[Family]:
    """Return the families that were compared, in their order."""
    return list(dict.fromkeys(f for pair in measured.pairs for f in (pair.b, pair.a)))


def speed_range(ends: Sequence[float]) -> str:
    """Return a range as text: 1.30–2.05, or one number."""
    low, high = (f"{end:.2f}" for end in ends)
    return low if low == high else f"{low}–{high}"


def points(test: PairedTest) -> str:
    """Return a difference in words: points, interval, p, and what would have been detected if it
    could be chance."""
    if test.detectable == 0 == test.difference:
        return "the same in every utterance"
    difference, *ends = map(signed_points, (test.difference, *(test.ends or ())))
    if not ends or test.p_value is None:
        return f"{difference} points (too few utterances for an interval)"
    low, high = ends
    p = "p < 0.001" if test.p_value < 0.001 else f"p = {test.p_value:.3f}"
    chance = ""
    if test.by_chance and test.detectable is not None:
        chance = (
            f"; could be chance, a true difference of {100 * test.detectable:.1f} would be detected"
        )
    return f"{difference} points (95 % interval {low} to {high}, {p}{chance})"


def signed_points(difference: float) -> str:
    """Return a difference of rates in points, with its sign."""
    return f"{round(100 * difference, 1) + 0:+.1f}".replace("-", "−")  # + 0: no −0.0
