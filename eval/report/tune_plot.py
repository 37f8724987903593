"""The picture of `dcar tune`: WER against temperature, a line a method, and under it the variety that it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.methods.families import parse_method
from eval.methods.registry import Style

Point = dict[str, Any]


def plot_tuned(found: dict[str, Any], path: Path) -> None:
    """Lines through the samplings of equal top-k and top-p, with 95 % intervals; ringed: each method's best. Methods of
    one look share its colour, the larger their setting the darker. A point of another top-k stands hollow beside."""
    from matplotlib.figure import Figure

    lively = any(p["variety"] is not None for m in found["methods"].values() for p in m["grid"])
    figure = Figure(figsize=(7.4, 7.2 if lively else 4.8), dpi=200, layout="constrained")
    panels = figure.subplots(1 + lively, 1, sharex=True, squeeze=False)[:, 0]
    alike: dict[Style, list[str]] = {}
    for method in found["methods"]:
        alike.setdefault(parse_method(method).style, []).append(method)
    common = found["common"]["top_k"], found["common"]["top_p"]
    count = len(found["methods"])
    for i, (method, of) in enumerate(found["methods"].items()):
        style = parse_method(method).style
        mates = alike[style]
        alpha = 1.0 if len(mates) == 1 else 0.3 + 0.7 * mates.index(method) / (len(mates) - 1)
        shift = 0.012 * (i - (count - 1) / 2)  # so that intervals stand side by side
        line = sorted((p for p in of["grid"] if (p["top_k"], p["top_p"]) == common), key=lambda p: p["temperature"])
        apart = [p for p in of["grid"] if p not in line]
        for panel, value, ends, scale in zip(panels, ("wer", "variety"), ("wer_ci", "variety_ci"), (100, 1),
                                             strict=False):
            _draw(panel, line, (value, ends, scale), shift, color=style.color, alpha=alpha, marker=style.marker,
                  ls="-", label=method)
            _draw(panel, apart, (value, ends, scale), shift, color=style.color, alpha=alpha, marker=style.marker,
                  ls="", mfc="white")
        best = next(p for p in of["grid"] if p["name"] == of["best"])
        panels[0].scatter([best["temperature"] + shift], [100 * best["wer"]], s=95, facecolors="none",
                          edgecolors="#b8860b", linewidths=1.1, zorder=5)
    for panel in panels:
        panel.grid(alpha=0.2, lw=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(f"temperature (top-k {common[0] or 'off'}, top-p {common[1]:g}; hollow: another top-k or "
                          "top-p)")
    panels[0].set_ylabel("WER, %  (95 % interval)  ↓ better")
    if lively:
        panels[1].set_ylabel("variety of renderings (distance)  ↑ livelier")
    panels[0].set_title(f"{found['utterances']} utterances of split {found['split']}, recogniser {found['asr']}; "
                        "ringed: each method's best", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def _draw(panel: Any, points: list[Point], of: tuple[str, str, float], shift: float, color: str, alpha: float,
          **style: Any) -> None:
    value, ends, scale = of
    points = [p for p in points if p[value] is not None]
    if not points:
        return
    x = [p["temperature"] + shift for p in points]
    panel.vlines(x, [scale * p[ends][0] for p in points], [scale * p[ends][1] for p in points], color=color, lw=0.8,
                 alpha=0.3 * alpha)
    panel.plot(x, [scale * p[value] for p in points], color=color, alpha=alpha, ms=5, lw=1.4, **style)
