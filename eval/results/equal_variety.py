"""Comparison at equal variety: a policy against fixed sizes whose speech varies as much, at the
same speed.

Choosing among candidates makes the renderings of a sentence more alike, and so does a lower
temperature, which lowers the errors of fixed sizes too. The fixed sizes that a policy has to beat
are therefore those whose variety and whose speed are the policy's. They are interpolated twice:
each size between its temperatures to the policy's variety, and these between two sizes to its
speed. The result is a weighted sum of measured error rates, so that its interval comes from the
same paired bootstrap as all others. Varieties and speeds are taken as measured, and nothing is
extrapolated.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from dcar.text.bootstrap import RESAMPLES
from eval.results.pareto import SAME_SPEED, speeds_of
from eval.results.rows import Counts
from eval.results.stats import paired_contrast
from eval.results.types import EqualVariety, Row

K = TypeVar("K", bound=Hashable)
# relative difference below which varieties count as equal: about half an interval of 200 sentences
SAME_VARIETY = 0.05


def equal_variety(
    rows: Sequence[Row], counts: Mapping[str, Counts], axis: str, resamples: int = RESAMPLES
) -> list[EqualVariety]:
    """Compare every row of a policy with fixed sizes of its variety and speed. axis: the speed.
    A comparison without rows around the policy's has no test, and one without a second rendering
    no variety."""
    speeds = speeds_of(rows, axis)
    families = [(r, r.family) for r in rows if r.family and r.method in speeds]
    fixed = [row for row, family in families if family.fixed]
    policies = [row for row, family in families if family.method == "dcar"]
    return [
        _compare(row, fixed, speeds, counts, axis, resamples) for row in policies if len(fixed) > 1
    ]


def _compare(
    row: Row,
    fixed: Sequence[Row],
    speeds: Mapping[str, float],
    counts: Mapping[str, Counts],
    axis: str,
    resamples: int,
) -> EqualVariety:
    wanted = variety_of(row)
    result = EqualVariety(axis, row.method, speeds[row.method], wanted, row.wer.value)
    shares = {} if wanted is None else shares_at(wanted, speeds[row.method], fixed, speeds)
    if shares:
        methods = [row.method, *shares]
        errors, words = ([counts[m][k] for m in methods] for k in (0, 1))
        weights = [1.0, *(-share for share in shares.values())]
        result.test = paired_contrast(errors, words, weights, resamples=resamples)
        result.shares, result.wer_fixed = shares, row.wer.value - result.test.difference
    return result


def shares_at(
    variety: float, speed: float, fixed: Sequence[Row], speeds: Mapping[str, float]
) -> dict[str, float]:
    """Return the shares of measured rows of CAR-k, by method, that make up the fixed size of this
    variety and speed; empty if the rows do not enclose it."""
    sizes = []
    for size in sorted({_size(row) for row in fixed}):
        of_size = [row for row in fixed if _size(row) == size]
        places = {row.method: v for row in of_size if (v := variety_of(row)) is not None}
        if shares := _between(variety, places, SAME_VARIETY):
            sizes.append((sum(share * speeds[m] for m, share in shares.items()), shares))
    of_sizes = _between(speed, {i: reached for i, (reached, _) in enumerate(sizes)}, SAME_SPEED)
    return {
        method: share_of_size * share
        for i, share_of_size in of_sizes.items()
        for method, share in sizes[i][1].items()
    }


def _between(wanted: float, places: Mapping[K, float], same: float) -> dict[K, float]:
    """Return the shares of the two nearest places around a value, or of the one that equals it;
    empty if there are none. same: relative difference of equal values."""
    equal = [key for key in places if abs(places[key] - wanted) <= same * wanted]
    below = [key for key in places if places[key] <= wanted]
    above = [key for key in places if places[key] > wanted]
    if below and above:
        low, high = max(below, key=places.__getitem__), min(above, key=places.__getitem__)
        share = (wanted - places[low]) / (places[high] - places[low])
        return {key: s for key, s in ((low, 1 - share), (high, share)) if s}
    nearest = min(equal, key=lambda key: abs(places[key] - wanted), default=None)
    return {} if nearest is None else {nearest: 1.0}


def variety_of(row: Row) -> float | None:
    """Return the mean distance of two renderings; None with one rendering."""
    return row.variety.distance.value if row.variety and row.variety.distance else None


def missing(found: Sequence[EqualVariety]) -> list[str]:
    """Return what policies without a test at any speed lack, once each."""
    compared = {of.method for of in found if of.test}
    return list(dict.fromkeys(_lack(of) for of in found if of.method not in compared))


def _lack(of: EqualVariety) -> str:
    if of.variety is None:
        return (
            "How much speech varies was not measured, and fewer errors may come from less variety: "
            "give two seeds to compare at equal variety."
        )
    return (
        f"No fixed sizes of the variety and speed of {of.method} were compared: to compare at "
        "equal variety, add sizes around it at other temperatures, such as car-8@t0.7."
    )


def _size(row: Row) -> int:
    return int((row.spec or {})["size"])
