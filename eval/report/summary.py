"""Summary of a comparison in a few sentences: the verdict, for the terminal and the head of the
report; caveats; and commands to try next."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.methods.families import short_name
from eval.report.blocks import Picture, Table, file_uri
from eval.report.table import (
    CLOCK,
    DETECTABLE,
    TESTED,
    aligned,
    best_row,
    clipped,
    corpus_kind,
    nearest_rows,
    number,
    pair_row,
    short_table,
    variety_row,
)
from eval.results.equal_variety import missing, variety_of
from eval.results.pareto import AXES, families_of, front_rows, points, speed_axis
from eval.results.training import SHIPPED
from eval.results.types import Measured, Pair, Result, Row

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
FEW = 2  # policies that are compared with the best fixed size in sentences; more are in the table
TESTED_NAME = 20  # characters of the first column of TESTED in the terminal, at most
TESTED_NOTE = (
    "Points: percentage points of errors, policy − fixed sizes, averaged over the speeds that both "
    f"reach. {DETECTABLE}"
)
NUM_CANDIDATES = "@n gives the number of candidates that the policy chooses among"


@dataclass(frozen=True)
class Verdict:
    """Statement of a comparison on its policies: sentences, and a table of their differences from
    fixed sizes that are as fast or as varied."""

    sentences: list[str]
    tests: Table | None = None


@dataclass(frozen=True)
class Summary:
    """Head of the page, above its first table."""

    verdict: list[Verdict]
    note: str
    best: str
    names: str
    chance: str
    methods: int
    corpus: str
    warnings: list[str]
    picture: Picture


def summary(result: Result, folder: Path) -> Summary:
    """Summarise the comparisons; `folder` holds the pictures."""
    first = result.first
    axis = speed_axis(first.spoken) or "tokens_per_pass"
    training = result.training
    # the sentence on the shipped decoders is no warning; it is in the notes
    warnings = ["" if training == SHIPPED else training, unsteady_times(first.spoken, axis)]
    name = "compare.png" if axis == "tokens_per_pass" else "compare_speed.png"
    picture = Picture(
        f"Word errors at equal {AXES[axis].quantity}", file_uri(folder / name), CAPTION
    )
    verdicts = verdict(result)
    return Summary(
        verdicts,
        TESTED_NOTE if any(of.tests for of in verdicts) else "",
        best_sentence(first.spoken, axis),
        names_sentence(result),
        chance(first),
        len(result.methods),
        corpus_kind(result),
        list(filter(None, warnings)),
        picture,
    )


def verdict(result: Result) -> list[Verdict]:
    """State for each set of texts what the policies gain over the best fixed size, and what other
    decoders do without one; then compare DCAR with CAR-k at equal tokens per pass and at equal
    time, and the policies with fixed sizes of the same variety, or else with those of each further
    sampling. Nothing is said if one of the two was not compared; a part of a set of texts says what
    its whole does not compare. Last, what the first set lacks for equal variety."""
    said: set[tuple[str, str, str]] = set()
    verdicts = []
    for measured in result.comparisons:
        best = against_best(measured) if measured.whole else []
        few = len(best) <= FEW
        sentences = [plain(measured, *pair) for pair in best] if few else []
        if best:
            sentences += other_decoders(measured)
        rows = [] if few else [best_row(*pair) for pair in best]
        for pairs in _policy_pairs(measured):
            key = (measured.texts, pairs[0].a.label, pairs[0].b.label)
            if key not in said:
                said.add(key)
                rows += map(pair_row, pairs)
        for of in measured.equal_variety:
            if of.test and (measured.texts, of.axis, of.method) not in said:
                said.add((measured.texts, of.axis, of.method))
                rows.append(variety_row(of, measured.rows))
        tests = Table(f"{measured.title.capitalize()}: policies − fixed sizes", TESTED, rows)
        verdicts.append(Verdict(sentences, tests if rows else None))
    verdicts[0].sentences.extend(missing(result.first.equal_variety))
    return verdicts


def against_best(measured: Measured) -> list[tuple[Row, Row]]:
    """Return every policy without a dial, with the best fixed size of its sampling."""
    by_name = {row.method: row for row in measured.spoken}
    return [
        (row, by_name[row.tests["best_car"].baseline])
        for row in measured.spoken
        if row.family
        and row.family.method == "dcar"
        and "best_car" in row.tests
        and "dial" not in (row.spec or {})
    ]


def plain(measured: Measured, row: Row, best: Row) -> str:
    """Return a policy's errors, passes, time and variety next to those of the best fixed size."""
    return (
        f"{measured.title.capitalize()}: {_name(row)} makes {100 * row.wer.value:.1f} % errors, "
        f"the best fixed size, {_name(best)}, {100 * best.wer.value:.1f} %: "
        f"{points(row.tests['best_car'])}{_savings(row, best)}{_varieties(row, best)}."
    )


