"""Rows of a comparison, made from records, one per method: error rates and tests, passes and
acceptance, speed; and word error rates by length of the utterance and by kind of text."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dcar.decoding.declare import has_setting
from dcar.methods.find import class_of
from dcar.methods.names import split_sampling
from dcar.sampling import SamplingConfig
from dcar.text.bootstrap import RESAMPLES, Interval, corpus_interval
from dcar.text.languages import error_rate_of
from dcar.text.wer import WordErrors
from eval.methods.families import family_of, setting_text
from eval.results.stats import PairedTest, paired_test, utterances_needed
from eval.results.timing import speed_of, speedup
from eval.results.types import (
    Acceptance,
    Bins,
    Position,
    Power,
    Record,
    Row,
    Score,
    Timing,
)
from eval.results.variety import variety

Settings = Mapping[str, Any]
FAR: dict[str, Any] = {"method": "far"}
CAR1: dict[str, Any] = {"method": "car", "size": 1}
SD: dict[str, Any] = {"method": "sd"}
MOST_BINS = 4
FEWEST = 3  # utterances of a bin


class Counts(NamedTuple):
    """Errors and words [U] of a method by utterance, summed over seeds and prompts, in the order
    of the utterances' ids."""

    errors: np.ndarray
    words: np.ndarray


def frame_of(records: Sequence[Record]) -> pd.DataFrame:
    """Return a line per record: method, id, and the counts of wrong words and characters."""
    return pd.DataFrame(
        {
            "method": [r.method for r in records],
            "id": [r.id for r in records],
            "wrong_words": [r.words.errors for r in records],
            "words": [r.words.reference_words for r in records],
            "wrong_characters": [r.characters.errors for r in records],
            "characters": [r.characters.reference_words for r in records],
        }
    )


def counts_of(records: Sequence[Record], of: str = "words") -> dict[str, Counts]:
    """Return the counts of every method, of words or of characters. All methods must have the same
    utterances."""
    sums = frame_of(records).groupby(["method", "id"])[[f"wrong_{of}", of]].sum()
    return {
        str(method): Counts(*by_id.to_numpy(np.float64).T)
        for method, by_id in sums.groupby("method")
    }


def compare_records(
    a: Sequence[Record], b: Sequence[Record], resamples: int = RESAMPLES
) -> PairedTest:
    """Test the word errors of two methods' records, a - b, paired by the utterances that both
    have."""
    mine, theirs = (frame_of(of).groupby("id")[["wrong_words", "words"]].sum() for of in (a, b))
    both = mine.merge(theirs, on="id", suffixes=("_a", "_b"))
    return paired_test(*both.to_numpy(np.float64).T, resamples=resamples)


def make_rows(
    records: Sequence[Record],
    methods: Sequence[str],
    timings: Sequence[Timing] = (),
    resamples: int = RESAMPLES,
    scorers: Sequence[str] = (),
    distances: np.ndarray | None = None,
    samplings: Mapping[str, SamplingConfig] | None = None,
) -> list[Row]:
    """Make one row per method, in the order of `methods`, all on the same utterances. Reference
    rows (recording, resynthesis) have no passes or times.

    Errors are tested against baselines of the same sampling (FAR, CAR-1, the best CAR-k, …; none if
    it was not run); times against one FAR and one CAR-1 for all rows, those of the common sampling
    if present. Error counts of an utterance are summed over its seeds and prompts before anything
    is resampled. scorers: names of the scores in the records. distances: of the codes [V, V], for
    variety. samplings: of the methods.
    """
    words, characters = counts_of(records), counts_of(records, "characters")
    rows = []
    for method in methods:
        mine = [r for r in records if r.method == method]
        row = _row(method, mine, words[method], characters[method], resamples)
        row.scores = {name: _score(mine, name, resamples) for name in scorers}
        if row.decodes:
            _add_decoding(row, mine, resamples, distances)
            row.speed = speed_of(timings, method)
            row.sampling = (samplings or {}).get(method)
        rows.append(row)
    spoken = [row for row in rows if row.decodes]
    clocks = {"far": _find(spoken, FAR), "car1": _find(spoken, CAR1)}
    for row in spoken:
        for label, other in _baselines(row, spoken).items():
            if other is not None and other is not row:
                test = paired_test(*words[row.method], *words[other.method], resamples=resamples)
                row.tests[label] = replace(test, baseline=other.method)
        for label, clock in clocks.items():
            if clock and (gain := speedup(timings, row.method, clock.method)):
                row.speedups[label] = gain
    return rows


