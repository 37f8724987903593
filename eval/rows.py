"""From records to the rows of the comparison table, its text form, and the plot of WER against tokens per pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.metrics import NOISE_QUALITY_LABEL
from eval.records import RECORDING, RESYNTHESIS, Record
from eval.stats import corpus_interval, detectable_difference, paired_test, unpaired_detectable, utterances_needed
from eval.timing import speedup, summarize

Row = dict[str, Any]


def make_rows(records: Sequence[Record], methods: Sequence[str], timings: Sequence[dict[str, Any]] = (),
              resamples: int = 4000) -> list[Row]:
    """One row per method, in the order of `methods`; reference rows (recording, resynthesis) have no passes or times.

    Error counts of an utterance are summed over its seeds before anything is resampled.
    """
    grouped = {m: [r for r in records if r["method"] == m] for m in methods}
    rows = [_row(m, grouped[m], timings, resamples) for m in methods]
    spoken = [r for r in rows if r["kind"] == "method"]
    cars = [r for r in spoken if r["method"].startswith("car-")]
    best = min(cars, key=lambda r: r["wer"])["method"] if cars else None
    for row in spoken:
        for label, baseline in (("far", "far"), ("best_car", best)):
            other = None if baseline == row["method"] or baseline not in grouped else baseline
            test = _compare(grouped[row["method"]], grouped[other], resamples) if other else None
            row[f"difference_vs_{label}"] = test and test.difference
            row[f"difference_vs_{label}_ci"] = test and [test.low, test.high]
            row[f"p_vs_{label}"] = test and test.p_value
            row[f"detectable_vs_{label}"] = test and test.detectable
        row["best_car"] = best
        row["detectable_difference"] = row["detectable_vs_best_car"] or row["detectable_vs_far"]
        for label, baseline in (("far", "far"), ("car1", "car-1")):
            for suffix, total in (("", False), ("_total", True)):
                row[f"speedup_vs_{label}{suffix}"] = speedup(timings, row["method"], baseline, total)
    return rows


def by_utterance(records: Sequence[Record], field: str = "words") -> tuple[list[int], list[int], list[str]]:
    """Errors and reference units summed over the seeds of each utterance, and the ids, sorted."""
    errors: Counter[str] = Counter()
    units: Counter[str] = Counter()
    for r in records:
        s, d, i, n = r[field]
        errors[r["id"]] += s + d + i
        units[r["id"]] += n
    ids = sorted(units)
    return [errors[i] for i in ids], [units[i] for i in ids], ids


def _compare(a: Sequence[Record], b: Sequence[Record], resamples: int):
    ea, wa, ids_a = by_utterance(a)
    eb, wb, ids_b = by_utterance(b)
    shared = sorted(set(ids_a) & set(ids_b))
    pick_a, pick_b = [ids_a.index(i) for i in shared], [ids_b.index(i) for i in shared]
    return paired_test([ea[i] for i in pick_a], [wa[i] for i in pick_a], [eb[i] for i in pick_b],
                       [wb[i] for i in pick_b], resamples=resamples)


def _row(method: str, records: Sequence[Record], timings: Sequence[dict[str, Any]], resamples: int) -> Row:
    errors, words, ids = by_utterance(records)
    wer = corpus_interval(errors, words, resamples=resamples)
    character, characters, _ = by_utterance(records, "characters")
    cer = corpus_interval(character, characters, resamples=resamples)
    s, d, i, n = (sum(r["words"][k] for r in records) for k in range(4))
    capped = sum(min(sum(r["words"][:3]), r["words"][3]) for r in records)
    row: Row = {
        "method": method, "kind": "reference" if method in (RECORDING, RESYNTHESIS) else "method",
        "wer": wer.value, "wer_ci": [wer.low, wer.high], "wer_se": wer.standard_error, "wer_capped": capped / n,
        "cer": cer.value, "cer_ci": [cer.low, cer.high],
        "substitutions": s, "deletions": d, "insertions": i, "reference_words": n,
        "empty_transcripts": sum(not r["hypothesis"].strip() for r in records),
        "detectable_unpaired": unpaired_detectable(wer, wer),
        "speaker_similarity": _mean(records, "speaker_similarity"),
        "noise_quality_dnsmos": _mean(records, "noise_quality"),
        "noise_quality_n": sum("noise_quality" in r for r in records),
        "duration_ratio": sum(r["duration"] for r in records) / sum(r["reference_duration"] for r in records),
        "n": len(ids), "seeds": len({r["seed"] for r in records}), "records": len(records),
    }
    second = [r for r in records if "second_words" in r]
    if second:
        e, w, second_ids = by_utterance(second, "second_words")
        interval = corpus_interval(e, w, resamples=resamples)
        row |= {"second_wer": interval.value, "second_wer_ci": [interval.low, interval.high],
                "second_n": len(second_ids)}
    if row["kind"] == "method":
        passes, tokens = sum(r["passes"] for r in records), sum(len(r["tokens"]) for r in records)
        actions = Counter(a for r in records for a in r["actions"])
        total = sum(actions.values())
        row |= {
            "tokens_per_pass": tokens / passes,
            "chunk_sizes": {str(a): actions[a] / total for a in sorted(actions)},
            "truncation_rate": sum(r["truncated"] for r in records) / len(records),
            "acceptance_rate": _ratio(sum(r["accepted"] for r in records), sum(r["proposed"] for r in records)),
            **summarize(timings, method),
            "timed_n": sum(t["method"] == method for t in timings),
        }
    return row


def _mean(records: Sequence[Record], field: str) -> float | None:
    values = [r[field] for r in records if r.get(field) is not None]
    return float(np.mean(values)) if values else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def power_statement(rows: Sequence[Row]) -> dict[str, Any] | None:
    """What this experiment could detect between a method and the best CAR, from the median paired standard error."""
    found = [r["detectable_difference"] for r in rows if r.get("detectable_difference")]
    best = next((r for r in rows if r["method"] == r.get("best_car")), None)
    if not found or best is None or best["wer"] <= 0:
        return None
    absolute = float(np.median(found))
    return {
        "baseline": best["method"], "baseline_wer": best["wer"], "absolute": absolute,
        "relative": absolute / best["wer"], "power": 0.8, "significance": 0.05, "n": best["n"], "seeds": best["seeds"],
        "unpaired_absolute": detectable_difference(float(np.hypot(best["wer_se"], best["wer_se"]))),
        "utterances_for_10_percent": utterances_needed(best["n"], absolute, 0.1 * best["wer"]),
    }


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def _number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


COLUMNS: list[tuple[str, Any]] = [
    ("method", lambda r: r["method"]),
    ("WER %", lambda r: _percent(r["wer"])),
    ("95 % CI", lambda r: f"{_percent(r['wer_ci'][0])}–{_percent(r['wer_ci'][1])}"),
    ("CER %", lambda r: _percent(r["cer"])),
    ("voice", lambda r: _number(r["speaker_similarity"], 3)),
    ("DNSMOS", lambda r: _number(r["noise_quality_dnsmos"])),
    ("tok/pass", lambda r: _number(r.get("tokens_per_pass"))),
    ("LM RTF", lambda r: _number(r.get("lm_rtf"), 4)),
    ("RTF", lambda r: _number(r.get("rtf"), 4)),
    ("×FAR", lambda r: _number(r.get("speedup_vs_far"))),
    ("×CAR-1", lambda r: _number(r.get("speedup_vs_car1"))),
    ("p FAR", lambda r: _number(r.get("p_vs_far"), 3)),
    ("p bestCAR", lambda r: _number(r.get("p_vs_best_car"), 3)),
    ("length", lambda r: _number(r["duration_ratio"])),
    ("cut %", lambda r: "–" if r.get("truncation_rate") is None else f"{100 * r['truncation_rate']:.1f}"),
    ("n", lambda r: str(r["n"])),
]


def table_text(rows: Sequence[Row], header: dict[str, Any]) -> str:
    """The table, aligned, with the lines that make it readable on its own."""
    cells = [[title for title, _ in COLUMNS], *[[str(of(r)) for _, of in COLUMNS] for r in rows]]
    widths = [max(len(row[c]) for row in cells) for c in range(len(COLUMNS))]
    lines = ["  ".join(v.ljust(w) if c == 0 else v.rjust(w) for c, (v, w) in enumerate(zip(row, widths, strict=True)))
             for row in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join([*lines, "", *notes(rows, header)])


def notes(rows: Sequence[Row], header: dict[str, Any]) -> list[str]:
    """What the columns mean and what the experiment can and cannot show; also printed in the report."""
    seeds = ", ".join(map(str, header["seeds"]))
    out = [
        f"WER, CER: corpus level, judge {header['judge']} (its transcripts are capped by duration), text normaliser "
        f"{header['normalizer']}; n utterances × seeds {seeds}; intervals and p: bootstrap over utterances, paired.",
        f"voice: cosine to the prompt's voice. {NOISE_QUALITY_LABEL}: not naturalness. length: audio / recording. "
        "cut: ended by the length limit.",
        "RTF: compute / audio time at batch 1, median; LM alone, and with the vocoder. ×: speed-up of the LM "
        "(the total is in compare.json).",
    ]
    power = header.get("power")
    if power:
        out.append(
            f"Detectable difference (80 % power, 5 % significance): {100 * power['absolute']:.2f} points of WER "
            f"against {power['baseline']}, {100 * power['relative']:.0f} % relative; 10 % relative needs about "
            f"{power['utterances_for_10_percent']} utterances.")
    best = next((r["best_car"] for r in rows if r.get("best_car")), None)
    if best:
        out.append(f"The best CAR-k ({best}) was chosen on these same utterances, which favours it.")
    return out


FAMILY_COLORS = {"car": "#3b6fb6", "far": "#444444", "dcar": "#c8442b", "random": "#8a8f98", "other": "#7a4fa3"}


def family(method: str) -> str:
    return next((f for f in FAMILY_COLORS if method.startswith(f)), "other")


def plot(rows: Sequence[Row], path: Path) -> None:
    """WER against tokens per pass with 95 % intervals; the CAR-k points are joined to the CAR curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.0), dpi=200, layout="constrained")
    axes = figure.subplots()
    points = [r for r in rows if r["kind"] == "method"]
    cars = sorted((r for r in points if family(r["method"]) == "car"), key=lambda r: r["tokens_per_pass"])
    axes.plot([r["tokens_per_pass"] for r in cars], [100 * r["wer"] for r in cars], color=FAMILY_COLORS["car"], lw=1.5,
              zorder=1)
    markers = {"car": "o", "far": "s", "dcar": "D", "random": "v", "other": "^"}
    for name, color in FAMILY_COLORS.items():
        mine = [r for r in points if family(r["method"]) == name]
        if not mine:
            continue
        x, y = [r["tokens_per_pass"] for r in mine], np.array([100 * r["wer"] for r in mine])
        bars = np.abs(np.array([[100 * v for v in r["wer_ci"]] for r in mine]).T - y)
        label = {"car": "CAR-k", "far": "FAR", "dcar": "DCAR", "random": "random in range"}.get(name, "other")
        axes.errorbar(x, y, bars, fmt=markers[name], color=color, ms=6, capsize=3, lw=1, label=label)
    low = min(100 * r["wer_ci"][0] for r in points)
    high = max(100 * r["wer_ci"][1] for r in points)
    floor = next((r for r in rows if r["method"] == RESYNTHESIS), None)
    if floor and 100 * floor["wer"] > low - 2 * (high - low):  # a line far below would squeeze the points
        low = min(low, 100 * floor["wer"])
        axes.axhline(100 * floor["wer"], color="#999999", lw=1, ls=":", label=RESYNTHESIS)
    margin = 0.12 * (high - low) or 1.0
    axes.set_ylim(max(0.0, low - margin), high + margin)
    axes.margins(x=0.09)
    axes.set_xlabel("tokens per forward pass")
    axes.set_ylabel("WER, %  (95 % interval)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    _label(figure, axes, points)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _label(figure, axes, points: Sequence[Row]) -> None:
    """Name every point where its name covers neither another name nor another point."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    halo = [withStroke(linewidth=2.5, foreground="white")]
    figure.canvas.draw()
    where = [axes.transData.transform((r["tokens_per_pass"], 100 * r["wer"])) for r in points]
    taken = [Bbox.from_bounds(x - 11, y - 11, 22, 22) for x, y in where]
    for row in points:
        note = axes.annotate(row["method"], (row["tokens_per_pass"], 100 * row["wer"]), xytext=(5, 4), fontsize=8,
                             textcoords="offset points", color=FAMILY_COLORS[family(row["method"])],
                             path_effects=halo)
        for right, up in [(True, 4), (False, 4), (True, -11), (False, -11), (True, 14), (False, 14), (True, -21),
                          (False, -21), (True, 24), (True, -31)]:
            note.set_ha("left" if right else "right")
            note.set_position((5 if right else -5, up))
            box = note.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(note.get_window_extent())
