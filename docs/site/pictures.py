"""Draw the pictures of the documentation from the tables of docs/results.md.

    python docs/site/pictures.py

A picture shows those rows of the table under its heading that have both a WER and a speed.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parents[1]
INK, LINE, OURS = "#52514e", "#2a78d6", "#d6452a"
LEADER = {"arrowstyle": "-", "color": "#b5b3ac", "linewidth": 0.6}
Box = tuple[float, float, float, float]  # left, low, right, high
Points = list[tuple[float, float]]
NUMBER = re.compile(r"\**(\d+(?:\.\d+)?)\**")


def table(heading: str, number: int = 0) -> list[list[tuple[str, str]]]:
    """Return a table under a heading of docs/results.md, the first by default; a row is (column,
    cell), …."""
    text = (DOCS / "results.md").read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    if len(tables) <= number:
        raise SystemExit(f"docs/results.md has no such table under {heading!r}")
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tables[number].splitlines()
    )
    return [list(zip(head, row, strict=True)) for row in rows]


def points(heading: str, across: str, number: int = 0) -> list[tuple[str, float, float]]:
    """Return (name, speed, WER in %) of every row that has both; of columns with the same title,
    the first."""
    found = []
    for row in table(heading, number):
        cells = dict(reversed(row))
        words = next(cell for title, cell in row if title.endswith("WER %"))
        speed, errors = NUMBER.fullmatch(cells[across]), NUMBER.fullmatch(words)
        if speed and errors:
            found.append((re.sub(r"[*`]", "", row[0][1]), float(speed[1]), float(errors[1])))
    return found


def draw(
    heading: str, across: str, label: str, path: Path, size: tuple[float, float], also: str = ""
) -> None:
    """Draw one picture: fixed sizes as a line, DCAR in red, every point with its name. also: the
    heading of a table of fixed sizes at another temperature, a dashed line, and one of dials."""
    found = points(heading, across)
    figure, axes = plt.subplots(figsize=size, dpi=125)
    if also:
        cooler = points(also, across)
        temperature = table(also)[0][0][0].partition(",")[0]
        axes.plot([x for _, x, _ in cooler], [y for *_, y in cooler], "o--", color=LINE, alpha=0.5)
        found.append((f"CAR-16, {temperature}", *cooler[-1][1:]))
        dials = [point for point in points(also, across, 1) if point[0].startswith("dial")]
        found += [(f"DCAR, {name}", x, y) for name, x, y in dials]
    fixed = [(x, y) for name, x, y in found if re.fullmatch(r"CAR-\d+", name)]
    axes.plot(*zip(*fixed, strict=True), "-", color=LINE, linewidth=2, zorder=1)
    for name, x, y in found:
        ours = name.startswith("DCAR")
        color = LINE if name.startswith("CAR-") else INK
        if ours:
            color = OURS
        marker, markersize = ("*", 13) if ours else ("o", 6)
        axes.plot([x], [y], marker, markersize=markersize, color=color)
    axes.margins(x=0.22, y=0.08)
    finish(axes, label)
    figure.tight_layout()
    taken = [axes.transData.transform((x, y)) for _, x, y in found]
    boxes = [(x - 9, y - 9, x + 9, y + 9) for x, y in taken]
    # keep names off the line
    for (a, b), (c, d) in pairwise(axes.transData.transform(point) for point in fixed):
        steps = [i / 40 for i in range(41)]
        boxes += [
            (x - 4, y - 4, x + 4, y + 4)
            for x, y in ((a + (c - a) * t, b + (d - b) * t) for t in steps)
        ]
    for name, x, y in found:
        boxes.append(place(axes, name, (x, y), boxes))
    figure.savefig(path, dpi=125)
    plt.close(figure)


def finish(axes: Axes, label: str) -> None:
    """Name the axes, the one across by `label`, and draw the grid."""
    axes.set_xlabel(label, color=INK)
    axes.set_ylabel("word error rate, %", color=INK)
    axes.set_xlim(left=0)
    axes.grid(color="#e1e0d9", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def policies(number: int) -> tuple[dict[str, Points], dict[str, Points]]:
    """Return (tokens per pass, WER in %) of a table under "At equal variety": of fixed sizes by
    temperature, and of everything else by name, a policy's trainings together."""
    fixed: dict[str, Points] = {}
    others: dict[str, Points] = {}
    group = ""
    for row in table("At equal variety", number):
        cells = [cell.split("; ") for _, cell in row]
        names, errors, speeds = cells[0], *(list(map(float, cells[i])) for i in (1, 3))
        if names[0].startswith("CAR-") and "distilled" not in names[0]:
            for name, error in zip(names, errors, strict=True):
                temperature = name.removeprefix("at ") if " " in name else "T 1.0"
                fixed.setdefault(temperature, []).append((speeds[0], error))
            continue
        group = group if names[0].isdigit() else names[0].partition(", 1")[0]
        others.setdefault(group, []).extend(zip(speeds, errors, strict=True))
    return fixed, others


