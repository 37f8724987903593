"""Folded sections of the report: equal speed, length, acceptance, variety."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.methods.families import group_families
from eval.report.blocks import Cell, Folded, Picture, Section, Table, file_uri
from eval.report.table import (
    Column,
    binned_table,
    filled_columns,
    lively_columns,
    lively_rows,
    main_columns,
    pass_columns,
    rival_sentences,
    table_of,
)
from eval.results.pareto import SPEED_AXES, front_rows, sentence, speed_axis
from eval.results.rows import Row

SPEED_NOTE = (
    "A family is interpolated linearly between its measured settings. Two families are compared in "
    "the middle of the range of speeds that both reach, and on average over this range. Intervals "
    "and p: paired bootstrap over utterances, with the speeds as measured."
)
MATRIX_NOTE = (
    "Percentage points of WER, row minus column, averaged over the shared speeds. Blue: the row "
    "makes fewer errors; red: it makes more; bold: p < 0.05 (expected by chance for one pair in "
    "twenty). ·: no shared speed. Intervals are in the sentences above and in the tooltips."
)


def folded_sections(result: dict[str, Any], folder: Path) -> list[Section]:
    """Return all sections for which this comparison has data; `folder` holds its pictures."""
    rows = result["rows"]
    spoken = [r for r in rows if r["kind"] == "method"]
    verifying = spoken if any(r["accepted"] is not None for r in spoken) else []
    sections = (
        equal_speed_section(result),
        binned(
            "Errors by length of the utterance",
            result["by_length"],
            "of the utterances with this number of words in the text",
        ),
        binned("Errors by category", result["by_category"], "of the texts of a category"),
        chunk_section(rows, folder),
        rows_section("Passes and acceptance", pass_columns(spoken), verifying),
        rows_section(
            "Variety",
            lively_columns(spoken),
            lively_rows(rows),
            "Fewer errors at a low temperature come with less variety: choose by both figures.",
        ),
    )
    return [section for section in sections if section]


def rows_section(
    title: str, columns: Sequence[Column], rows: Sequence[Row], *texts: str
) -> Section | None:
    """Return a table of the columns that have values, with texts under it; nothing without rows."""
    if not rows:
        return None
    return Section(title, [table_of(title, filled_columns(columns, rows), rows), *texts])


def binned(title: str, errors: dict[str, Any] | None, which: str) -> Section | None:
    """Return error rates by bin; nothing if there are fewer than two bins."""
    if not errors:
        return None
    note = f"WER in % {which}; n: number of utterances. Intervals: bootstrap over utterances."
    return Section(title, [binned_table(title, errors), note])


def texts_section(measured: dict[str, Any]) -> Section:
    """Return rows and comparison at equal speed of a further set of texts."""
    title, rows = measured["title"].capitalize(), measured["rows"]
    categories = binned(
        f"{title}, errors by category",
        measured["by_category"],
        "of the texts of a category",
    )
    return Section(
        title,
        [
            table_of(title, main_columns(rows), rows),
            rival_sentences(rows, measured["equal_speed"]),
            *(categories.blocks if categories else ()),
        ],
    )


def chunk_section(rows: Sequence[Row], folder: Path) -> Section | None:
    """Return WER against tokens per pass, if the picture of the summary is against the measured
    speed."""
    if not speed_axis(rows):
        return None
    title = "Errors against chunk size"
    front = ", ".join(r["method"] for r in front_rows(rows, "tokens_per_pass"))
    return Section(
        title,
        [
            Picture(
                title,
                file_uri(folder / "compare.png"),
                (
                    "Tokens per pass do not depend on the machine, and do not include the cost of "
                    f"drafting and verifying. Pareto front, from slow to fast: {front}."
                ),
            )
        ],
    )


def equal_speed_section(result: dict[str, Any]) -> Section | None:
    """Return the comparison at equal speed: sentences against fixed chunks and the policy, all
    pairs as a matrix, then in words."""
    pairs = result["equal_speed"]
    if not pairs:
        return None
    blocks: list[Any] = [SPEED_NOTE, rival_sentences(result["rows"], pairs)]
    for axis in dict.fromkeys(p["axis"] for p in pairs):
        chosen = [p for p in pairs if p["axis"] == axis]
        title = f"At equal {SPEED_AXES[axis][0]}"
        blocks += [
            matrix(title, chosen, [f.label for f in group_families(result["rows"])]),
            Folded(
                f"All {len(chosen)} pairs {title[0].lower()}{title[1:]}",
                [[sentence(p) for p in chosen]],
            ),
        ]
    return Section("Comparison at equal speed", [*blocks, MATRIX_NOTE])


def matrix(title: str, pairs: Sequence[dict[str, Any]], families: Sequence[str]) -> Table:
    """Return mean WER differences of all pairs of families, row minus column."""
    by_sides = {(p["a"], p["b"]): p for p in pairs}
    present = [f for f in families if any(f in key for key in by_sides)]
    return Table(
        title,
        ["row − column", *present],
        [[a, *(_difference(by_sides, a, b) for b in present)] for a in present],
        look="matrix",
    )


def _difference(by_sides: dict[tuple[str, str], dict[str, Any]], row: str, column: str) -> Cell:
    if row == column:
        return Cell("")
    if (row, column) in by_sides:
        pair, sign = by_sides[row, column], 1
    else:
        pair, sign = by_sides[column, row], -1
    if pair["shared"] is None:
        return Cell("·", "none", "no shared speed")
    mean = pair["average"]
    points = 100 * sign * mean["difference"]
    if mean["ci"] is None:
        hint = "too few utterances for an interval"
    else:
        low, high = sorted(100 * sign * v for v in mean["ci"])
        hint = f"{low:+.1f} to {high:+.1f}, p = {mean['p']:.3f}".replace("-", "−")
    if abs(points) < 0.05:  # rounds to 0.0
        text, look = "0.0", "even"
    else:
        text, look = f"{points:+.1f}".replace("-", "−"), "better" if points < 0 else "worse"
        if mean["p"] is not None and mean["p"] < 0.05:
            look += " sure"
    return Cell(text, look, hint)