def other_decoders(measured: Measured) -> list[str]:
    """Return a sentence on the fixed sizes of other decoders, if there are any."""
    others = [
        f"{_name(row)} makes {100 * row.wer.value:.1f} % ({number(row.tokens_per_pass)} tokens per "
        f"pass{_varieties(row)})"
        for row in measured.spoken
        if row.family and row.family.decoder
    ]
    return [f"Without a policy, by another decoder: {'; '.join(others)}."] if others else []


def _name(row: Row) -> str:
    return short_name(row.method, row.spec or {})


def _savings(row: Row, other: Row) -> str:
    """Return the passes and the time that a method saves or adds, as far as they are known."""
    ratios = []
    if row.passes and other.passes:
        ratios.append((row.passes / other.passes, "passes", "fewer"))
    if row.speed and other.speed:
        ratios.append((row.speed.rtf / other.speed.rtf, "time", "less"))
    words = []
    for ratio, what, less in ratios:
        percent = round(100 * abs(ratio - 1))
        words.append(
            f"{percent} % {less if ratio < 1 else 'more'} {what}" if percent else f"equal {what}"
        )
    return f", with {' and '.join(words)}" if words else ""


def _varieties(*rows: Row) -> str:
    varieties = [variety_of(row) for row in rows]
    if None in varieties:
        return ""
    return f"; variety {' against '.join(f'{variety:.3f}' for variety in varieties)}"


def _policy_pairs(measured: Measured) -> Iterator[list[Pair]]:
    """Iterate over the comparisons of every policy with CAR-k at the same sampling, and with CAR-k
    at others unless some have fixed sizes of the same variety; of each, the one at equal tokens per
    pass first."""
    families = families_of(measured)
    fixed = [family for family in families if family.fixed]
    samplings = [family.sampling for family in fixed]
    varied = any(of.test for of in measured.equal_variety)
    pairs = sorted(measured.pairs, key=lambda pair: pair.axis != "tokens_per_pass")
    for policy in families:
        if policy.method != "dcar" or policy.sampling not in samplings:
            continue
        for family in sorted(fixed, key=lambda family: family.sampling != policy.sampling):
            both = [pair for pair in pairs if (pair.a, pair.b) == (policy, family)]
            if both and (family.sampling == policy.sampling or not varied):
                yield both


