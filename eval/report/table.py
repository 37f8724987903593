"""The tables of a comparison as text, and the notes that make them readable on their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.methods.families import at_sampling, family_label, parse_method
from eval.results.pareto import SPEED_AXES, sentence, speed_range
from eval.results.rows import Row
from eval.results.training import training_note
from eval.scorers.metrics import NOISE_QUALITY_LABEL

Column = tuple[str, Callable[[Row], str]]
RIVALS = ("car", "dcar")  # every family is set against these in compare.txt; all pairs are in compare.json


def _percent(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def _number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def _p(value: float | None) -> str:
    return "–" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


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
    ("p FAR", lambda r: _p(r.get("p_vs_far"))),
    ("p CAR-1", lambda r: _p(r.get("p_vs_car1"))),
    ("p bestCAR", lambda r: _p(r.get("p_vs_best_car"))),
    ("p SD", lambda r: _p(r.get("p_vs_sd"))),
    ("p random", lambda r: _p(r.get("p_vs_random"))),
    ("length", lambda r: _number(r["duration_ratio"])),
    ("cut %", lambda r: _percent(r.get("truncation_rate"), 1)),
    ("loop %", lambda r: _percent(r.get("loop_rate"), 1)),
    ("n", lambda r: str(r["n"])),
]


def main_columns(rows: Sequence[Row]) -> list[Column]:
    """Columns of the first table: COLUMNS, behind the quality of the voice mean and interval of every scorer and the
    variety, and behind the name the sampling, where rows differ in it."""
    place = next(i for i, (title, _) in enumerate(COLUMNS) if title == "tok/pass")
    return [COLUMNS[0], *sampling_columns(rows), *COLUMNS[1:place], *_extra_columns(rows), *COLUMNS[place:]]


def _extra_columns(rows: Sequence[Row]) -> list[Column]:
    def mean(name: str) -> Callable[[Row], str]:
        return lambda r: _number(r["scores"][name]["mean"], 3)

    def interval(name: str) -> Callable[[Row], str]:
        return lambda r: "–".join(_number(end, 3) for end in r["scores"][name]["ci"] or [None])

    names = list(rows[0].get("scores", {})) if rows else []
    extra = [c for n in names for c in ((n, mean(n)), ("95 % CI", interval(n)))]
    if any(r.get("variety") is not None for r in rows):
        extra.append(("variety", lambda r: _number(r.get("variety"), 3)))
    return extra


MEANINGS = {
    "Errors and speed": "WER, CER: word and character errors, with the interval that 95 of 100 such experiments would "
                        "hit; less is better. tok/pass: tokens of one forward pass. RTF: seconds of computing for a "
                        "second of speech, LM RTF without the vocoder; ×FAR: so many times as fast as FAR.",
    "Could it be chance?": "p: how often chance alone would set a method so far apart from FAR, CAR-1, the best fixed "
                           "size or random sizes. Above 0.05 it could be chance.",
    "Voices, lengths and loops": "voice: likeness to the voice of the prompt, 1 at most. length: of the speech beside "
                                 "the recording's. cut %: speech that only the limit on length ended; loop %: that "
                                 "says a piece over and over.",
}
"""Below the titles of `column_groups`: what a reader needs to know of the columns first."""


def column_groups(rows: Sequence[Row]) -> list[tuple[str, list[Column]]]:
    """The first table in parts that fit on a screen: (title, columns). Columns without any value are left out."""
    named = dict(COLUMNS)
    tests = [title for title in named if title.startswith("p ")]
    errors = ["WER %", "95 % CI", "CER %", "tok/pass", "LM RTF", "RTF", "×FAR", "×CAR-1", "n"]
    quality = [title for title in named if title not in ("method", *errors, *tests)]
    first = quality.index("length")
    parts = [("Errors and speed", [(t, named[t]) for t in errors]),
             ("Could it be chance?", [(t, named[t]) for t in ("WER %", "95 % CI", *tests)]),
             ("Voices, lengths and loops", [*((t, named[t]) for t in quality[:first]), *_extra_columns(rows),
                                            *((t, named[t]) for t in quality[first:])])]
    groups = []
    for title, columns in parts:
        filled = filled_columns(columns, rows)
        if title != "Could it be chance?" or any(t in tests for t, _ in filled):
            groups.append((title, [COLUMNS[0], *sampling_columns(rows), *filled]))
    return groups


def filled_columns(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns in which some row has a value."""
    return [(title, of) for title, of in columns if any(of(r) != "–" for r in rows)]


