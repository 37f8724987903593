"""Fixed sizes of a policy's variety and speed, on a plane of rows whose error rate is known."""

import numpy as np
import pytest
from compare_worker import made_measured, made_row

from dcar.text.bootstrap import Interval
from eval.report.table import variety_table
from eval.results.equal_variety import equal_variety, missing, shares_at
from eval.results.pareto import speeds_of
from eval.results.rows import Counts
from eval.results.types import Row, Variety

AXIS = "tokens_per_pass"


def row_of(method: str, variety: float | None, speed: float, wer: float) -> Row:
    distance = None if variety is None else Interval(variety, None, None)
    return made_row(method, wer, tokens_per_pass=speed, variety=Variety(distance, 0.1, 1.0, 1, 0.0))


def error(variety: float, speed: float) -> float:
    """A plane, on which interpolation is exact."""
    return 0.02 + variety + 0.01 * speed


def fixed_rows() -> list[Row]:
    """Rows of three sizes at two temperatures; the variety grows with the size, and tokens per pass
    fall with the temperature."""
    return [
        row_of(f"car-{size}@t{t}", variety, speed, error(variety, speed))
        for size in (4, 8, 12)
        for t in (0.5, 1.0)
        for variety, speed in [(0.05 * t + 0.001 * size, size - 0.1 * t)]
    ]


def counts_of(rows: list[Row], utterances: int = 40) -> dict[str, Counts]:
    words = np.full(utterances, 10.0)
    return {row.method: Counts(row.wer.value * words, words) for row in rows}


def test_the_policy_meets_the_fixed_size_of_its_variety_and_speed():
    rows = [*fixed_rows(), row_of("dcar", 0.045, 9.3, 0.1)]
    (of,) = equal_variety(rows, counts_of(rows), AXIS, resamples=200)
    by_name = {row.method: row for row in rows}
    assert set(of.shares) == {"car-8@t0.5", "car-8@t1.0", "car-12@t0.5", "car-12@t1.0"}
    assert sum(of.shares.values()) == pytest.approx(1)
    assert all(share > 0 for share in of.shares.values())
    mean = {
        name: sum(share * value(by_name[m]) for m, share in of.shares.items())
        for name, value in {
            "variety": lambda row: row.variety.distance.value,
            "speed": lambda row: row.tokens_per_pass,
        }.items()
    }
    assert mean == pytest.approx({"variety": 0.045, "speed": 9.3})
    assert of.wer_fixed == pytest.approx(error(0.045, 9.3))
    assert of.test.difference == pytest.approx(0.1 - error(0.045, 9.3))
    (cells,) = variety_table("", made_measured(rows, equal_variety=[of])).rows
    assert cells == [
        "DCAR − CAR-k",
        "tokens, variety (0.045)",
        "15.8",
        "−5.8",
        "−5.8 to −5.8",
        "0.005",
        "–",
        ", ".join(of.shares),
    ]
    assert not missing([of])


def test_fixed_sizes_of_another_decoder_are_no_places():
    rows = [*fixed_rows(), row_of("dcar", 0.045, 9.3, 0.1)]
    twin = row_of("car-9:other", 0.045, 9.3, 0.01)
    (of,) = equal_variety([*rows, twin], counts_of([*rows, twin]), AXIS, resamples=200)
    assert of.shares == equal_variety(rows, counts_of(rows), AXIS, resamples=200)[0].shares


def test_a_row_that_equals_the_policy_is_taken_alone():
    fixed = fixed_rows()
    twin = fixed[2]
    variety, speed = twin.variety.distance.value, twin.tokens_per_pass
    speeds = speeds_of(fixed, AXIS)
    assert shares_at(variety, speed, fixed, speeds) == {twin.method: 1.0}
    # within what counts as equal, outside the rows
    least, slowest = min(r.variety.distance.value for r in fixed), min(speeds.values())
    assert shares_at(0.97 * least, 1.0 * slowest, fixed, speeds) == {"car-4@t0.5": 1.0}


def test_rows_without_variety_are_places_too():
    """At temperature 0 all renderings are the same."""
    fixed = [row_of("car-8@t0", 0.0, 8.0, 0.1), row_of("car-8@t0.5", 0.04, 8.0, 0.2)]
    shares = shares_at(0.01, 8.0, fixed, speeds_of(fixed, AXIS))
    assert shares == pytest.approx({"car-8@t0": 0.75, "car-8@t0.5": 0.25})


@pytest.mark.parametrize(
    ("variety", "speed"), [(0.001, 8.0), (0.2, 8.0), (0.045, 2.0), (0.045, 14.0)]
)
def test_nothing_is_extrapolated(variety, speed):
    rows = [*fixed_rows(), row_of("dcar", variety, speed, 0.1)]
    (of,) = equal_variety(rows, counts_of(rows), AXIS, resamples=200)
    assert of.test is None
    assert not of.shares
    (said,) = missing([of])
    assert said.startswith("No fixed sizes of the variety and speed of dcar were compared")


def test_without_a_second_rendering_the_sentence_says_what_is_missing():
    rows = [row_of(row.method, None, row.tokens_per_pass, 0.1) for row in fixed_rows()]
    rows += [row_of("dcar", None, 9.0, 0.1), row_of("dcar@d1", None, 9.0, 0.1)]
    said = missing(equal_variety(rows, counts_of(rows), AXIS, resamples=200))
    assert len(said) == 1
    assert "give two seeds" in said[0]


def test_a_comparison_without_a_policy_or_fixed_sizes_says_nothing():
    for rows in (fixed_rows(), [row_of("dcar", 0.05, 9.0, 0.1)]):
        assert equal_variety(rows, counts_of(rows), AXIS) == []
