"""Folded sections of the report: equal speed, length, acceptance, variety."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.report.blocks import Cell, Folded, Picture, Section, Table, file_uri
from eval.report.table import (
    DETECTABLE,
    Column,
    binned_table,
    filled_columns,
    lively_columns,
    lively_rows,
    main_columns,
    pairs_table,
    pass_columns,
    rivals,
    table_of,
    variety_table,
)
from eval.results.equal_variety import missing
from eval.results.pareto import AXES, families_of, front_rows, signed_points, speed_axis
from eval.results.types import Bins, Measured, Pair, Result, Row

SPEED_NOTE = (
    "A family is interpolated linearly between its measured settings. Two families are compared on "
    "average over the speeds that both reach. Intervals and p: paired bootstrap over utterances, "
    f"with the speeds as measured. {DETECTABLE}"
)
MATRIX_NOTE = (
    "Percentage points of errors, row minus column, averaged over the shared speeds. Blue: the row "
    "makes fewer errors; red: it makes more; bold: p < 0.05 (expected by chance for one pair in "
    "twenty). ·: no shared speed. Intervals are in the tables and in the tooltips."
)


def folded_sections(result: Result, folder: Path) -> list[Section]:
    """Return all sections for which these comparisons have data; `folder` holds the pictures."""
    first, *others = result.comparisons
    sections = (
        *map(comparison_section, others),
        equal_speed_section(first),
        binned(
            "Errors by length of the utterance",
            first.by_length,
            "of the utterances with this number of words in the text",
        ),
        binned("Errors by category", first.by_category, "of the texts of a category"),
        chunk_section(first, folder),
        *(verifiers_section(of, "" if of is first else of.title) for of in result.comparisons),
        rows_section(
            "Variety",
            lively_columns(first.spoken),
            lively_rows(first),
            "Fewer errors at a low temperature come with less variety: choose by both figures.",
            *equal_variety_blocks(first, "At equal variety"),
        ),
    )
    return [section for section in sections if section]


def verifiers_section(measured: Measured, where: str) -> Section | None:
    """Return how a comparison's verifiers accepted drafts; nothing if none verified. where: words
    for the title."""
    if not any(row.acceptance for row in measured.spoken):
        return None
    title = ", ".join(filter(None, ("Passes and acceptance", where)))
    return rows_section(title, pass_columns(measured.spoken), measured.spoken)


def rows_section(
    title: str, columns: Sequence[Column], rows: Sequence[Row], *more: Any
) -> Section | None:
    """Return a table of the columns that have values, with more blocks under it; nothing without
    rows."""
    if not rows:
        return None
    return Section(title, [table_of(title, filled_columns(columns, rows), rows), *more])


def equal_variety_blocks(measured: Measured, title: str) -> list[Any]:
    """Return the table of policies and fixed sizes of the same variety, and what it lacks."""
    return [*filled(variety_table(title, measured)), missing(measured.equal_variety)]


def filled(table: Table) -> list[Table]:
    """Return a table that has rows, as a list; an empty list for another."""
    return [table] if table.rows else []


def binned(title: str, bins: Bins | None, which: str) -> Section | None:
    """Return error rates by bin; nothing if there are fewer than two bins."""
    if not bins:
        return None
    note = f"Errors in % {which}; n: number of utterances. Intervals: bootstrap over utterances."
    return Section(title, [binned_table(title, bins), note])


def comparison_section(measured: Measured) -> Section:
    """Return rows and comparison at equal speed of a further comparison."""
    title, rows = measured.title.capitalize(), measured.rows
    categories = binned(
        f"{title}, errors by category", measured.by_category, "of the texts of a category"
    )
    return Section(
        title,
        [
            table_of(title, main_columns(rows), rows),
            *filled(pairs_table(f"{title}, at equal speed", rivals(measured.pairs))),
            *equal_variety_blocks(measured, f"{title}, at equal variety"),
            *(categories.blocks if categories else ()),
        ],
    )


def chunk_section(measured: Measured, folder: Path) -> Section | None:
    """Return WER against tokens per pass, if the picture of the summary is against the measured
    speed."""
    if not speed_axis(measured.spoken):
        return None
    title = "Errors against chunk size"
    front = ", ".join(row.method for row in front_rows(measured.spoken, "tokens_per_pass"))
    caption = (
        "Tokens per pass do not depend on the machine, and do not include the cost of drafting and "
        f"verifying. Pareto front, from slow to fast: {front}."
    )
    return Section(title, [Picture(title, file_uri(folder / "compare.png"), caption)])


def equal_speed_section(measured: Measured) -> Section | None:
    """Return the comparison at equal speed: differences from fixed chunks and the policy, all pairs
    as a matrix, then with intervals."""
    if not measured.pairs:
        return None
    blocks: list[Any] = [
        SPEED_NOTE,
        *filled(pairs_table("Fixed sizes and policies at equal speed", rivals(measured.pairs))),
    ]
    for axis in dict.fromkeys(pair.axis for pair in measured.pairs):
        chosen = [pair for pair in measured.pairs if pair.axis == axis]
        title = f"At equal {AXES[axis].quantity}"
        blocks += [
            matrix(title, chosen, [family.label for family in families_of(measured)]),
            Folded(
                every := f"All {len(chosen)} pairs {title.lower()}", [pairs_table(every, chosen)]
            ),
        ]
    return Section("Comparison at equal speed", [*blocks, MATRIX_NOTE])


def matrix(title: str, pairs: Sequence[Pair], families: Sequence[str]) -> Table:
    """Return mean WER differences of all pairs of families, row minus column."""
    by_sides = {(pair.a.label, pair.b.label): pair for pair in pairs}
    present = [f for f in families if any(f in key for key in by_sides)]
    return Table(
        title,
        ["row − column", *present],
        [[a, *(_difference(by_sides, a, b) for b in present)] for a in present],
        look="matrix",
    )


def _difference(by_sides: dict[tuple[str, str], Pair], row: str, column: str) -> Cell:
    if row == column:
        return Cell("")
    if (row, column) in by_sides:
        pair, sign = by_sides[row, column], 1
    else:
        pair, sign = by_sides[column, row], -1
    test = pair.test
    if pair.shared is None or test is None:
        return Cell("·", "none", "no shared speed")
    points = 100 * sign * test.difference
    if test.ends is None or test.p_value is None:
        hint = "too few utterances for an interval"
    else:
        low, high = map(signed_points, sorted(sign * end for end in test.ends))
        hint = f"{low} to {high}, p = {test.p_value:.3f}"
    if abs(points) < 0.05:  # rounds to 0.0
        text, look = "0.0", "even"
    else:
        text = signed_points(sign * test.difference)
        look = "better" if points < 0 else "worse"
        if test.p_value is not None and test.p_value < 0.05:
            look += " sure"
    return Cell(text, look, hint)