def terminal_text(result: Result, folder: Path) -> str:
    """Return the last output of `dcar compare`, in lines of at most WIDTH columns: for each
    comparison a table and what it says, then commands to try next."""
    first = result.first
    axis = speed_axis(first.spoken) or "tokens_per_pass"
    verdicts = verdict(result)
    lines = list[str]()
    for measured, of in zip(result.comparisons, verdicts, strict=True):
        if len(result.comparisons) > 1:
            lines.append(f"{measured.title.capitalize()}:")
        lines += [*short_table(nearest_rows(result, measured)), ""]
        for sentence in of.sentences:
            lines += textwrap.wrap(sentence, WIDTH)
        if of.tests:
            # the columns of TESTED fit in WIDTH
            rows = [[clipped(str(row[0]), TESTED_NAME), *row[1:]] for row in of.tests.rows]
            lines += [""] * bool(of.sentences)
            lines += aligned(replace(of.tests, rows=rows))
        lines += [""] * bool(of.sentences or of.tests)
    if not any(of.tests for of in verdicts):
        lines += [*textwrap.wrap(f"{best_sentence(first.spoken, axis)} {chance(first)}", WIDTH), ""]
    threads = f"{result.threads} torch thread" + ("s" if result.threads > 1 else "")
    notes = [
        TESTED_NOTE if any(of.tests for of in verdicts) else "",
        unsteady_times(first.spoken, axis),
        f"{CLOCK} Measured on: {result.device}, {threads}.",
    ]
    lines += (line for note in notes for line in textwrap.wrap(note, WIDTH))
    seeds = [*result.seeds, max(result.seeds) + 1]
    more = f"seeds=[{','.join(map(str, seeds))}]"
    if result.config["limit"] == first.utterances:
        more = f"limit={3 * first.utterances}"
    config_file, mine = (shlex.quote(str(p)) for p in (folder / "config.yaml", f"{folder}_mine"))
    return "\n".join(
        [
            *lines,
            f"Everything: {folder / 'compare.txt'}; with audio: {folder / 'report.html'}",
            f"More data: dcar compare --config {config_file} {more}",
            f"Your texts: dcar compare --config {config_file} texts=[my.txt] out={mine}",
        ]
    )


def chance(measured: Measured) -> str:
    """Return a sentence on the differences that so many utterances cannot show."""
    power = measured.power
    if not power:
        return ""
    return (
        f"With {power.n} utterances, a true difference below about {100 * power.absolute:.1f} "
        "points would often be missed."
    )


def names_sentence(result: Result) -> str:
    """Return a sentence on the names of the paper's methods that were compared."""
    families = [r.family for of in result.comparisons for r in of.spoken if r.family]
    methods = {family.method for family in families}
    meanings = [text for method, text in NAMES.items() if method in methods]
    meanings += [
        f"car-k:{other} decodes with another decoder, {other}"
        for other in dict.fromkeys(family.decoder for family in families if family.decoder)
    ]
    if any(family.num_candidates > 1 for family in families):
        meanings.append(NUM_CANDIDATES)
    sentences = [f"{'; '.join(meanings)}."] if meanings else []
    rates = {r.error_rate for of in result.comparisons for r in of.rows}
    counted = {"WER": "words", "CER": "characters"}
    units = " or ".join(dict.fromkeys(counted[r] for name in rates for r in name.split("/")))
    sentences.append(
        f"Errors: wrong, missing or added {units} in the transcript, per 100 {units} of the text."
    )
    return " ".join(sentences)


def best_sentence(rows: Sequence[Row], axis: str) -> str:
    """Return the Pareto front in words: the method with fewest word errors, its speed, and the
    faster ones."""
    unit = AXES[axis].unit or " tokens per pass"
    front = [
        f"{short_name(r.method, r.spec or {})} ({100 * r.wer.value:.1f} %, "
        f"{AXES[axis].of(r):.2f}{unit})"
        for r in front_rows(rows, axis)
    ]
    faster = "No method is faster."
    if len(front) > 1:
        faster = f"Faster, with more errors: {', '.join(front[1:])}."
    return f"Fewest errors: {front[0]}. {faster}"


def unsteady_times(rows: Sequence[Row], axis: str) -> str:
    """Return a warning if the speed-up of a method varies much between sentences; else nothing."""
    quartiles = {row.method: row.speedups[axis].quartiles for row in rows if axis in row.speedups}
    wild = [row for row in rows if (q := quartiles.get(row.method)) and q[1] > UNSTEADY * q[0]]
    if not wild:
        return ""
    worst = max(wild, key=lambda row: quartiles[row.method][1] / quartiles[row.method][0])
    low, high = quartiles[worst.method]
    return (
        "The measured speeds are unreliable: the machine was busy, or too few sentences were timed "
        f"({worst.speed.utterances if worst.speed else 0}). Half of the times of "
        f"{short_name(worst.method, worst.spec or {})} are outside {low:.2f} to "
        f"{high:.2f}{AXES[axis].unit}. Tokens per pass do not depend on the machine."
    )
