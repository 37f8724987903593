"""Pictures of the documentation, drawn from the tables of docs/results.md: python docs/site/pictures.py

A picture shows the rows of the table under its heading that have words and speed, and no others.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1]
INK, LINE, OURS = "#52514e", "#2a78d6", "#d6452a"
NUMBER = re.compile(r"\**(\d+(?:\.\d+)?)\**")


def table(heading: str) -> list[dict[str, str]]:
    """The first table under a heading of docs/results.md: a row is {column: cell}."""
    text = (DOCS / "results.md").read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", text, re.M)
    if lines is None:
        raise SystemExit(f"docs/results.md has no table under {heading!r}")
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


def points(heading: str, across: str) -> list[tuple[str, float, float]]:
    """(name, speed, WER in per cent) of every row that has both."""
    found = []
    for row in table(heading):
        speed, words = NUMBER.fullmatch(row[across]), NUMBER.fullmatch(row["WER %"])
        if speed and words:
            found.append((re.sub(r"[*`]", "", row["method"]), float(speed[1]), float(words[1])))
    return found


def draw(heading: str, across: str, label: str, path: Path, size: tuple[float, float]) -> None:
    """One picture: fixed sizes as a line, DCAR in red, every point named."""
    found = points(heading, across)
    figure, axes = plt.subplots(figsize=size)
    fixed = [(x, y) for name, x, y in found if name.startswith("CAR-")]
    axes.plot(*zip(*fixed, strict=True), "-", color=LINE, linewidth=2, zorder=1)
    places: list[tuple[float, float]] = []
    span = max(x for _, x, _ in found), max(y for _, _, y in found) - min(y for _, _, y in found)
    for name, x, y in sorted(found, key=lambda row: row[1:]):
        ours, on_line = name.startswith("DCAR"), name.startswith("CAR-")
        colour = OURS if ours else LINE if on_line else INK
        axes.plot([x], [y], "*" if ours else "o", markersize=13 if ours else 6, color=colour)
        below = any(abs(x - a) < 0.17 * span[0] and 0 <= y - b < 0.05 * span[1] for a, b in places)
        left = x > 0.8 * span[0]
        axes.annotate(name, (x, y), xytext=(-6 if left else 6, -11 if below else 5), textcoords="offset points",
                      ha="right" if left else "left", fontsize=8, color=OURS if ours else INK)
        places.append((x, y))
    axes.set_xlabel(label, color=INK)
    axes.set_ylabel("word error rate, %", color=INK)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(color="#e1e0d9", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


PICTURES = {
    "words.png": ("Does a policy beat fixed sizes? Temperature 1.0, no top-k", "tokens/pass", "tokens a pass",
                  (8, 4.6)),
    "every_method.png": ("How does every method do?", "× FAR", "times as fast as FAR, language model alone", (8, 6)),
}

if __name__ == "__main__":
    for name, (heading, across, label, size) in PICTURES.items():
        draw(heading, across, label, DOCS / "images" / name, size)
