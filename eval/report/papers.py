"""Our measured rows beside the papers': the same method, model and machine named on both sides.

Absolute error rates of different models, voices and recognisers do not compare. What may compare is what a method
does to its own baseline, so every number also stands relative to one-token decoding on the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from eval.methods.families import parse_method
from eval.results.rows import Row
from eval.results.store import RESYNTHESIS


@dataclass(frozen=True)
class Result:
    """A row of a paper's table. method: the row of a comparison that does the same, or only its family where the paper
    does not give the setting; name: as the paper calls it."""

    method: str
    name: str
    wer: float  # %
    speedup: float | None = None  # against the setup's baseline
    cer: float | None = None  # %
    tokens_per_pass: float | None = None
    derived: bool = False  # the speed-up is a ratio of printed times, computed here


@dataclass(frozen=True)
class Setup:
    """A table and what stands behind it. speed_baseline and wer_baseline name the rows of a comparison that play the
    part of the paper's own baselines; baseline_wer is what the paper printed for the latter."""

    paper: str
    table: str
    model: str
    data: str
    recognizer: str
    machine: str
    speed_baseline: str
    wer_baseline: str
    baseline_name: str
    baseline_wer: float
    results: tuple[Result, ...]
    remarks: tuple[str, ...] = ()


def _result(times: tuple[float, float] | None = None, **entry: Any) -> Result:
    return Result(**entry, speedup=times[0] / times[1], derived=True) if times else Result(**entry)


def _setup(results: list[dict[str, Any]], remarks: list[str] | None = None, **entry: Any) -> Setup:
    return Setup(**entry, results=tuple(_result(**r) for r in results), remarks=tuple(remarks or ()))


SETUPS = tuple(_setup(**entry) for entry in yaml.safe_load(
    (files("eval.report") / "paper_results.yaml").read_text(encoding="utf-8")))
"""What the papers report: `paper_results.yaml`, the only place of the project that holds these figures."""


def beside_papers(rows: Sequence[Row]) -> list[tuple[Setup, list[tuple[Result, Row]]]]:
    """The tables with a method of this comparison, and of each the results with the row that does the same: of the same
    setting, where the paper gives one, and as much of the rest of its name as there is."""
    found = []
    for setup in SETUPS:
        pairs = [(result, row) for result in setup.results if (row := _alike(result, rows)) is not None]
        if pairs:
            found.append((setup, pairs))
    return found


def _alike(result: Result, rows: Sequence[Row]) -> Row | None:
    wanted = parse_method(result.method)
    names = [(parse_method(row["method"]), row) for row in rows if row["kind"] == "method"]
    alike = [(name, row) for name, row in names
             if name.kind == wanted.kind and (not wanted.settings or name.settings == wanted.settings)]
    # the papers sample all methods alike: rows of the common sampling first
    best = max(alike, key=lambda pair: (not pair[0].sampling, *(word in pair[0].words for word in wanted.words)),
               default=None)
    return best and best[1]


def conditions(result: dict[str, Any]) -> str:
    """What stands behind our numbers, in a line."""
    corpus = result.get("corpus", {}).get("corpus", {})
    data = f"{corpus.get('kind', 'unknown')} corpus" + (" (two hours of synthetic speech)"
                                                        if corpus.get("kind") == "starter" else "")
    seeds = len(result["seeds"])
    return (f"decoder of {result['parameters'] / 1e6:.1f} M parameters with {result['heads']} heads"
            + (f", {result['codes']} codes" if result.get("codes") else "")
            + f"; {data}, {result['utterances']} utterances, {seeds} seed{'s' if seeds > 1 else ''}; recogniser "
              f"{result['asr']}; {result['device']}, batch 1")


FLOOR = ("The vocoder and the recogniser alone make {:.1f} % here (recordings resynthesised from their tokens), which "
         "no method can undercut by much and which pulls ratios of error rates towards 1.")


def general_remarks(result: dict[str, Any]) -> list[str]:
    """Why our absolute numbers differ from every paper's."""
    floor = next((row["wer"] for row in result["rows"] if row["method"] == RESYNTHESIS), None)
    return ["Error rates of different models, voices and recognisers do not compare; compare the columns “÷ base”.",
            *([] if floor is None else [FLOOR.format(100 * floor)])]


HEAD = ["there", "WER %", "÷ base", "×", "tok/pass", "here", "WER %", "÷ base", "×", "tok/pass"]
LEGEND = ("÷ base: WER divided by that of the baseline. ×: speed-up of the language model against it; * ratio of times "
          "that the paper prints, computed here. here: the row of the same setting, or the nearest in name.")


def cells(setup: Setup, result: Result, row: Row, rows: Sequence[Row]) -> list[str]:
    """The table cells of a result and the row beside it, under HEAD."""
    def number(value: float | None, mark: str = "") -> str:
        return "–" if value is None else f"{value:.2f}{mark}"

    base = next((r["wer"] for r in rows if r["method"] == setup.wer_baseline), None)
    speed = row.get(f"lm_speedup_vs_{setup.speed_baseline.replace('-', '')}")
    return [result.name, number(result.wer), number(result.wer / setup.baseline_wer),
            number(result.speedup, "*" if result.derived else ""), number(result.tokens_per_pass),
            row["method"], number(100 * row["wer"]), number(row["wer"] / base if base else None), number(speed),
            number(row["tokens_per_pass"])]


def setup_texts(setup: Setup) -> tuple[str, str]:
    """What stands behind a table of a paper: its model and data, and the baselines on both sides."""
    return (f"there: {setup.model}; {setup.data}; WER by {setup.recognizer}; {setup.machine}",
            f"baseline: {setup.baseline_name} ({setup.baseline_wer} %); here {setup.wer_baseline} for WER, "
            f"{setup.speed_baseline} for speed")
