"""Summary of a comparison in a few sentences: the verdict, for the terminal and the head of the
report; caveats; and commands to try next."""

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.methods.families import group_families, short_name
from eval.report.blocks import Picture, file_uri
from eval.report.table import CONVENTION, corpus_kind, short_table
from eval.results.pareto import SPEED_AXES, common_texts, difference, front_rows, speed_axis
from eval.results.rows import Row
from eval.results.training import SHIPPED

CAPTION = (
    "One line per family of methods, through its settings; bars: 95 % intervals. Lower and further "
    "right is better. A policy or a verifier is worth its cost if it lies below the line of CAR-k, "
    "which keeps a fixed number of tokens per pass. The error axis may not start at 0."
)
WIDTH = 100  # columns of a terminal
# ratio of the third to the first quartile of a speed-up, above which a warning is printed
UNSTEADY = 1.4
NAMES = {
    "far": "far is next-token decoding, one token per pass, by a decoder with one head (FAR)",
    "car": "car-k always keeps k tokens per pass",
    "random": "random-… keeps a random number of tokens, drawn from those in its name",
    "best-of": "best-of-k-n draws n candidates of k tokens and keeps the one with the best joint "
    "score",
    "dcar": "dcar keeps as many tokens of each pass as a learned policy chooses",
}
NUM_CANDIDATES = "@n gives the number of candidates that the policy chooses among"


def summary(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the template's data above the first table; `folder` holds the pictures."""
    rows = result["rows"]
    axis = speed_axis(rows) or "tokens_per_pass"
    training = result["training"]
    # the sentence on the shipped decoders is no warning; it is in the notes
    warnings = ["" if training == SHIPPED else training, unsteady_times(rows, axis)]
    name = "compare.png" if axis == "tokens_per_pass" else "compare_speed.png"
    return {
        "verdict": verdict(result),
        "best": best_sentence(rows, axis),
        "names": names_sentence(rows),
        "chance": chance(result),
        "methods": sum(r["kind"] == "method" for r in rows),
        "corpus": corpus_kind(result),
        "warnings": list(filter(None, warnings)),
        "picture": Picture(
            f"Word errors at equal {SPEED_AXES[axis][0]}", file_uri(folder / name), CAPTION
        ),
    }


def verdict(result: dict[str, Any]) -> list[str]:
    """Compare DCAR with CAR-k at equal tokens per pass and at equal time: a sentence for each set
    of texts, and one more for each further sampling of CAR-k; none if one of the two was not
    compared. Of several policies, the first of those with most candidates is taken, whatever its
    errors."""
    return [
        f"{measured['title'].capitalize()}, {pairs[0]['a']} − {pairs[0]['b']}"
        f"{common_texts(pairs[0])}: {'; '.join(map(difference, pairs))}."
        for measured in (result, *result["more_texts"])
        for pairs in _policy_pairs(measured)
    ]


def _policy_pairs(measured: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the comparisons of DCAR with CAR-k at the same sampling, then with CAR-k at others;
    of each, the one at equal tokens per pass first."""
    families = group_families(measured["rows"])
    fixed = [family for family in families if family.method == "car"]
    samplings = [family.sampling for family in fixed]
    policies = [f for f in families if f.method == "dcar" and f.sampling in samplings]
    if not policies:
        return []
    chosen = max(policies, key=lambda f: (not f.sampling, f.num_candidates))
    fixed.sort(key=lambda family: family.sampling != chosen.sampling)
    pairs = sorted(measured["equal_speed"], key=lambda p: p["axis"] != "tokens_per_pass")
    of_baselines = [
        [p for p in pairs if (p["a"], p["b"]) == (chosen.label, family.label)] for family in fixed
    ]
    return list(filter(None, of_baselines))


def terminal_text(result: dict[str, Any], folder: Path) -> str:
    """Return the last output of `dcar compare`, in lines of at most WIDTH columns: a table, the
    verdict, commands to try next."""
    rows, config = result["rows"], result["config"]
    axis = speed_axis(rows) or "tokens_per_pass"
    found = verdict(result) or [best_sentence(rows, axis)]
    threads = f"{result['threads']} torch thread" + ("s" if result["threads"] > 1 else "")
    clock = f"Measured on: {result['device']}, {threads}."
    paragraphs = [*found, chance(result), unsteady_times(rows, axis), f"{CONVENTION} {clock}"]
    seeds = [*result["seeds"], max(result["seeds"]) + 1]
    more = f"seeds=[{','.join(map(str, seeds))}]"
    if config["limit"] == result["utterances"]:
        more = f"limit={3 * result['utterances']}"
    config_file, mine = (shlex.quote(str(p)) for p in (folder / "config.yaml", f"{folder}_mine"))
    tries = [
        (f"python -m webbrowser {shlex.quote(str(folder / 'report.html'))}", "report with audio"),
        (
            f"dcar compare --config {config_file} {more}",
            "continue, more data",
        ),
        (
            f"dcar compare --config {config_file} texts=[my.txt] out={mine}",
            "texts of your own",
        ),
    ]
    lines = [
        *short_table(result),
        "",
        *(line for p in filter(None, paragraphs) for line in (*textwrap.wrap(p, WIDTH), "")),
        f"Full table: {folder / 'compare.txt'}",
        "",
        "Try next:",
        *(f"  # {why}\n  {command}" for command, why in tries),
    ]
    return "\n".join(lines)


def chance(result: dict[str, Any]) -> str:
    """Return a sentence on the differences that so many utterances cannot show."""
    power = result["power"]
    if not power:
        return ""
    return (
        f"With {power['n']} utterances, a true difference below about "
        f"{100 * power['absolute']:.1f} points would often be missed."
    )


def names_sentence(rows: Sequence[Row]) -> str:
    """Return a sentence on the names of the paper's methods that were compared."""
    families = group_families(rows)
    methods = {family.method for family in families}
    meanings = [text for method, text in NAMES.items() if method in methods]
    if any(family.num_candidates > 1 for family in families):
        meanings.append(NUM_CANDIDATES)
    sentences = [f"{'; '.join(meanings)}."] if meanings else []
    sentences.append(
        "Word errors: wrong, missing or added words in the transcript, per 100 words of the text."
    )
    return " ".join(sentences)


def best_sentence(rows: Sequence[Row], axis: str) -> str:
    """Return the Pareto front in words: the method with fewest word errors, its speed, and the
    faster ones."""
    unit = SPEED_AXES[axis][1] or " tokens per pass"
    front = [
        f"{short_name(r['method'])} ({100 * r['wer']:.1f} %, {r[axis]:.2f}{unit})"
        for r in front_rows(rows, axis)
    ]
    faster = "No method is faster."
    if len(front) > 1:
        faster = f"Faster, with more errors: {', '.join(front[1:])}."
    return f"Fewest word errors: {front[0]}. {faster}"


def unsteady_times(rows: Sequence[Row], axis: str) -> str:
    """Return a warning if the speed-up of a method varies much between sentences; else nothing."""
    name = f"{axis}_quartiles"
    wild = [r for r in rows if r.get(name) and r[name][1] > UNSTEADY * r[name][0]]
    if not wild:
        return ""
    worst = max(wild, key=lambda r: r[name][1] / r[name][0])
    return (
        "The measured speeds are unreliable: the machine was busy, or too few sentences were timed "
        f"({worst['timed_n']}). Half of the times of {short_name(worst['method'])} are outside "
        f"{worst[name][0]:.2f} to {worst[name][1]:.2f}{SPEED_AXES[axis][1]}. Tokens per pass do "
        "not depend on the machine."
    )
