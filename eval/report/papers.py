"""Our measured rows beside the papers': the same method, model and machine named on both sides, and why they differ.

Absolute error rates of different models, voices and recognisers do not compare. What may compare is what a method
does to its own baseline, so every number also stands relative to one-token decoding on the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from eval.methods.families import MethodName, parse_method
from eval.results.rows import Row
from eval.results.store import RESYNTHESIS

MARGIN = 0.05  # speed-ups within 5 % of 1 count as no change


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


@dataclass(frozen=True)
class Side:
    """One method on one model, relative to that model's baseline: WER as a ratio, speed-up as a factor."""

    wer: float  # fraction
    relative_wer: float | None
    speedup: float | None
    tokens_per_pass: float | None

    @property
    def pass_cost(self) -> float | None:
        """What a pass costs, drafting included, in passes of the baseline (of one token each)."""
        return self.tokens_per_pass / self.speedup if self.tokens_per_pass and self.speedup else None


@dataclass(frozen=True)
class Match:
    """A paper's result and the row of this comparison that stands for it; `how` says why this row."""

    result: Result
    theirs: Side
    row: Row
    ours: Side
    how: str
    p: float | None  # of our WER against our baseline


@dataclass(frozen=True)
class Block:
    """One table of a paper with its matches."""

    setup: Setup
    matches: list[Match]


def beside_papers(rows: Sequence[Row]) -> list[Block]:
    """The tables of which at least one method is in the comparison."""
    blocks = []
    for setup in SETUPS:
        matches = [m for result in setup.results if (m := _match(setup, result, rows)) is not None]
        if matches:
            blocks.append(Block(setup, matches))
    return blocks


def _match(setup: Setup, result: Result, rows: Sequence[Row]) -> Match | None:
    wanted = parse_method(result.method)
    candidates = [r for r in rows if r["kind"] == "method" and parse_method(r["method"]).kind == wanted.kind]
    # the papers sample all methods alike: rows of the common sampling, where there are some
    candidates = [r for r in candidates if not parse_method(r["method"]).sampling] or candidates
    if not candidates:
        return None
    row, how = _nearest(setup, result, wanted, candidates)
    speed = f"lm_speedup_vs_{setup.speed_baseline.replace('-', '')}"
    baseline = next((r for r in rows if r["method"] == setup.wer_baseline), None)
    test = f"p_vs_{setup.wer_baseline.replace('-', '')}"
    ours = Side(row["wer"], row["wer"] / baseline["wer"] if baseline and baseline["wer"] else None, row.get(speed),
                row["tokens_per_pass"])
    theirs = Side(result.wer / 100, result.wer / setup.baseline_wer, result.speedup, result.tokens_per_pass)
    return Match(result, theirs, row, ours, how, row.get(test))


def _nearest(setup: Setup, result: Result, wanted: MethodName, candidates: Sequence[Row]) -> tuple[Row, str]:
    """The row of the same setting; else the nearest setting; where the paper gives none, the nearest in speed."""
    exact = [r for r in candidates if parse_method(r["method"]).settings == wanted.settings]
    if exact and (wanted.settings or len(candidates) == 1):
        row = min(exact, key=lambda r: (_lacks(r, wanted, ("eos",)) != [], _lacks(r, wanted) != []))
        missing = "".join(f", without -{word}" for word in _lacks(row, wanted, ("eos",)))
        return row, ("same setting" if wanted.settings else "only one") + missing
    if wanted.settings:
        numbers = [(r, parse_method(r["method"]).settings) for r in candidates]
        near = [(abs(s[0] - wanted.settings[0]), r) for r, s in numbers  # type: ignore[operator]
                if s and isinstance(s[0], float)]
        if near:
            return min(near, key=lambda pair: pair[0])[1], "nearest setting"
    if result.tokens_per_pass is not None:
        tokens = result.tokens_per_pass
        return min(candidates, key=lambda r: abs(r["tokens_per_pass"] - tokens)), "nearest in tokens a pass"
    speed = f"lm_speedup_vs_{setup.speed_baseline.replace('-', '')}"
    timed = [r for r in candidates if r.get(speed) is not None]
    if timed and result.speedup is not None:
        target = result.speedup
        return min(timed, key=lambda r: abs(r[speed] - target)), "nearest in speed-up"
    return candidates[0], "first of several"


