"""The tables of a comparison as text, and the notes that make them readable on their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.methods.families import family_label
from eval.results.pareto import SPEED_AXES, sentence, speed_range
from eval.results.rows import Row
from eval.scorers.metrics import NOISE_QUALITY_LABEL

Column = tuple[str, Callable[[Row], str]]
RIVALS = ("car", "dcar")  # every family is set against these in compare.txt; all pairs are in compare.json


def _percent(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def _number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def _interval(ends: Sequence[float] | None, digits: int = 2) -> str:
    return "–" if ends is None else f"{_percent(ends[0], digits)}–{_percent(ends[1], digits)}"


COLUMNS: list[Column] = [
    ("method", lambda r: r["method"]),
    ("WER %", lambda r: _percent(r["wer"])),
    ("95 % CI", lambda r: _interval(r["wer_ci"])),
    ("CER %", lambda r: _percent(r["cer"])),
    ("voice", lambda r: _number(r["speaker_similarity"], 3)),
    ("DNSMOS", lambda r: _number(r["noise_quality_dnsmos"])),
    ("tok/pass", lambda r: _number(r.get("tokens_per_pass"))),
    ("LM RTF", lambda r: _number(r.get("lm_rtf"), 4)),
    ("RTF", lambda r: _number(r.get("rtf"), 4)),
    ("×FAR", lambda r: _number(r.get("speedup_vs_far"))),
    ("×CAR-1", lambda r: _number(r.get("speedup_vs_car1"))),
    ("p FAR", lambda r: _number(r.get("p_vs_far"), 3)),
    ("p CAR-1", lambda r: _number(r.get("p_vs_car1"), 3)),
    ("p bestCAR", lambda r: _number(r.get("p_vs_best_car"), 3)),
    ("p SD", lambda r: _number(r.get("p_vs_sd"), 3)),
    ("p random", lambda r: _number(r.get("p_vs_random"), 3)),
    ("length", lambda r: _number(r["duration_ratio"])),
    ("cut %", lambda r: _percent(r.get("truncation_rate"), 1)),
    ("n", lambda r: str(r["n"])),
]


def main_columns(rows: Sequence[Row]) -> list[Column]:
    """Columns of the first table: COLUMNS, and behind the quality of the voice mean and interval of every scorer."""
    def mean(name: str) -> Callable[[Row], str]:
        return lambda r: _number(r["scores"][name]["mean"], 3)

    def interval(name: str) -> Callable[[Row], str]:
        return lambda r: "–".join(_number(end, 3) for end in r["scores"][name]["ci"] or [None])

    names = list(rows[0].get("scores", {})) if rows else []
    extra = [c for n in names for c in ((n, mean(n)), ("95 % CI", interval(n)))]
    place = next(i for i, (title, _) in enumerate(COLUMNS) if title == "tok/pass")
    return [*COLUMNS[:place], *extra, *COLUMNS[place:]]


def pass_columns(rows: Sequence[Row]) -> list[Column]:
    """Columns of the second table: passes, and acceptance by as many positions as some method reached."""
    def at(position: int) -> Callable[[Row], str]:
        return lambda r: next((_percent(p["rate"], 1) for p in r.get("acceptance_by_position") or ()
                               if p["position"] == position), "–")

    reached = max((p["position"] for r in rows for p in r.get("acceptance_by_position") or ()), default=0)
    return [
        ("method", lambda r: r["method"]),
        ("tok/pass", lambda r: _number(r.get("tokens_per_pass"))),
        ("passes", lambda r: _number(r.get("target_passes"), 1)),
        ("draft passes", lambda r: _number(r.get("draft_passes") or None, 1)),
        ("accepted %", lambda r: _percent(r.get("acceptance_rate"), 1)),
        ("95 % CI", lambda r: _interval(r.get("acceptance_rate_ci"), 1)),
        ("accepted/pass", lambda r: _number(r.get("mean_accepted"))),
        *((f"% at {i}", at(i)) for i in range(1, reached + 1)),
    ]


def aligned(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """A table as lines of equal length: the first column to the left, the others to the right."""
    cells = [[title for title, _ in columns], *[[str(of(r)) for _, of in columns] for r in rows]]
    widths = [max(len(row[c]) for row in cells) for c in range(len(columns))]
    lines = ["  ".join(v.ljust(w) if c == 0 else v.rjust(w) for c, (v, w) in enumerate(zip(row, widths, strict=True)))
             for row in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


def table_text(rows: Sequence[Row], header: dict[str, Any]) -> str:
    """Both tables, who wins at equal speed, and the notes."""
    lines = [*aligned(main_columns(rows), rows), ""]
    spoken = [r for r in rows if r["kind"] == "method"]
    if any(r.get("acceptance_rate") is not None or r.get("draft_passes") for r in spoken):
        lines += [*aligned(pass_columns(spoken), spoken), ""]
    said = rival_sentences(header)
    if said:
        lines += ["At equal speed (straight lines between the settings of a family, paired bootstrap):",
                  *(f"- {s}" for s in said), ""]
    return "\n".join([*lines, *notes(rows, header)])


def rival_sentences(header: dict[str, Any]) -> list[str]:
    """What is said of every family against fixed chunks and against the policy, at equal measured speed-up."""
    pairs = header.get("equal_speed") or []
    first = [p for p in pairs if p["axis"] == pairs[0]["axis"]]  # the measured speed-up, else tokens a pass
    said = []
    for i, rival in enumerate(RIVALS):
        mine = [p for p in first if rival in (p["a"], p["b"]) and not {p["a"], p["b"]} & set(RIVALS[:i])]
        said += [sentence(p) for p in mine if p["shared"]]
        apart = [p for p in mine if not p["shared"]]
        if apart:
            sides = [("b", "a") if p["b"] == rival else ("a", "b") for p in apart]
            listed = ", ".join(f"{family_label(p[other])} ({speed_range(p[f'range_{other}'])})"
                               for p, (_, other) in zip(apart, sides, strict=True))
            ours = speed_range(apart[0][f"range_{sides[0][0]}"])
            said.append(f"{family_label(rival)} ({ours} {SPEED_AXES[apart[0]['axis']]}) shares no speed with {listed}: "
                        "nothing to compare.")
    return said


def _scorer_notes(rows: Sequence[Row], header: dict[str, Any]) -> list[str]:
    """What the columns of the scorers are, and what they could not score."""
    said = []
    meaning = {"similarity": "cosine to the voice of the prompt", "quality": "predicted rating"}
    for name, scorer in (header.get("scorers") or {}).items():
        gaps = [f"{r['method']} {r['records'] - r['scores'][name]['records']}" for r in rows
                if r["scores"][name]["records"] < r["records"]]
        left_out = f"; not scored (silent or empty), records of {', '.join(gaps)}" if gaps else ""
        said.append(f"{name}: {meaning[scorer['kind']]}, mean over utterances and seeds; interval: bootstrap over "
                    f"utterances{left_out}.")
    return said


def notes(rows: Sequence[Row], header: dict[str, Any]) -> list[str]:
    """What the columns mean and what the experiment can and cannot show; also printed in the report."""
    seeds = ", ".join(map(str, header["seeds"]))
    out = [
        f"WER, CER: corpus level, judge {header['judge']} (its transcripts are capped by duration), text normaliser "
        f"{header['normalizer']}; n utterances × seeds {seeds}; intervals and p: bootstrap over utterances, paired.",
        f"voice: cosine to the prompt's voice. {NOISE_QUALITY_LABEL}: not naturalness. length: audio / recording. "
        "cut: ended by the length limit.",
        *_scorer_notes(rows, header),
        "RTF: compute / audio time at batch 1, median; LM alone (draft model and verification included), and with the "
        "vocoder. ×: speed-up of the LM (the total is in compare.json).",
    ]
    spoken = [r for r in rows if r["kind"] == "method"]
    if any(r.get("acceptance_rate") is not None for r in spoken):
        out.append("passes, draft passes: forward passes of the decoder and of the draft model per utterance. "
                   "accepted: of all drafted tokens; “% at i”: of the i-th drafted tokens whose predecessors were all "
                   "accepted; of a tree: of the passes that came to depth i. Tokens a pass leave out what drafting "
                   "costs, the speed-up does not.")
    if any(r.get("p_vs_sd") is not None for r in spoken):
        out.append("p SD: against lossless speculative decoding with the same draft, that is, what relaxing costs.")
    for r in spoken:
        if r.get("p_vs_random") is not None:
            low, high = r["difference_vs_random_ci"]
            out.append(f"{r['method']} against {r['random_baseline']}, what a policy must beat: "
                       f"{100 * r['difference_vs_random']:+.2f} points of WER, 95 % interval {100 * low:+.2f} to "
                       f"{100 * high:+.2f}, p = {r['p_vs_random']:.3f}.")
    power = header.get("power")
    if power:
        out.append(
            f"Detectable difference (80 % power, 5 % significance): {100 * power['absolute']:.2f} points of WER "
            f"against {power['baseline']}, {100 * power['relative']:.0f} % relative; 10 % relative needs about "
            f"{power['utterances_for_10_percent']} utterances.")
        if power["tests"] > 10:
            out.append(f"{power['tests']} methods are tested against {power['baseline']}: about "
                       f"{0.05 * power['tests']:.1f} of them would have p < 0.05 if none differed. p below "
                       f"{0.05 / power['tests']:.4f} holds for all tests together (Bonferroni).")
    best = next((r["best_car"] for r in rows if r.get("best_car")), None)
    if best:
        out.append(f"The best CAR-k ({best}) was chosen on these same utterances, which favours it.")
    return out
