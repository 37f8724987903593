"""Rows of a comparison, made from records, one per method: error rates and tests, passes and
acceptance, speed; and word error rates by length of the utterance and by kind of text."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dcar.text.bootstrap import RESAMPLES, Interval, corpus_interval
from eval.methods.families import family_of, setting_text
from eval.methods.kinds import KINDS
from eval.methods.spec import split_sampling
from eval.results.stats import PairedTest, paired_test, utterances_needed
from eval.results.store import Record, by_method, errors_of
from eval.results.timing import speedup, speedup_quartiles, summarize
from eval.results.variety import variety

Row = dict[str, Any]
Sums = Mapping[str, tuple[float, float]]
Measure = Callable[[Record], tuple[float, float] | None]
"""Function that returns the count in a record and the total that it is out of; None if there is
nothing to count."""

FAR, CAR1, SD = {"method": "far"}, {"method": "car", "size": 1}, {"method": "sd"}
MOST_BINS = 4
FEWEST = 3  # utterances of a bin


def wrong(record: Record, of: str = "words") -> tuple[float, float]:
    """Return the number of wrong words, or characters, and of those in the reference."""
    errors = errors_of(record, of)
    return errors.errors, errors.reference_words


def scored(record: Record, name: str) -> tuple[float, float] | None:
    """Return a scorer's score and a count of 1; None if it had nothing to score."""
    score = record["scores"][name]
    return None if score is None else (score, 1)


def by_utterance(records: Sequence[Record], of: Measure = wrong) -> dict[str, tuple[float, float]]:
    """Sum a measure over the seeds and prompts of each utterance, in the order of their ids."""
    sums: dict[str, tuple[float, float]] = {}
    for r in records:
        if (counted := of(r)) is not None:
            count, total = sums.get(r["id"], (0, 0))
            sums[r["id"]] = count + counted[0], total + counted[1]
    return dict(sorted(sums.items()))


def corpus_rate(sums: Sums, resamples: int) -> Interval:
    """Return the summed counts divided by the summed totals, with the interval of the bootstrap
    over utterances."""
    return corpus_interval(*zip(*sums.values(), strict=True), resamples=resamples)


def compare_records(a: Sequence[Record], b: Sequence[Record], resamples: int) -> PairedTest:
    """Test the word errors of two methods' records, a - b, paired by the utterances that both
    have."""
    mine, theirs = by_utterance(a), by_utterance(b)
    shared = [i for i in mine if i in theirs]
    return paired_test(
        [mine[i][0] for i in shared],
        [mine[i][1] for i in shared],
        [theirs[i][0] for i in shared],
        [theirs[i][1] for i in shared],
        resamples=resamples,
    )


def make_rows(
    records: Sequence[Record],
    methods: Sequence[str],
    timings: Sequence[dict[str, Any]] = (),
    resamples: int = 4000,
    scorers: Sequence[str] = (),
    distances: np.ndarray | None = None,
) -> list[Row]:
    """Make one row per method, in the order of `methods`. Reference rows (recording, resynthesis)
    have no passes or times.

    Errors are tested against baselines of the same sampling (FAR, CAR-1, the best CAR-k, …; none if
    it was not run), on the utterances that both methods have; times against one FAR and one CAR-1
    for all rows, those of the common sampling if present. Error counts of an utterance are summed
    over its seeds and prompts before anything is resampled. scorers: names of the scores in the
    records, for `row["scores"]`. distances: of the codes [V, V], for `row["variety"]`.
    """
    grouped = by_method(records)
    rows = [
        {
            **_row(m, grouped[m], timings, resamples, distances),
            "scores": _scores(grouped[m], scorers, resamples),
        }
        for m in methods
    ]
    spoken = [r for r in rows if r["kind"] == "method"]
    clocks = {"far": find_method(spoken, FAR), "car1": find_method(spoken, CAR1)}
    for row in spoken:
        own, sampling = split_sampling(row["settings"])
        alike = [r for r in spoken if split_sampling(r["settings"])[1] == sampling]
        cars = [r for r in alike if r["settings"]["method"] == "car"]
        best = min(cars, key=lambda r: (-r["n"], r["wer"]), default=None)
        random = next((r for r in alike if r["settings"]["method"] == "random"), None)
        kind = KINDS.get(own["method"])
        baselines = {
            "far": find_method(alike, FAR),
            "car1": find_method(alike, CAR1),
            "best_car": best,
            "sd": strict_baseline(row, alike),
            "random": random if kind and kind.policies else None,  # what a policy must beat
        }
        for label, other in baselines.items():
            test = None
            if other is not None and other is not row:
                test = compare_records(grouped[row["method"]], grouped[other["method"]], resamples)
            row[f"difference_vs_{label}"] = test and test.difference
            row[f"difference_vs_{label}_ci"] = test and test.ends
            row[f"p_vs_{label}"] = test and test.p_value
            row[f"detectable_vs_{label}"] = test and test.detectable
        for label, name in (
            ("best_car", "best_car"),
            ("sd", "sd_baseline"),
            ("random", "random_baseline"),
        ):
            other = baselines[label]
            row[name] = other and other["method"]
        for label, clock in clocks.items():
            row[f"speedup_vs_{label}"] = speedup(row, clock, "rtf")
            row[f"lm_speedup_vs_{label}"] = speedup(row, clock, "lm_rtf")
            row[f"speedup_vs_{label}_quartiles"] = clock and speedup_quartiles(
                timings, row["method"], clock["method"]
            )
    return rows


