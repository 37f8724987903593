"""What the papers report: `paper_results.yaml`, the only place of the project that holds these figures."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml


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
