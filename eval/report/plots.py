"""The pictures of a comparison: WER against speed with the Pareto front, and acceptance by position.

One family of methods is one line through its settings, labelled once. What lies on the Pareto front is ringed: no
other method is as fast with fewer errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from eval.methods.families import MethodName, group_families, parse_method
from eval.methods.registry import Style
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
SIDES = [(1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, -1), (-1, 0)]  # of a point, where its name may stand
ACROSS, ALONG = {1: "left", 0: "center", -1: "right"}, {1: "bottom", 0: "center", -1: "top"}
PLOTS = ("compare_speed.png", "compare.png", "compare_acceptance.png")


def draw_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what the rows allow; plots of an earlier run that they do not allow are removed. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PLOTS:
        (folder / name).unlink(missing_ok=True)
    axis = speed_axis(rows)
    if axis:
        plot_errors(rows, axis, folder / "compare_speed.png")
    plot_errors(rows, "tokens_per_pass", folder / "compare.png")
    plot_acceptance(rows, folder / "compare_acceptance.png")
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 5.2), dpi=200, layout="constrained")
    axes = figure.subplots()
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
                  ms=8 if style.is_star else 5.5, mec="white", mew=0.5, zorder=4)
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
    axes.grid(alpha=0.2, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.plot([], [], color=FRONT_COLOR, lw=7, alpha=0.55, marker="o", ms=9, mfc="none", mec="#b8860b",
              label="Pareto front: none is as fast with fewer errors")
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.1)
    _label(figure, axes, lines)
    figure.savefig(path)


def _label(figure: Any, axes: Any, lines: Sequence[_Line]) -> None:
    """Name each line once, and the ends of its sweep, where the text covers as little as possible."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2.2, foreground="white")]
    figure.canvas.draw()
    points = np.concatenate([axes.transData.transform(np.column_stack([line.x, line.y])) for line in lines])
    # lines as dots, so that a name does not lie on a line either
    dots = [axes.transData.transform(np.column_stack([
        np.interp(np.linspace(0, len(line.x) - 1, 12 * len(line.x)), np.arange(len(line.x)), v)
        for v in (line.x, line.y)])) for line in lines if len(line.x) > 1]
    obstacles = np.concatenate([points, *dots])
    weights = np.concatenate([np.full(len(points), 30.0), np.ones(len(obstacles) - len(points))])
    taken: list[Any] = []

    def cost(box: Any) -> float:
        grown = box.expanded(1.04, 1.15)
        inside = ((obstacles[:, 0] > grown.x0) & (obstacles[:, 0] < grown.x1)
                  & (obstacles[:, 1] > grown.y0) & (obstacles[:, 1] < grown.y1))
        frame = axes.bbox
        outside = box.x0 < frame.x0 or box.x1 > frame.x1 + 40 or box.y0 < frame.y0 or box.y1 > frame.y1
        return float((inside * weights).sum()) + 40 * sum(grown.overlaps(b) for b in taken) + 60 * outside

    def place(text: str, anchors: Sequence[tuple[float, float]], color: str, size: float, reach: Sequence[int],
              bold: bool) -> None:
        note = axes.annotate(text, anchors[0], xytext=(0, 0), textcoords="offset points", fontsize=size, color=color,
                             path_effects=halo, zorder=6, fontweight="bold" if bold else "normal")

        def put(order: int, far: int, side: tuple[int, int]) -> float:
            note.xy = anchors[order]
            note.set(position=(far * side[0], far * side[1]), ha=ACROSS[side[0]], va=ALONG[side[1]])
            return cost(note.get_window_extent()) + 0.15 * far + 0.5 * order

        best = min(product(range(len(anchors)), reach, SIDES), key=lambda where: put(*where))
        put(*best)
        far = best[1]
        taken.append(note.get_window_extent())
        if far > reach[0]:  # a thin leader where the name stands away from its point
            axes.annotate("", note.xy, xytext=note.get_position(), textcoords="offset points", zorder=5,
                          arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.7, "shrinkA": 0,
                                      "shrinkB": 3})

    for line in sorted(lines, key=lambda each: len(each.x)):  # a point alone has the fewest places for a name
        anchors = list(zip(line.x, line.y, strict=True))
        order = [anchors[-1], anchors[0], *anchors[1:-1]]
        place(line.name.label, order, line.name.style.color, 8.5, (6, 11, 17, 25, 35, 48), True)
    for line in lines:
        if len(line.x) > 1:
            for i in (0, -1):
                symbol = f"{line.name.style.symbol}=" if i == 0 and line.name.style.symbol else ""
                place(f"{symbol}{line.settings[i]}", [(line.x[i], line.y[i])], line.name.style.color, 6.5,
                      (4, 7, 10), False)


def plot_acceptance(rows: Sequence[Row], path: Path) -> None:
    """Share of drafted tokens accepted, by position: a panel per verifying family, a line per setting."""
    from matplotlib.figure import Figure

    families = {f: [r for r in members if r.get("acceptance_by_position")]
                for f, members in group_families(rows).items()}
    families = {f: members for f, members in families.items() if members}
    if not families:
        return
    columns = min(3, len(families))
    height = -(-len(families) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.4, 2.2 * height + 0.2), dpi=200, layout="constrained")
    panels = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False).ravel()
    longest = max(p["position"] for members in families.values() for r in members for p in r["acceptance_by_position"])
    for panel, (family, members) in zip(panels, families.items(), strict=False):
        name = parse_method(family)
        for i, row in enumerate(members):
            positions = [p["position"] for p in row["acceptance_by_position"]]
            rates = [100 * p["rate"] for p in row["acceptance_by_position"]]
            strength = 1.0 if len(members) == 1 else 0.35 + 0.65 * i / (len(members) - 1)
            panel.plot(positions, rates, color=name.style.color, alpha=strength, marker="o", ms=3.5, lw=1.5)
            if len(members) > 1 and i in (0, len(members) - 1):
                panel.annotate(f"{name.style.symbol}={parse_method(row['method']).setting}", (positions[-1], rates[-1]),
                               xytext=(5, 0), textcoords="offset points", va="center", fontsize=7,
                               color=name.style.color)
        panel.set_title(name.label, fontsize=9.5, color=name.style.color, fontweight="bold")
        panel.set_ylim(0, 103)
        panel.set_xlim(0.7, longest + 0.9)
        panel.set_xticks(range(1, longest + 1))
        panel.grid(alpha=0.2, lw=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8, labelbottom=True)
    for panel in panels[len(families):]:
        panel.set_visible(False)
    figure.supxlabel("position in the draft", fontsize=9)
    figure.supylabel("accepted of those judged, %", fontsize=9)
    figure.savefig(path)