def find_method(rows: Sequence[Row], own: Mapping[str, Any]) -> Row | None:
    """Return the row of the method with these settings, the common sampling before others."""
    matching = [r for r in rows if split_sampling(r["settings"])[0] == own]
    return min(matching, key=lambda r: len(split_sampling(r["settings"])[1]), default=None)


def strict_baseline(row: Row, alike: Sequence[Row]) -> Row | None:
    """Return the lossless method that a relaxed verifier is compared with: `sd` with the same
    draft, else `sd`. alike: the rows of the same sampling, because a verifier relaxes the target's
    distribution at that temperature."""
    settings = row["settings"]
    kind = KINDS.get(settings["method"])
    if kind is None or not kind.verifies or settings["method"] == "sd":
        return None
    draft = {name: settings[name] for name in ("draft", "length") if name in settings}
    return find_method(alike, {**SD, **draft}) or find_method(alike, SD)


def _row(
    method: str,
    records: Sequence[Record],
    timings: Sequence[dict[str, Any]],
    resamples: int,
    distances: np.ndarray | None,
) -> Row:
    words = by_utterance(records)
    wer = corpus_rate(words, resamples)
    cer = corpus_rate(by_utterance(records, partial(wrong, of="characters")), resamples)
    errors = [errors_of(r) for r in records]
    reference_words = sum(e.reference_words for e in errors)
    recorded = sum(r["reference_duration"] for r in records)  # 0 where texts have no recordings
    settings = records[0]["settings"]
    row: Row = {
        "method": method,
        "settings": settings,
        "kind": "reference" if settings is None else "method",
        "wer": wer.value,
        "wer_ci": wer.ends,
        "wer_se": wer.standard_error,
        "wer_capped": sum(min(e.errors, e.reference_words) for e in errors) / reference_words,
        "cer": cer.value,
        "cer_ci": cer.ends,
        "substitutions": sum(e.substitutions for e in errors),
        "deletions": sum(e.deletions for e in errors),
        "insertions": sum(e.insertions for e in errors),
        "reference_words": reference_words,
        "empty_transcripts": sum(not r["hypothesis"].strip() for r in records),
        "duration_ratio": sum(r["duration"] for r in records) / recorded if recorded else None,
        "n": len(words),
        "seeds": len({r["seed"] for r in records}),
        "records": len(records),
        "prompts": len({r.get("prompt_seed") for r in records}),
    }
    if settings is not None:
        passes, tokens = sum(r["passes"] for r in records), sum(len(r["tokens"]) for r in records)
        sizes = Counter(size for r in records for size in r["sizes"])
        total = sum(sizes.values())
        row |= {
            "family": family_of(settings).label,
            "setting": setting_text(settings),
            "tokens_per_pass": tokens / passes,
            "passes": passes / len(records),  # per utterance and seed, as the next two
            "draft_passes": sum(r["draft_passes"] for r in records) / len(records),
            "tokens": tokens / len(records),
            "sizes": {str(size): sizes[size] / total for size in sorted(sizes)},
            "truncation_rate": sum(r["truncated"] for r in records) / len(records),
            **acceptance(records, resamples),
            **variety(records, distances, resamples),
            **summarize(timings, method),
            "timed_n": sum(t["method"] == method for t in timings),
        }
    return row


def _scores(
    records: Sequence[Record], scorers: Sequence[str], resamples: int
) -> dict[str, dict[str, Any]]:
    """Return, by scorer, the mean over the records that have a score, its interval and standard
    error by the bootstrap over utterances (all seeds of one stay together), and the numbers of
    utterances and records."""
    scores = {}
    for name in scorers:
        sums = by_utterance(records, partial(scored, name=name))
        mean = corpus_rate(sums, resamples) if sums else None
        scores[name] = {
            "mean": mean and mean.value,
            "ci": mean and mean.ends,
            "standard_error": mean and mean.standard_error,
            "n": len(sums),
            "records": sum(count for _, count in sums.values()),
        }
    return scores


