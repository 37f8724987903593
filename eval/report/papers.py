"""Our measured rows next to the papers': the same method, with model and machine named on both
sides.

Absolute error rates of different models, voices and recognisers do not compare. What may compare is
a method's effect on its own baseline, so every number is also given relative to one-token decoding
on the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from dcar.config.read import load_yaml
from eval.methods.families import parse_method
from eval.report.blocks import Folded, Section, Table
from eval.report.table import corpus_kind, number
from eval.results.rows import Row
from eval.results.store import RESYNTHESIS

Printed = dict[str, Any]  # a table of a paper, or a row of it
SETUPS: list[Printed] = load_yaml(
    (files("eval.report") / "paper_results.yaml").read_text(encoding="utf-8")
)
"""Results of the papers, from `paper_results.yaml`, the only file of the project that contains
these figures."""


def speedup(result: Printed) -> float | None:
    """Return the speed-up against the table's baseline, as printed or as a ratio of printed
    times; None if the paper has neither."""
    return result["times"][0] / result["times"][1] if "times" in result else result.get("speedup")


def beside_papers(rows: Sequence[Row]) -> list[tuple[Printed, list[tuple[Printed, Row]]]]:
    """Return the tables with a method of this comparison, and for each result the row of the
    same method: with the same setting, if the paper gives one, and the best match of the rest of
    its name."""
    found = []
    for setup in SETUPS:
        pairs = [
            (result, row)
            for result in setup["results"]
            if (row := _alike(result, rows)) is not None
        ]
        if pairs:
            found.append((setup, pairs))
    return found


def _alike(result: Printed, rows: Sequence[Row]) -> Row | None:
    wanted = parse_method(result["method"])
    names = [(parse_method(row["method"]), row) for row in rows if row["kind"] == "method"]
    alike = [
        (name, row)
        for name, row in names
        if name.kind == wanted.kind and (not wanted.settings or name.settings == wanted.settings)
    ]
    # the papers sample all methods alike: rows of the common sampling first
    best = max(
        alike,
        key=lambda pair: (not pair[0].sampling, *(word in pair[0].words for word in wanted.words)),
        default=None,
    )
    return best and best[1]


HEAD = ["there", "WER %", "÷ base", "×", "tok/pass", "here", "WER %", "÷ base", "×", "tok/pass"]
LEGEND = (
    "there: the paper's result. here: the row of this comparison with the same setting, or the one "
    "with the nearest name. ÷ base: WER divided by that of the baseline. ×: speed-up of the "
    "language model over the baseline; * computed here from times that the paper prints."
)


def cells(setup: Printed, result: Printed, row: Row, rows: Sequence[Row]) -> list[str]:
    """Return the table cells of a result and its row, under HEAD."""
    base = next((r["wer"] for r in rows if r["method"] == setup["wer_baseline"]), None)
    speed = row.get(f"lm_speedup_vs_{setup['speed_baseline'].replace('-', '')}")
    return [
        result["name"],
        number(result["wer"]),
        number(result["wer"] / setup["baseline_wer"]),
        number(speedup(result)) + ("*" if "times" in result else ""),
        number(result.get("tokens_per_pass")),
        row["method"],
        number(100 * row["wer"]),
        number(row["wer"] / base if base else None),
        number(speed),
        number(row["tokens_per_pass"]),
    ]


def setup_text(setup: Printed) -> str:
    """Return the setup of a paper's table: its model and data, and the baselines on both sides."""
    return (
        "There: {model}; {data}; WER by {recognizer}; {machine}. Baseline: {baseline_name} "
        "({baseline_wer} %); "
        "here {wer_baseline} for WER, {speed_baseline} for speed."
    ).format(**setup)


def papers_section(result: dict[str, Any]) -> Section | None:
    """Return our numbers next to the papers', table by table, each folded; nothing if no paper
    has one of the methods."""
    tables = beside_papers(result["rows"])
    if not tables:
        return None
    kind, seeds = corpus_kind(result), len(result["seeds"])
    blocks: list[Any] = [
        f"Here: decoder of {result['parameters'] / 1e6:.1f} M parameters with {result['heads']} "
        f"heads, {result['codes']} codes; {kind} "
        f"corpus{' (synthetic speech)' if kind == 'starter' else ''}, {result['utterances']} "
        f"utterances, {seeds} seed{'s' if seeds > 1 else ''}; recogniser {result['asr']}; "
        f"{result['device']}, batch 1.",
        "Error rates of different models, voices and recognisers are not comparable; compare the "
        "columns “÷ base”.",
    ]
    blocks += [
        f"The vocoder and the recogniser alone make {100 * row['wer']:.1f} % errors here "
        "(recordings resynthesised from their tokens). No method can be much better, so this "
        "pulls ratios of error rates towards 1."
        for row in result["rows"]
        if row["method"] == RESYNTHESIS
    ]
    for setup, pairs in tables:
        table = Table(
            f"{setup['paper'].split()[0]}, {setup['table']}",
            HEAD,
            [cells(setup, theirs, ours, result["rows"]) for theirs, ours in pairs],
        )
        remarks = [setup["remarks"]] if "remarks" in setup else []
        blocks.append(
            Folded(f"{setup['paper']}, {setup['table']}", [setup_text(setup), table, *remarks])
        )
    return Section("Published results", [*blocks, LEGEND])