def sampling_columns(rows: Sequence[Row]) -> list[Column]:
    """What rows differ in of temperature, top-k and top-p; nothing where all have the common sampling."""
    def of(key: str) -> Callable[[Row], str]:
        return lambda r: "–" if r.get(key) is None else f"{r[key]:g}"

    return [(title, of(key)) for title, key in (("T", "temperature"), ("top-k", "top_k"), ("top-p", "top_p"))
            if len({r[key] for r in rows if r.get(key) is not None}) > 1]


def lively_columns(rows: Sequence[Row]) -> list[Column]:
    """Columns of the table of what greediness costs: sameness, loops and cuts beside the errors."""
    return [
        COLUMNS[0], *sampling_columns(rows),
        ("WER %", lambda r: _percent(r["wer"])),
        ("variety", lambda r: _number(r.get("variety"), 3)),
        ("95 % CI", lambda r: "–".join(_number(end, 3) for end in r.get("variety_ci") or [None])),
        ("duration ± %", lambda r: _percent(r.get("duration_spread"), 1)),
        ("run", lambda r: _number(r.get("longest_run"), 1)),
        ("longest", lambda r: str(r.get("longest_run_max", "–"))),
        ("loop %", lambda r: _percent(r.get("loop_rate"), 1)),
        ("cut %", lambda r: _percent(r.get("truncation_rate"), 1)),
    ]