def _lacks(row: Row, wanted: MethodName, among: Sequence[str] | None = None) -> list[str]:
    """Words of the paper's method (of those in `among`) that the row's name has not."""
    found = parse_method(row["method"]).words
    return [word for word in wanted.words if word not in found and (among is None or word in among)]


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


def verdict(match: Match) -> str:
    """Where the two sides agree and where not, in a sentence that follows from the numbers."""
    parts = []
    a, b = match.theirs.speedup, match.ours.speedup
    if a is not None and b is not None:
        parts.append(f"{_direction(a, 'faster', 'slower')} there, {_direction(b, 'faster', 'slower')} here")
    a, b = match.theirs.relative_wer, match.ours.relative_wer
    if a is not None and b is not None and not (a == 1 and b == 1):
        chance = "" if match.p is None or match.p <= 0.05 else ", which could be chance"
        parts.append(f"{_errors(a)} there, {_errors(b)} here{chance}")
    cost_theirs, cost_ours = match.theirs.pass_cost, match.ours.pass_cost
    if cost_ours is not None:
        rate = match.row.get("acceptance_rate")
        accepted = "" if rate is None else f" ({100 * rate:.0f} % of drafted tokens accepted)"
        there = "" if cost_theirs is None else f", there {cost_theirs:.2f}"
        parts.append(f"a pass yields {match.ours.tokens_per_pass:.2f} tokens here{accepted} and costs {cost_ours:.2f} "
                     f"plain passes{there}")
    return "; ".join(parts) or "nothing to hold beside it: what it is compared with was not spoken or timed here"


def _direction(factor: float, more: str, less: str) -> str:
    if abs(factor - 1) <= MARGIN:
        return f"as fast ({factor:.2f}×)"
    return f"{more if factor > 1 else less} ({factor:.2f}×)"


def _errors(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return "as many errors" if abs(change) < 0.5 else f"{abs(change):.0f} % {'more' if change > 0 else 'fewer'} errors"


def general_remarks(result: dict[str, Any]) -> list[str]:
    """Why our absolute numbers differ from every paper's, as far as this comparison itself shows it."""
    rows = {r["method"]: r for r in result["rows"]}
    out = ["Error rates of different models, voices and recognisers do not compare; compare the columns “÷ base”."]
    floor = rows.get(RESYNTHESIS)
    if floor is not None:
        out.append(f"The vocoder and the recogniser alone make {100 * floor['wer']:.1f} % here (recordings "
                   "resynthesised from their tokens), which no method can undercut by much and which pulls ratios of "
                   "error rates towards 1.")
    timed = [r for r in result["rows"] if r.get("lm_speedup_vs_car1") is not None]
    if timed:
        out.append("Speed-ups depend on what a pass costs: on a small decoder the heads, the draft and the bookkeeping "
                   "weigh more beside the trunk than on the papers' models, and on a CPU a pass over several tokens "
                   "costs more than one over a single token; “costs … plain passes” says how much more.")
    return out


HEAD = ["there", "WER %", "÷ base", "×", "tok/pass", "here", "WER %", "÷ base", "×", "tok/pass", "why this row"]
LEGEND = ("÷ base: WER divided by that of the baseline. ×: speed-up of the language model against it; * ratio of times "
          "that the paper prints, computed here. why this row: how a row of this comparison was found for the paper's.")


def cells(match: Match) -> list[str]:
    """The table cells of a match, under HEAD."""
    def side(of: Side, derived: bool) -> list[str]:
        return [f"{100 * of.wer:.2f}", "–" if of.relative_wer is None else f"{of.relative_wer:.2f}",
                "–" if of.speedup is None else f"{of.speedup:.2f}{'*' if derived else ''}",
                "–" if of.tokens_per_pass is None else f"{of.tokens_per_pass:.2f}"]

    return [match.result.name, *side(match.theirs, match.result.derived), match.row["method"],
            *side(match.ours, False), match.how]


def setup_texts(setup: Setup) -> tuple[str, str]:
    """What stands behind a table of a paper: its model and data, and the baselines on both sides."""
    return (f"there: {setup.model}; {setup.data}; WER by {setup.recognizer}; {setup.machine}",
            f"baseline: {setup.baseline_name} ({setup.baseline_wer} %); here {setup.wer_baseline} for WER, "
            f"{setup.speed_baseline} for speed")
