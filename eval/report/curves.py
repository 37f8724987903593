"""Curves of a DCPO run in the report, from its log.jsonl."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcar.errors import DataError
from eval.report.blocks import Panels, Picture, Section, Text, data_uri
from eval.results.store import read_jsonl

LABELS = {"reward_sampled": "sampled by the policy", "reward_forced": "forced sizes", "eval_wer": "greedy",
          "eval_wer_sampled": "sampled"}


def curves_section(log: Sequence[dict[str, Any]]) -> Section | None:
    """The panels that the log can fill; nothing without a log."""
    curves = training_plots(log)
    return Section("Training of the policy (DCPO)", [
        Panels([Picture(title, data_uri(png, "image/png"), wide=False) for title, png in curves]),
        Text("Thin: as logged; thick: running mean. Forced rollouts follow a fixed chunk size of the guidance range; "
             "sampled ones follow the policy. The policy exceeds its guides where the sampled curve passes the forced "
             "one.")]) if curves else None


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
    """Panels (title, keys) that this log can fill: rewards of sampled and forced rollouts first."""
    keys = sorted({k for e in log for k in e})
    train = [k for k in keys if not k.startswith("eval")]
    reward = [k for k in train if "reward" in k and ("sampled" in k or "forced" in k) and "std" not in k]
    panels = [("reward", reward)]
    for title, word in (("tokens per pass", "tokens_per_pass"), ("entropy, nats", "entropy"), ("KL, nats", "kl")):
        panels.append((title, [k for k in train if k == word or k.endswith(("/" + word, "_" + word)) or
                               (word != "kl" and k.startswith(word))]))
    panels.append(("share of actions outside the range", [k for k in train if k == "out_of_range"]))
    panels.append(("dev WER (reward recogniser)", [k for k in keys if k in ("eval_wer", "eval_wer_sampled")]))
    return [(title, found) for title, found in panels if found]


def training_plots(log: Sequence[dict[str, Any]]) -> list[tuple[str, bytes]]:
    """(title, PNG) of every panel that the log can fill. Thin: as logged; thick: running mean."""
    from matplotlib.figure import Figure

    made = []
    for title, keys in curve_keys(log):
        figure = Figure(figsize=(4.4, 3.0), dpi=170, layout="constrained")
        axes = figure.subplots()
        for key in keys:
            steps, values = series(log, key)
            color = "#3b6fb6" if len(keys) > 1 and "sampled" not in key else "#c8442b"
            axes.plot(steps, values, lw=0.8, alpha=0.35, color=color)
            window = max(1, len(values) // 15)
            pieces = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
            axes.plot(steps, [sum(p) / len(p) for p in pieces], lw=1.8, color=color, label=LABELS.get(key, key))
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(keys) > 1:
            axes.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        made.append((title, buffer.getvalue()))
    return made
