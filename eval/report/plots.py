"""Pictures: WER against speed with the Pareto front, and the curves of a DCPO run.

One family of methods is one line through its settings. Points on the Pareto front are ringed: no
other method is as fast with fewer errors.
"""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcar.decoding.declare import Style
from dcar.errors import DataError
from eval.methods.families import group_families
from eval.report.blocks import Picture, Section, data_uri
from eval.results.pareto import AXES, pareto_front, speed_axis, speeds_of
from eval.results.types import RESYNTHESIS, Row, from_json, read_jsonl

FRONT_COLOR = "#f2c94c"
DASHES = ["-", (0, (4, 1.5)), (0, (1.5, 1.5))]  # variants of one look: SSD, SSD (draft model)
CURVES = {
    "reward": ("reward_forced", "reward_sampled"),
    "tokens per pass": ("tokens_per_pass",),
    "entropy, nats": ("entropy",),
    "KL, nats": ("kl",),
    "share of actions outside the range": ("out_of_range",),
    "dev errors (reward recogniser)": ("eval_wer", "eval_wer_sampled"),
}
LABELS = {
    "reward_sampled": "sampled by the policy",
    "reward_forced": "forced sizes",
    "eval_wer": "greedy",
    "eval_wer_sampled": "sampled",
}
PLOTS = ("compare_speed.png", "compare.png")


def panels(
    size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Any, Any]:
    """Return a figure of this size in inches, and its panels [rows, columns]."""
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
    """Draw the plots that the rows allow, and remove those of an earlier run that they do not
    allow. Return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, axis in zip(PLOTS, (speed_axis(rows), "tokens_per_pass"), strict=True):
        (folder / name).unlink(missing_ok=True)
        if axis:
            plot_errors(rows, axis, folder / name)
            drawn.append(folder / name)
    return drawn


def plot_errors(rows: Sequence[Row], axis: str, path: Path) -> None:
    """Plot WER with 95 % intervals against `axis` (a key of AXES), a line per family,
    with the Pareto front."""
    figure, [[axes]] = panels((8.4, 5.2))
    speeds = speeds_of(rows, axis)
    families = group_families([r for r in rows if r.method in speeds], lambda row: row.spec)
    every = [row for points in families.values() for row in points]
    x = np.array([speeds[row.method] for row in every])
    y = 100 * np.array([row.wer.value for row in every])
    ends = 100 * np.array([row.wer.ends or (row.wer.value, row.wer.value) for row in every]).T
    front = pareto_front(x.tolist(), y.tolist())
    # A staircase: at a speed between two points the slower one is no answer, the faster one is.
    axes.plot(
        x[front],
        y[front],
        color=FRONT_COLOR,
        lw=6,
        alpha=0.5,
        drawstyle="steps-pre",
        solid_capstyle="round",
        solid_joinstyle="round",
        zorder=1,
    )
    looks = Counter(family.style for family in families)
    alike: Counter[Style] = Counter()  # families of one look, drawn so far
    first = 0
    for family, points in families.items():
        style, here = family.style, slice(first, first + len(points))
        # stars fill less of it
        size = 8 if style.marker == "*" or isinstance(style.marker, tuple) else 5.5
        axes.vlines(x[here], *ends[:, here], color=style.color, lw=0.8, alpha=0.22, zorder=2)
        axes.plot(
            x[here],
            y[here],
            color=style.color,
            lw=1.4,
            ls=DASHES[alike[style] % len(DASHES)],
            alpha=0.9,
            marker=style.marker,
            ms=size,
            mec="white",
            mew=0.5,
            zorder=4,
            label=family.label,
        )
        names: dict[int, str] = {}  # of the ends of a sweep, or of a point among others like it
        if len(points) > 1:
            symbol = f"{style.symbol}=" if style.symbol else ""
            names = {0: f"{symbol}{points[0].setting}", len(points) - 1: points[-1].setting}
        elif looks[style] > 1:
            names = {0: family.qualifier}
        for i, name in names.items():
            axes.annotate(
                name,
                (x[first + i], y[first + i]),
                xytext=(5, 4),
                fontsize=7,
                textcoords="offset points",
                color=style.color,
                zorder=6,
            )
        alike[style] += 1
        first += len(points)
    axes.scatter(
        x[front], y[front], s=95, facecolors="none", edgecolors="#b8860b", linewidths=1.1, zorder=3
    )
    low, high = ends[0].min(), ends[1].max()
    low, high = max(low, y.min() - 0.35 * np.ptp(y) - 1), min(high, y.max() + 0.25 * np.ptp(y) + 1)
    floor = next((100 * row.wer.value for row in rows if row.method == RESYNTHESIS), None)
    if floor is not None:
        near = 0.15 * (high - low)  # to show a line far away would squeeze the points
        if low - near < floor < high + near:
            low, high = min(low, floor), max(high, floor)
        axes.axhline(
            floor,
            color="#999999",
            lw=1,
            ls=":",
            zorder=1,
            label=f"recordings resynthesised\nfrom their tokens: {floor:.1f} %",
        )
    margin = max(0.1, 0.03 * (high - low))
    axes.set_ylim(max(0.0, low - margin), high + margin)
    axes.margins(x=0.1)
    axes.set_xlabel(AXES[axis].label + "  → faster")
    axes.set_ylabel("errors, %  (95 % interval)  ↓ better")
    axes.plot(
        [],
        [],
        color=FRONT_COLOR,
        lw=7,
        alpha=0.55,
        marker="o",
        ms=9,
        mfc="none",
        mec="#b8860b",
        label="Pareto front: no method is\nas fast with fewer errors",
    )
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    figure.savefig(path)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a trainer's log.jsonl. If a run was resumed from step S, lines of later
    steps before that place are skipped, and so is the incomplete last line of a running job.
    Raises DataError without a log."""
    if not path.is_file():
        raise DataError(f"{path}: the training log does not exist")
    log: list[dict[str, Any]] = []

    def read(text: bytes) -> dict[str, Any]:
        line: dict[str, Any] = from_json(dict, text)
        line["step"] + 0  # raises where it is no number
        return line

    for line in read_jsonl(path, read, "line of the log"):
        if line.get("resumed"):
            log = [earlier for earlier in log if earlier["step"] <= line["step"]]
        else:
            log.append(line)
    return log