def acceptance(records: Sequence[dict[str, Any]], resamples: int = RESAMPLES) -> dict[str, Any]:
    """Return the fields of a table row that describe verification; None if the method verifies
    nothing.

    accepted and its interval: share of the proposed tokens, bootstrap over utterances.
    accepted_per_pass: mean of a verifying pass. accepted_by_position: dicts of position (from 1),
    judged, accepted (counts) and rate, up to the last position that was ever judged. Every
    verifying pass checks drafted tokens in order and stops at the first rejection, so the i-th is
    judged only if the i - 1 before it were accepted. The rate at i is accepted at i / judged at i;
    it falls with i if the draft gets worse, and shows up to which length a draft is worth its cost.
    A tree offers several tokens per position, and a pass counts as one: its rate at depth i is the
    share of the passes reaching depth i that got past it.
    """
    sums = by_utterance(
        records, lambda r: (sum(r["accepted"]), sum(r["proposed"])) if r["proposed"] else None
    )
    if not sums:
        return dict.fromkeys(
            ("accepted", "accepted_ci", "accepted_per_pass", "accepted_by_position")
        )
    rate = corpus_rate(sums, resamples)
    rounds = [
        (p, a) for r in records for p, a in zip(r["proposed"], r["accepted"], strict=True) if p
    ]
    by_position = []
    for position in range(1, max(p for p, _ in rounds) + 1):
        judged = sum(p >= position and a >= position - 1 for p, a in rounds)
        if not judged:
            break
        accepted = sum(a >= position for _, a in rounds)
        by_position.append(
            {
                "position": position,
                "judged": judged,
                "accepted": accepted,
                "rate": accepted / judged,
            }
        )
    return {
        "accepted": rate.value,
        "accepted_ci": rate.ends,
        "accepted_per_pass": sum(a for _, a in rounds) / len(rounds),
        "accepted_by_position": by_position,
    }


def power_statement(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the difference that this experiment could detect between a method and the best CAR of
    the first sampling, from the median paired standard error of those that decoded as many
    utterances; None if no method is tested against it, or none differs from it."""
    best = next((r for r in rows if r["method"] == r.get("best_car")), None)
    if best is None or best["wer"] <= 0:
        return None
    tested = [r for r in rows if r.get("best_car") == best["method"] and r is not best]
    whole = [r["detectable_vs_best_car"] for r in tested if r["n"] == best["n"]]
    absolute = float(np.median([d for d in whole if d is not None] or [0.0]))
    if not absolute:
        return None
    return {
        "baseline": best["method"],
        "baseline_wer": best["wer"],
        "absolute": absolute,
        "relative": absolute / best["wer"],
        "power": 0.8,
        "significance": 0.05,
        "n": best["n"],
        "seeds": best["seeds"],
        "tests": sum(r["p_vs_best_car"] is not None for r in tested),
        "utterances_for_10_percent": utterances_needed(best["n"], absolute, 0.1 * best["wer"]),
    }


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
    records: Sequence[dict[str, Any]], methods: Sequence[str], resamples: int = RESAMPLES
) -> dict[str, Any] | None:
    """Return `bins` (words: shortest and longest, n: utterances) and, by method, corpus WER and its
    95 % interval in each.

    The length is that of the reference, in words as counted by the normaliser of WER. None if the
    utterances are too few or too similar for two bins.
    """
    words = {r["id"]: errors_of(r).reference_words for r in records}
    bins = [
        ({"words": [low, high]}, sorted(i for i, n in words.items() if low <= n <= high))
        for low, high in length_bins(list(words.values()))
    ]
    return _binned(records, methods, bins, resamples)


def by_category(
    records: Sequence[dict[str, Any]],
    methods: Sequence[str],
    categories: Mapping[str, str],
    resamples: int = RESAMPLES,
) -> dict[str, Any] | None:
    """Return the same by kind of text: `bins` (category, n: utterances), in the order of their
    names. categories: by utterance id. None if there are fewer than two."""
    bins = [
        (
            {"category": name or "none"},
            sorted(i for i, category in categories.items() if category == name),
        )
        for name in sorted(set(categories.values()))
    ]
    return _binned(records, methods, bins, resamples)


def _binned(
    records: Sequence[dict[str, Any]],
    methods: Sequence[str],
    bins: Sequence[tuple[dict[str, Any], list[str]]],
    resamples: int,
) -> dict[str, Any] | None:
    """Return the rates in each bin, of the methods that decoded all utterances. bins: the
    description of each, and the ids of its utterances."""
    if len(bins) < 2:
        return None
    grouped, rates_of = by_method(records), {}
    for method in methods:
        sums = by_utterance(grouped[method])
        if any(i not in sums for _, ids in bins for i in ids):
            continue
        rates = [corpus_rate({i: sums[i] for i in ids}, resamples) for _, ids in bins]
        rates_of[method] = [{"wer": rate.value, "ci": rate.ends} for rate in rates]
    return {"bins": [{**about, "n": len(ids)} for about, ids in bins], "methods": rates_of}