def _row(
    method: str, records: Sequence[Record], words: Counts, characters: Counts, resamples: int
) -> Row:
    """Return the part of a row that a reference has too."""
    errors = [r.words for r in records]
    names = ("substitutions", "deletions", "insertions", "reference_words")
    total = WordErrors(*(sum(getattr(e, name) for e in errors) for name in names))
    recorded = sum(r.reference_duration for r in records)  # 0 where texts have no recordings
    return Row(
        method=method,
        spec=records[0].spec,
        n=len(words.words),
        seeds=len({r.seed for r in records}),
        prompts=len({r.prompt_seed for r in records}),
        records=len(records),
        wer=corpus_interval(*words, resamples=resamples),
        cer=corpus_interval(*characters, resamples=resamples),
        wer_capped=sum(min(e.errors, e.reference_words) for e in errors) / total.reference_words,
        errors=total,
        error_rate=error_rate_of({r.language for r in records}),
        empty_transcripts=sum(not r.hypothesis.strip() for r in records),
        duration_ratio=sum(r.duration for r in records) / recorded if recorded else None,
        scores={},
    )


def _add_decoding(
    row: Row, records: Sequence[Record], resamples: int, distances: np.ndarray | None
) -> None:
    """Fill in the fields that only a method has."""
    assert row.spec is not None
    decoded = [r.decoded for r in records if r.decoded is not None]
    passes, tokens = sum(d.passes for d in decoded), sum(len(r.tokens) for r in records)
    sizes = Counter(size for d in decoded for size in d.sizes)
    row.family, row.setting = family_of(row.spec), setting_text(row.spec)
    row.tokens_per_pass = tokens / passes
    row.passes = passes / len(records)
    row.draft_passes = sum(d.draft_passes for d in decoded) / len(records)
    row.tokens = tokens / len(records)
    row.sizes = {size: sizes[size] / sizes.total() for size in sorted(sizes)}
    row.truncation_rate = sum(d.truncated for d in decoded) / len(records)
    row.acceptance = acceptance(records, resamples)
    row.variety = variety(records, distances, resamples)


def _baselines(row: Row, spoken: Sequence[Row]) -> dict[str, Row | None]:
    """Return the rows of the same sampling that a method is tested against."""
    own, sampling = split_sampling(row.spec or {})
    alike = [r for r in spoken if split_sampling(r.spec or {})[1] == sampling]
    by_name = [((r.spec or {})["method"], r) for r in alike]
    fixed = [r for r in alike if r.family and r.family.fixed]
    follows_policy = has_setting(class_of(own["method"]), "policy")
    return {
        "far": _find(alike, FAR),
        "car1": _find(alike, CAR1),
        "best_car": min(fixed, key=lambda r: r.wer.value, default=None),
        "sd": strict_baseline(row, alike),
        # what a policy must beat
        "random": next((r for name, r in by_name if name == "random" and follows_policy), None),
    }


def _find(rows: Sequence[Row], own: Settings) -> Row | None:
    """Return the row of the method with these settings, the common sampling before others."""
    matching = [r for r in rows if split_sampling(r.spec or {})[0] == own]
    return min(matching, key=lambda r: len(split_sampling(r.spec or {})[1]), default=None)


def strict_baseline(row: Row, alike: Sequence[Row]) -> Row | None:
    """Return the lossless method that a relaxed verifier is compared with: `sd` with the same
    draft, else `sd`. alike: the rows of the same sampling, because a verifier relaxes the target's
    distribution at that temperature."""
    settings = row.spec or {}
    if not class_of(settings["method"]).verifies or settings["method"] == "sd":
        return None
    draft = {name: settings[name] for name in ("draft", "length") if name in settings}
    return _find(alike, SD | draft) or _find(alike, SD)


def _score(records: Sequence[Record], name: str, resamples: int) -> Score:
    """Return the mean of a scorer over the records that have a score, with the interval of the
    bootstrap over utterances (all seeds of one stay together)."""
    scores = pd.Series([r.scores[name] for r in records], dtype=float)
    sums = scores.groupby([r.id for r in records]).agg(["sum", "count"])
    sums = sums[sums["count"] > 0]
    mean = corpus_interval(*sums.to_numpy().T, resamples=resamples) if len(sums) else None
    return Score(mean, len(sums), int(sums["count"].sum()))


