"""The head of the report: who is best at which speed, in one sentence and one picture, and what to beware of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.methods.families import parse_method, short_name
from eval.report.blocks import Picture, file_uri
from eval.results.pareto import SPEED_AXES, pareto_front, speed_axis
from eval.results.rows import Row
from eval.results.training import both_shipped, training_note

CAPTION = ("One line per method, through its settings; bars: 95 % intervals. Lower and further right is better. A "
           "policy or a verifier is worth its cost where it lies below the line of CAR-k, a fixed number of tokens a "
           "pass. The error axis need not start at 0.")
UNITS = {"speedup_vs_far": " times as fast as FAR", "speedup_vs_car1": " times as fast as CAR-1",
         "tokens_per_pass": " tokens a pass"}
SHORT_UNITS = {"speedup_vs_far": " times", "speedup_vs_car1": " times", "tokens_per_pass": " tokens a pass"}
UNSTEADY = 1.4  # the third quartile of a speed-up over the first, above which times are called unsure
NAMES = {"far": "far is next-token decoding, one token a pass, by a decoder of one head (FAR)",
         "car": "car-k always keeps k tokens of a pass",
         "random": "random-… keeps a number drawn at random from those in its name",
         "best-of": "best-of-k-n draws n candidates of k tokens and keeps the one with the best joint score",
         "dcar": "dcar lets a learned policy choose how many tokens it keeps, pass by pass"}
NUM_CANDIDATES = "behind @n stands the number of candidates, drawn side by side, that the policy chooses among"


def summary(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the template shows above the first table; `folder` holds the pictures."""
    rows = result["rows"]
    axis = speed_axis(rows) or "tokens_per_pass"
    training, power = result.get("training"), result.get("power")
    known = training and both_shipped(training)  # said among the notes instead
    name = "compare.png" if axis == "tokens_per_pass" else "compare_speed.png"
    return {
        "best": best_sentence(rows, axis), "names": names_sentence(rows), "facts": " ".join(facts(result)),
        "chance": f"Differences below about {100 * power['absolute']:.1f} points of word errors could be chance "
                  f"({power['n']} utterances)." if power else "",
        "warnings": [said for said in ("" if known else training_note(training), unsteady_times(rows, axis)) if said],
        "picture": Picture(f"Word errors against {SPEED_AXES[axis]}", file_uri(folder / name), CAPTION)}


def names_sentence(rows: Sequence[Row]) -> str:
    """What the names of the paper's methods stand for, of those that were compared."""
    names = [parse_method(r["method"]) for r in rows if r["kind"] == "method"]
    kinds = {name.kind for name in names}
    said = "; ".join([*(text for kind, text in NAMES.items() if kind in kinds),
                      *([NUM_CANDIDATES] if any(name.num_candidates > 1 for name in names) else [])])
    return f"{said}. Word errors: of 100 words, how many a recogniser hears wrong, misses or adds.".lstrip(". ")


def best_sentence(rows: Sequence[Row], axis: str) -> str:
    """Which method makes the fewest word errors, how fast it is, and what faster ones cost.

    The Pareto front as a sentence, from slow to fast; settings of one family that follow each other on it are one
    entry.
    """
    points = [r for r in rows if r["kind"] == "method" and r.get(axis) is not None]
    front = [points[i] for i in pareto_front([r[axis] for r in points], [r["wer"] for r in points])]
    first = front[0]
    best = [r for r in points if (r["wer"], r[axis]) == (first["wer"], first[axis])]
    said = (f"{' and '.join(short_name(r['method']) for r in best)} make{'s' if len(best) == 1 else ''} the fewest "
            f"word errors ({100 * first['wer']:.1f} %), {first[axis]:.2f}{UNITS[axis]}")
    groups: list[list[Row]] = []
    for row in front[len(best):]:
        family = parse_method(row["method"]).family
        if groups and parse_method(groups[-1][0]["method"]).family == family:
            groups[-1].append(row)
        else:
            groups.append([row])
    if not groups:
        return f"{said}; no method is faster."
    faster = []
    for group in groups:
        ends = (group[0], group[-1])[: len(group)]
        name, wer, speed = (" to ".join(texts) for texts in (
            [short_name(r["method"]) for r in ends], [f"{100 * r['wer']:.1f}" for r in ends],
            [f"{r[axis]:.2f}" for r in ends]))
        faster.append(f"{name} ({wer} %), {speed}{SHORT_UNITS[axis]}")
    return f"{said}. Faster, with more errors: {'; '.join(faster)}."


def unsteady_times(rows: Sequence[Row], axis: str) -> str:
    """A warning where the speed-up of a method differs much from sentence to sentence; else nothing."""
    name = f"{axis}_quartiles"
    wild = [r for r in rows if r.get(name) and r[name][1] > UNSTEADY * r[name][0]]
    if not wild:
        return ""
    worst = max(wild, key=lambda r: r[name][1] / r[name][0])
    return (f"The measured speeds are unsure: the machine was busy, or too few sentences were timed "
            f"({worst['timed_n']}). Half of the times of {short_name(worst['method'])} lie outside "
            f"{worst[name][0]:.2f} to {worst[name][1]:.2f} times. Tokens a pass do not depend on the machine.")


def facts(result: dict[str, Any]) -> list[str]:
    """What was spoken and judged, whether the policy beats a fixed size, and what is synthetic; sentences."""
    rows = result["rows"]
    methods, seeds = sum(r["kind"] == "method" for r in rows), len(result["seeds"])
    sentences = [f"{result['utterances']} held-out sentences, spoken by {methods} methods with {seeds} random "
                 f"seed{'s' if seeds > 1 else ''}, judged by a speech recogniser."]
    for row in (r for r in rows if r["method"].startswith("dcar")):
        text = (f"{row['method']} makes {100 * row['wer']:.1f} % word errors at {row['tokens_per_pass']:.2f} tokens "
                "a pass")
        best = next((r for r in rows if r["method"] == row.get("best_car")), None)
        if best and row.get("p_vs_best_car") is not None:
            p = row["p_vs_best_car"]
            better = "better" if row["wer"] < best["wer"] else "worse"
            verdict = "a difference that could be chance" if p > 0.05 else f"the policy is significantly {better}"
            text += (f"; the best fixed size, {best['method']}, {100 * best['wer']:.1f} % ({verdict}, "
                     f"{'p < 0.001' if p < 0.001 else f'p = {p:.3f}'})")
        sentences.append(text + ".")
    corpus = result.get("corpus", {}).get("corpus", {})
    if corpus.get("kind") == "starter":
        sentences.append("The starter corpus is itself synthetic speech: the “recordings” here were made by a "
                         "text-to-speech system, no person was recorded.")
    return [*sentences, "Synthetic means: every voice on this page, but for the rows called recording and prompt, was "
            "generated by the models of this run from text and a short voice prompt."]