def lively_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of that table: all methods, where sentences were spoken more than once; else none."""
    spoken = [r for r in rows if r["kind"] == "method"]
    return spoken if any(r.get("duration_spread") is not None for r in spoken) else []


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


def aligned(columns: Sequence[tuple[str, Callable[[Any], str]]], rows: Sequence[Any],
            left: Sequence[int] = (0,)) -> list[str]:
    """A table as lines of equal length; `left`: columns whose texts stand to the left, the others to the right."""
    cells = [[title for title, _ in columns], *[[str(of(r)) for _, of in columns] for r in rows]]
    widths = [max(len(row[c]) for row in cells) for c in range(len(columns))]
    lines = ["  ".join(v.ljust(w) if c in left else v.rjust(w)
                       for c, (v, w) in enumerate(zip(row, widths, strict=True))) for row in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


def table_text(rows: Sequence[Row], header: dict[str, Any]) -> str:
    """The tables, who wins at equal speed, and the notes."""
    lines = [*aligned(main_columns(rows), rows), ""]
    spoken = [r for r in rows if r["kind"] == "method"]
    if any(r.get("acceptance_rate") is not None or r.get("draft_passes") for r in spoken):
        lines += [*aligned(pass_columns(spoken), spoken), ""]
    if lively := lively_rows(rows):
        lines += [*aligned(lively_columns(lively), lively), ""]
    said = rival_sentences(header)
    if said:
        lines += ["At equal speed (straight lines between the settings of a family, paired bootstrap):",
                  *(f"- {s}" for s in said), ""]
    return "\n".join([*lines, *notes(rows, header)])


def rival_sentences(header: dict[str, Any]) -> list[str]:
    """What is said of every family against fixed chunks and against the policy of the same sampling, at equal measured
    speed-up."""
    pairs = header.get("equal_speed") or []
    first = [p for p in pairs if p["axis"] == pairs[0]["axis"]]  # the measured speed-up, else tokens a pass
    samplings = list(dict.fromkeys(parse_method(p[side]).sampling for p in first for side in ("a", "b")))
    return [sentence for sampling in samplings for sentence in _against_rivals(
        [p for p in first if {parse_method(p["a"]).sampling, parse_method(p["b"]).sampling} == {sampling}],
        [at_sampling(rival, sampling) for rival in RIVALS])]


def _against_rivals(pairs: Sequence[dict[str, Any]], rivals: Sequence[str]) -> list[str]:
    said = []
    for i, rival in enumerate(rivals):
        mine = [p for p in pairs if rival in (p["a"], p["b"]) and not {p["a"], p["b"]} & set(rivals[:i])]
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
    meaning = {"similarity": "cosine to the voice of the prompt", "quality": "predicted rating",
               "prosody": "neither more nor less is better; to be read against the recordings"}
    for name, scorer in (header.get("scorers") or {}).items():
        gaps = [f"{r['method']} {r['records'] - r['scores'][name]['records']}" for r in rows
                if r["scores"][name]["records"] < r["records"]]
        left_out = f"; not scored (silent or empty), records of {', '.join(gaps)}" if gaps else ""
        said.append(f"{name}: {meaning[scorer['kind']]}, mean over utterances and seeds; interval: bootstrap over "
                    f"utterances{left_out}.")
    return said


def _sampling_notes(spoken: Sequence[Row], header: dict[str, Any]) -> list[str]:
    """What stands behind names with a sampling, and what variety is."""
    said = []
    if sampling_columns(spoken):
        common = header["sampling"]
        said.append(f"Common sampling: temperature {common['temperature']:g}, top-k {common['top_k']}, top-p "
                    f"{common['top_p']:g}; @t… in a name: the method's own. p values: against methods of the same "
                    "sampling.")
    if tuned := header.get("tuned"):
        same = ", the same as here, which favours it" if tuned["same_split"] else ""
        said.append(f"@tuned: the method at its own best sampling, chosen on {tuned['utterances']} utterances of split "
                    f"{tuned['split']}{same} (recogniser {tuned['judge']}, {tuned['path']}).")
        if tuned["missing"]:
            said.append(f"Not tuned, so at the common sampling only: {', '.join(tuned['missing'])}.")
    if any(r.get("variety") is not None for r in spoken):
        said.append("variety: mean distance of two renderings of a sentence (other seeds or prompts) by dynamic time "
                    "warping over the tokenizer's centroids; 0 the same speech, 1 as far as codes at random. duration "
                    "±: standard deviation over renderings, of the mean. run: longest run of one token, mean and "
                    "longest of all.")
        if alike := [r["method"] for r in spoken if r.get("variety") == 0]:
            said.append(f"Spoken alike every time, so more seeds say nothing more (prompt_seeds would): "
                        f"{', '.join(alike)}.")
    return said


def notes(rows: Sequence[Row], header: dict[str, Any]) -> list[str]:
    """What the columns mean and what the experiment can and cannot show; also printed in the report."""
    seeds = ", ".join(map(str, header["seeds"]))
    if len(prompts := header.get("prompt_seeds") or []) > 1:
        seeds += f" × prompts of seeds {', '.join(map(str, prompts))}"
    out = [
        f"WER, CER: corpus level, recogniser {header['judge']} (its transcripts are capped by duration), text "
        f"normaliser {header['normalizer']}; n utterances × seeds {seeds}; intervals and p: bootstrap over "
        "utterances, paired.",
        f"voice: cosine to the prompt's voice. {NOISE_QUALITY_LABEL}: not naturalness. length: audio / recording. "
        "cut: ended by the length limit. loop: the same tokens, up to half a second, three times or more in a row.",
        *_scorer_notes(rows, header),
        "RTF: compute / audio time at batch 1, median; LM alone (draft model and verification included), and with the "
        "vocoder. ×: speed-up of the LM (the total is in compare.json).",
    ]
    if said := training_note(header.get("training")):
        out.insert(0, said)
    spoken = [r for r in rows if r["kind"] == "method"]
    out += _sampling_notes(spoken, header)
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