def draw_policies(path: Path) -> None:
    """Draw policies on both decoders, side by side: fixed sizes as a line for each temperature,
    the trainings of a policy as points of one kind."""
    figure, both = plt.subplots(1, 2, figsize=(10.5, 5.2), dpi=125, sharex=True, sharey=True)
    drawn = {}
    for axes, (title, number) in zip(both, PANELS.items(), strict=True):
        fixed, others = policies(number)
        for temperature, of in fixed.items():
            (drawn[f"CAR-k, {temperature}"],) = axes.plot(
                *zip(*of, strict=True), LINES[temperature], color=LINE
            )
        for name, of in others.items():
            marker, color = MARKERS[name]
            size = 11 if marker == "*" else 6
            (drawn[name],) = axes.plot(*zip(*of, strict=True), marker, markersize=size, color=color)
        finish(axes, "tokens per pass")
        axes.set_title(title, fontsize=10, color=INK)
    both[0].set_ylim(bottom=0)
    both[1].set_ylabel("")
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    names = [*(f"CAR-k, {temperature}" for temperature in LINES), *MARKERS]
    figure.legend(
        [drawn[name] for name in names],
        names,
        fontsize=8,
        frameon=False,
        ncols=3,
        loc="lower center",
    )
    figure.savefig(path, dpi=125)
    plt.close(figure)


def place(axes: Axes, name: str, at: tuple[float, float], boxes: list[Box]) -> Box:
    """Write a name next to its point where it covers the least of what is drawn already. Returns
    its box."""
    color = OURS if name.startswith("DCAR") else INK
    text = axes.annotate(
        name, at, xytext=(0, 0), textcoords="offset points", fontsize=8, color=color
    )
    size, inside = text.get_window_extent(), axes.bbox.padded(2)
    x, y = axes.transData.transform(at)
    text.remove()
    points, there = axes.figure.dpi / 72, np.array(boxes)
    best: tuple[float, tuple[int, int, int], Box] = float("inf"), (0, 0, 0), (0, 0, 0, 0)
    for distance in (10, 18, 30, 44, 64):
        for across, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            left = x + across * distance * points + (across - 1) / 2 * size.width
            low = y + up * distance * points + (up - 1) / 2 * size.height
            box = left, low, left + size.width, low + size.height
            common = np.minimum(there[:, 2:], box[2:]) - np.maximum(there[:, :2], box[:2])
            cost = 0.1 * distance + float(common.clip(min=0).prod(1).sum())
            if not inside.contains(*box[:2]) or not inside.contains(*box[2:]):
                cost += 1e6
            if cost < best[0]:
                best = cost, (distance, across, up), box
    distance, across, up = best[1]
    axes.annotate(
        name,
        at,
        xytext=(across * distance, up * distance),
        textcoords="offset points",
        fontsize=8,
        color=color,
        ha=("right", "center", "left")[across + 1],
        va=("top", "center", "bottom")[up + 1],
        arrowprops=LEADER if distance > 10 else None,
    )
    return best[2]


# the tables under "At equal variety", and how their rows are drawn
PANELS = {"a decoder trained on recordings": 1, "the distilled decoder": 0}
LINES = {"T 1.0": "o-", "T 0.8": "o--", "T 0.5": "o:", "T 0.4": "v"}
MARKERS = {
    "FAR": ("s", INK),
    "the paper's policy": ("D", INK),
    "ours, one candidate": ("*", OURS),
    "ours, one candidate, rewarded by word errors": ("^", OURS),
    "ours, four candidates": ("*", "#7a1f14"),
    "CAR-8 and CAR-12 of the distilled decoder, T 0.5": ("P", "#3d8b57"),
}
PICTURES = {
    "words.png": (
        "The shipped policies",
        "tokens/pass",
        "tokens per pass",
        (6.8, 4.4),
        "Against a lower temperature",
    ),
    "every_method.png": (
        "Every method",
        "× FAR",
        "times as fast as FAR, end to end",
        (7.4, 6.4),
        "",
    ),
}

if __name__ == "__main__":
    for name, (heading, across, label, size, also) in PICTURES.items():
        draw(heading, across, label, DOCS / "images" / name, size, also)
    draw_policies(DOCS / "images" / "policies.png")
