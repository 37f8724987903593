"""The pictures of why chunks end: what was kept and dropped, and the loss of every head with the paths through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.methods.families import short_name
from eval.report.listen import ink, shade

KEPT, DROPPED = "#2f75b2", "#d9663a"
LED, ORACLE = "#c8442b", "#111417"  # paths of the policy and of the oracle
MOST = 5.0  # nats at which the map of losses is as light as it gets


def plot_reasons(reasons: Mapping[str, Any], path: Path) -> None:
    """A line a method: how often it kept how many tokens, and quartiles of log-probability and entropy of the last
    token that it kept and the first that it dropped."""
    from matplotlib.figure import Figure

    found = {name: of for name, of in reasons.items() if of["decisions"]}
    figure = Figure(figsize=(9.6, 1.3 + 0.55 * len(found)), dpi=160, layout="constrained")
    shares, likely, sure = figure.subplots(1, 3, sharey=True, width_ratios=(1.25, 1, 1))
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
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
        panel.tick_params(axis="x", labelsize=8)
        panel.xaxis.label.set_fontsize(8.5)
        panel.set_axisbelow(True)
        panel.grid(axis="x", alpha=0.2, lw=0.6)
    figure.savefig(path)


def plot_losses(shown: Mapping[str, Any], path: Path) -> None:
    """The loss of every head at every token of one utterance, a panel a path: a pass is a diagonal from head 1 at its
    first token to head a at its last; a thin line stands where it ends."""
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3.4, foreground="white")]
    losses = np.array(shown["losses"], float)  # [K, n], NaN where no head reaches
    heads, n = losses.shape
    paths = shown["paths"]
    figure = Figure(figsize=(11, (0.9 + 0.11 * heads) * len(paths) + 0.75), dpi=160, layout="constrained")
    panels = figure.subplots(len(paths), 1, sharex=True, squeeze=False)[:, 0]
    image: Any = None
    for panel, (name, sizes) in zip(panels, paths.items(), strict=True):
        color = ORACLE if name.startswith("oracle") else LED
        image = panel.imshow(losses, origin="lower", aspect="auto", cmap="Blues_r", vmin=0, vmax=MOST,
                             extent=(0, n, 0.5, heads + 0.5), interpolation="nearest")
        start = 0
        for size in sizes:
            middles = np.arange(size)
            panel.plot(start + middles + 0.5, middles + 1, "-o", color=color, ms=2.6, lw=1.6, path_effects=halo)
            start += size
            panel.axvline(start, color=color, lw=0.6, alpha=0.6)
        panel.set_title(f"{name}: {len(sizes)} passes", fontsize=9.5, loc="left", color=color)
        panel.set(ylim=(0.5, heads + 0.5), xlim=(0, n))
        panel.set_yticks([1, *range(4, heads + 1, 4)] if heads > 7 else range(1, heads + 1))
        panel.set_ylabel("head", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.set_facecolor("#eeeeee")
    panels[-1].set_xlabel("token of the recording", fontsize=9)
    bar = figure.colorbar(image, ax=list(panels), extend="max", pad=0.01, aspect=25)
    bar.set_label("loss, nats (strong blue: sure of it)", fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    figure.savefig(path)


PICTURES = {"reasons": "compare_reasons.png", "losses": "compare_losses.png"}


def draw_reasons(reasons: Mapping[str, Any], losses: Mapping[str, Any] | None, folder: Path) -> Sequence[Path]:
    """The pictures that there is something to draw for; those of an earlier comparison are removed."""
    for name in PICTURES.values():
        (folder / name).unlink(missing_ok=True)
    drawn = []
    if any(of["decisions"] for of in reasons.values()):
        plot_reasons(reasons, folder / PICTURES["reasons"])
        drawn.append(folder / PICTURES["reasons"])
    if losses:
        plot_losses(losses["shown"], folder / PICTURES["losses"])
        drawn.append(folder / PICTURES["losses"])
    return drawn
