"""The pictures: WER against speed with the Pareto front, and why chunks end.

One family of methods is one line through its settings. What lies on the Pareto front is ringed: no other method is as
fast with fewer errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.methods.families import MethodName, group_families, parse_method, short_name
from eval.methods.registry import Style
from eval.report.listen import ink, shade
from eval.results.pareto import pareto_front, speed_axis
from eval.results.rows import Row
from eval.results.store import RESYNTHESIS

AXIS_LABELS = {
    "speedup_vs_far": "× FAR, end to end (batch 1)",
    "speedup_vs_car1": "× CAR-1, end to end (batch 1)",
    "tokens_per_pass": "tokens per forward pass of the decoder",
}
FRONT_COLOR = "#f2c94c"
DASHES = ["-", (0, (4, 1.5)), (0, (1.5, 1.5))]  # variants of one look: ssd, ssd@heads
KEPT, DROPPED = "#2f75b2", "#d9663a"
REASONS = "compare_reasons.png"
PLOTS = ("compare_speed.png", "compare.png")


def panels(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of this size in inches, and its panels [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=170, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for panel in panels.ravel():
        panel.grid(alpha=0.2, lw=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    return figure, panels


def draw_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what the rows allow; plots of an earlier run that they do not allow are removed. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PLOTS:
        (folder / name).unlink(missing_ok=True)
    axis = speed_axis(rows)
    if axis:
        plot_errors(rows, axis, folder / "compare_speed.png")
    plot_errors(rows, "tokens_per_pass", folder / "compare.png")
    return [folder / name for name in PLOTS if (folder / name).exists()]


@dataclass
class _Line:
    """One family on the axes."""

    name: MethodName
    settings: list[str]
    x: np.ndarray
    y: np.ndarray  # WER, %
    low: np.ndarray
    high: np.ndarray
    dashes: Any


def _lines(rows: Sequence[Row], axis: str) -> list[_Line]:
    lines: list[_Line] = []
    seen: dict[Style, int] = {}
    for family, members in group_families(rows).items():
        points = [r for r in members if r.get(axis) is not None]
        if not points:
            continue
        name = parse_method(family)
        seen[name.style] = seen.get(name.style, -1) + 1
        ends = 100 * np.array([r["wer_ci"] for r in points])
        lines.append(_Line(name, [parse_method(r["method"]).setting for r in points],
                           np.array([float(r[axis]) for r in points]), 100 * np.array([r["wer"] for r in points]),
                           ends[:, 0], ends[:, 1], DASHES[seen[name.style] % len(DASHES)]))
    return lines


def plot_errors(rows: Sequence[Row], axis: str, path: Path) -> None:
    """WER with 95 % intervals against `axis` (a key of AXIS_LABELS), a line per family, the Pareto front behind."""
    figure, [[axes]] = panels((8.4, 5.2))
    lines = _lines(rows, axis)
    x, y = np.concatenate([line.x for line in lines]), np.concatenate([line.y for line in lines])
    front = pareto_front(x.tolist(), y.tolist())
    # A staircase: at a speed between two points the slower one is no answer, the faster one is.
    axes.plot(x[front], y[front], color=FRONT_COLOR, lw=6, alpha=0.5, drawstyle="steps-pre", solid_capstyle="round",
              solid_joinstyle="round", zorder=1)
    for line in lines:
        style = line.name.style
        axes.vlines(line.x, line.low, line.high, color=style.color, lw=0.8, alpha=0.22, zorder=2)
        axes.plot(line.x, line.y, color=style.color, lw=1.4, ls=line.dashes, alpha=0.9, marker=style.marker,
                  ms=8 if style.is_star else 5.5, mec="white", mew=0.5, zorder=4, label=line.name.label)
        for i in {0, len(line.x) - 1} if len(line.x) > 1 else ():  # the ends of a sweep
            symbol = f"{style.symbol}=" if i == 0 and style.symbol else ""
            axes.annotate(f"{symbol}{line.settings[i]}", (line.x[i], line.y[i]), xytext=(5, 4), fontsize=7,
                          textcoords="offset points", color=style.color, zorder=6)
    axes.scatter(x[front], y[front], s=95, facecolors="none", edgecolors="#b8860b", linewidths=1.1, zorder=3)
    low, high = min(line.low.min() for line in lines), max(line.high.max() for line in lines)
    low, high = max(low, y.min() - 0.35 * np.ptp(y) - 1), min(high, y.max() + 0.25 * np.ptp(y) + 1)
    floor = next((100 * r["wer"] for r in rows if r["method"] == RESYNTHESIS), None)
    if floor is not None:
        far = 0.15 * (high - low)  # a line far away would squeeze the points
        where = " (below)" if floor <= low - far else " (above)" if floor >= high + far else ""
        text = f"recordings resynthesised from their tokens: {floor:.1f} %{where}"
        axes.text(0.995, {" (below)": 0.01, " (above)": 0.99}.get(where, floor), text, ha="right",
                  va="top" if where == " (above)" else "bottom", fontsize=7.5, color="#777777",
                  transform=axes.transAxes if where else axes.get_yaxis_transform())
        if not where:
            low, high = min(low, floor), max(high, floor)
            axes.axhline(floor, color="#999999", lw=1, ls=":", zorder=1)
    axes.set_ylim(max(0.0, low - 0.03 * (high - low)), high + 0.03 * (high - low))
    axes.margins(x=0.1)
    axes.set_xlabel(AXIS_LABELS[axis] + "  → faster")
    axes.set_ylabel("WER, %  (95 % interval)  ↓ better")
    axes.plot([], [], color=FRONT_COLOR, lw=7, alpha=0.55, marker="o", ms=9, mfc="none", mec="#b8860b",
              label="Pareto front: none is\nas fast with fewer errors")
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    figure.savefig(path)


def plot_reasons(reasons: Mapping[str, Any], path: Path) -> None:
    """A line a method: how often it kept how many tokens, and quartiles of log-probability and entropy of the last
    token that it kept and the first that it dropped."""
    found = {name: of for name, of in reasons.items() if of["decisions"]}
    figure, [[shares, likely, sure]] = panels((9.6, 1.3 + 0.55 * len(found)), 1, 3, sharey=True,
                                               width_ratios=(1.25, 1, 1))
    for row, of in enumerate(found.values()):
        left = 0.0
        for entry in of["sizes"]:
            width = 100 * entry["share"]
            shares.barh(row, width, left=left, height=0.62, color=shade(entry["size"]), edgecolor="white", lw=0.6)
            if width >= 7:
                shares.text(left + width / 2, row, str(entry["size"]), ha="center", va="center", fontsize=8,
                            color=ink(entry["size"]))
            left += width
        for panel, feature in ((likely, "drawn"), (sure, "entropy")):
            for place, side, color in ((row - 0.15, "kept", KEPT), (row + 0.15, "dropped", DROPPED)):
                if of[side]:
                    low, middle, high = of[side][feature]
                    panel.hlines(place, low, high, color=color, lw=5, alpha=0.4)
                    panel.plot(middle, place, "o", color=color, ms=5)
    shares.set(xlim=(0, 100), yticks=range(len(found)), yticklabels=list(map(short_name, found)),
               ylim=(len(found) - 0.45, -0.55))
    shares.set_xlabel("chunks of so many tokens, %")
    likely.set_xlabel("log-probability of the token, nats\nlikelier →")
    sure.set_xlabel("entropy of its head, nats\n← surer")
    likely.plot([], [], "o", color=KEPT, label="last kept")
    likely.plot([], [], "o", color=DROPPED, label="first dropped")
    figure.legend(*likely.get_legend_handles_labels(), frameon=False, fontsize=8.5, loc="outside upper right", ncols=2)
    for panel in (shares, likely, sure):
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", length=0)
        panel.xaxis.label.set_fontsize(8.5)
        panel.grid(visible=False, axis="y")
    figure.savefig(path)


def draw_reasons(reasons: Mapping[str, Any], folder: Path) -> None:
    """The picture where there is something to draw; that of an earlier comparison is removed."""
    (folder / REASONS).unlink(missing_ok=True)
    if any(of["decisions"] for of in reasons.values()):
        plot_reasons(reasons, folder / REASONS)
