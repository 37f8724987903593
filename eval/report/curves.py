"""Curves of a DCPO run in the report, from its log.jsonl."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcar.errors import DataError
from eval.report.blocks import Picture, Section, data_uri
from eval.report.plots import panels
from eval.results.store import read_jsonl

PANELS = {"reward": ("reward_forced", "reward_sampled"), "tokens a pass": ("tokens_per_pass",),
          "entropy, nats": ("entropy",), "KL, nats": ("kl",), "share of actions outside the range": ("out_of_range",),
          "dev WER (reward recogniser)": ("eval_wer", "eval_wer_sampled")}
LABELS = {"reward_sampled": "sampled by the policy", "reward_forced": "forced sizes", "eval_wer": "greedy",
          "eval_wer_sampled": "sampled"}


def read_log(path: Path) -> list[dict[str, Any]]:
    """Lines of a trainer's log.jsonl; an incomplete last line of a running job is left out. DataError without a log."""
    if not path.is_file():
        raise DataError(f"{path}: cannot read the training log, there is no such file")
    return list(read_jsonl(path, "line of the log"))


def series(log: Sequence[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of one logged quantity; of a step the first (a run ends with a second evaluation, of its best
    checkpoint, not of its last step)."""
    found: dict[float, float] = {}
    for i, e in enumerate(log):
        if isinstance(e.get(key), int | float) and not isinstance(e.get(key), bool):
            found.setdefault(float(e.get("step", i)), float(e[key]))
    return list(found), list(found.values())


def curve_keys(log: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Panels (title, keys) that this log can fill."""
    logged = {key for entry in log for key in entry}
    found = [(title, [key for key in keys if key in logged]) for title, keys in PANELS.items()]
    return [(title, keys) for title, keys in found if keys]


def curves_section(log: Sequence[dict[str, Any]]) -> Section | None:
    """The panels that the log can fill; nothing without a log."""
    pictures = []
    for title, keys in curve_keys(log):
        figure, [[axes]] = panels((4.4, 3.0))
        for key in keys:
            steps, values = series(log, key)
            color = "#3b6fb6" if len(keys) > 1 and "sampled" not in key else "#c8442b"
            axes.plot(steps, values, lw=0.8, alpha=0.35, color=color)
            window = max(1, len(values) // 15)
            pieces = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
            axes.plot(steps, [sum(p) / len(p) for p in pieces], lw=1.8, color=color, label=LABELS.get(key, key))
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        if len(keys) > 1:
            axes.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        pictures.append(Picture(title, data_uri(buffer.getvalue(), "image/png"), wide=False))
    return Section("Training of the policy (DCPO)", [
        tuple(pictures),
        "Thin: as logged; thick: running mean. Forced rollouts follow a fixed chunk size of the guidance range; "
        "sampled ones follow the policy. The policy exceeds its guides where the sampled curve passes the forced one."
    ]) if pictures else None