def series(log: Sequence[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one logged quantity; if a step occurs twice, its first value (a
    run ends with a second evaluation, of its best checkpoint instead of its last step)."""
    by_step: dict[float, float] = {}
    for line in log:
        if isinstance(line.get(key), int | float) and not isinstance(line.get(key), bool):
            by_step.setdefault(float(line["step"]), float(line[key]))
    return list(by_step), list(by_step.values())


def curves_section(file: Path) -> Section | None:
    """Return the panels for which a training log has data; nothing if it has none yet. Raises
    DataError without a log."""
    log = read_log(file)
    logged = {key for entry in log for key in entry}
    pictures = []
    for title, curves in CURVES.items():
        if not (keys := [key for key in curves if key in logged]):
            continue
        figure, [[axes]] = panels((4.4, 3.0))
        for key in keys:
            steps, values = series(log, key)
            color = "#3b6fb6" if len(keys) > 1 and "sampled" not in key else "#c8442b"
            axes.plot(steps, values, lw=0.8, alpha=0.35, color=color)
            window = max(1, len(values) // 15)
            pieces = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
            axes.plot(
                steps,
                [sum(p) / len(p) for p in pieces],
                lw=1.8,
                color=color,
                label=LABELS.get(key, key),
            )
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        if len(keys) > 1:
            axes.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        pictures.append(Picture(title, data_uri(buffer.getvalue(), "image/png"), wide=False))
    if not pictures:
        return None
    return Section(
        f"Training of a policy (DCPO): {file.parent.name}",
        [
            tuple(pictures),
            "Thin: as logged; thick: running mean. Forced rollouts follow a fixed chunk size of "
            "the guidance range; sampled ones follow the policy. The policy exceeds its guides "
            "where the sampled curve passes the forced one.",
        ],
    )