def acceptance(records: Sequence[Record], resamples: int = RESAMPLES) -> Acceptance | None:
    """Return how drafts were verified; None if the method verifies nothing.

    Every verifying pass checks drafted tokens in order and stops at the first rejection, so the
    i-th is judged only if the i - 1 before it were accepted. The rate at i is accepted at i /
    judged at i; it falls with i if the draft gets worse, and shows up to which length a draft is
    worth its cost. Positions go up to the last one that was ever judged. A tree offers several
    tokens per position, and a pass counts as one: its rate at depth i is the share of the passes
    reaching depth i that got past it. The interval of the share is that of the bootstrap over
    utterances.
    """
    rounds = pd.DataFrame(
        [
            (r.id, proposed, accepted)
            for r in records
            if r.decoded is not None
            for proposed, accepted in zip(r.decoded.proposed, r.decoded.accepted, strict=True)
            if proposed
        ],
        columns=["id", "proposed", "accepted"],
    )
    if rounds.empty:
        return None
    sums = rounds.groupby("id")[["accepted", "proposed"]].sum()
    by_position = []
    for position in range(1, int(rounds.proposed.max()) + 1):
        judged = rounds[(rounds.proposed >= position) & (rounds.accepted >= position - 1)]
        if judged.empty:
            break
        passed = int((judged.accepted >= position).sum())
        by_position.append(Position(position, len(judged), passed))
    share = corpus_interval(*sums.to_numpy().T, resamples=resamples)
    return Acceptance(share, float(rounds.accepted.mean()), by_position)


def power_of(rows: Sequence[Row]) -> Power | None:
    """Return the difference that this experiment could detect between a method and the best CAR of
    the first sampling, from the median of its tests; None if no method is tested against it, or
    none differs from it."""
    named = {test.baseline for r in rows if (test := r.tests.get("best_car"))}
    best = next((r for r in rows if r.method in named), None)
    if best is None or best.wer.value <= 0:
        return None
    tests = [r.tests["best_car"] for r in rows if "best_car" in r.tests]
    tests = [test for test in tests if test.baseline == best.method]
    absolute = float(np.median([t.detectable for t in tests if t.detectable is not None] or [0.0]))
    if not absolute:
        return None
    return Power(
        best.method,
        best.wer.value,
        absolute,
        best.n,
        best.seeds,
        sum(test.p_value is not None for test in tests),
        utterances_needed(best.n, absolute, 0.1 * best.wer.value),
    )


def length_bins(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranges of words, inclusive, that divide the utterances about evenly.

    There are at most MOST_BINS, each of at least FEWEST utterances; utterances of one length are
    never separated. The result has one range or none if there is nothing to separate.
    """
    ordered = sorted(lengths)
    count = min(MOST_BINS, len(ordered) // FEWEST)
    bins: list[tuple[int, int]] = []
    start = 0
    while start < len(ordered) and count:
        end = start + max(FEWEST, round((len(ordered) - start) / (count - len(bins))))
        end = bisect_right(ordered, ordered[end - 1])
        if len(ordered) - end < FEWEST:
            end = len(ordered)
        bins.append((ordered[start], ordered[end - 1]))
        start = end
    return bins


def by_length(
    records: Sequence[Record], methods: Sequence[str], resamples: int = RESAMPLES
) -> Bins | None:
    """Return corpus WER by the length of the reference, in words as counted by the normaliser of
    WER. None if the utterances are too few or too similar for two bins."""
    words = {r.id: r.words.reference_words for r in records}
    labels: dict[str, str] = {}
    for low, high in length_bins(list(words.values())):
        label = f"{low} words" if low == high else f"{low}–{high} words"
        labels |= {i: label for i, n in words.items() if low <= n <= high}
    order = sorted(set(labels.values()), key=lambda label: int(label.split()[0].split("–")[0]))
    return _binned(records, methods, labels, order, resamples)


def by_category(
    records: Sequence[Record],
    methods: Sequence[str],
    categories: Mapping[str, str],
    resamples: int = RESAMPLES,
) -> Bins | None:
    """Return corpus WER by kind of text, in the order of their names. categories: by utterance id.
    None if there are fewer than two."""
    labels = {i: category or "none" for i, category in categories.items()}
    order = [category or "none" for category in sorted(set(categories.values()))]
    return _binned(records, methods, labels, order, resamples)


def _binned(
    records: Sequence[Record],
    methods: Sequence[str],
    labels: Mapping[str, str],
    order: Sequence[str],
    resamples: int,
) -> Bins | None:
    """Return the rates of the utterances of each label."""
    if len(order) < 2:
        return None
    frame = frame_of(records)
    frame["label"] = frame["id"].map(labels)
    sums = frame.groupby(["method", "label", "id"])[["wrong_words", "words"]].sum()

    def rate(method: str, label: str) -> Interval:
        errors, words = sums.loc[(method, label)].to_numpy(np.float64).T
        return corpus_interval(errors, words, resamples=resamples)

    sizes = Counter(labels.values())
    return Bins(
        list(order),
        [sizes[label] for label in order],
        {method: [rate(method, label) for label in order] for method in methods},
    )
