"""Word error rate by length of the utterance: which method breaks on long sentences, and which on short ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcar.text.bootstrap import RESAMPLES, corpus_interval

MOST_BINS = 4
FEWEST = 3  # utterances of a bin


def length_bins(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of words, shortest and longest included, that share the utterances out about evenly.

    At most MOST_BINS, each of at least FEWEST utterances; those of one length are never parted. One bin or none where
    there is nothing to set apart.
    """
    ordered = sorted(lengths)
    count = min(MOST_BINS, len(ordered) // FEWEST)
    bins: list[tuple[int, int]] = []
    start = 0
    for left in range(count, 0, -1):
        end = start + max(FEWEST, round((len(ordered) - start) / left))
        while end < len(ordered) and ordered[end] == ordered[end - 1]:
            end += 1
        if left == 1 or len(ordered) - end < FEWEST:
            end = len(ordered)
        bins.append((ordered[start], ordered[end - 1]))
        start = end
        if start == len(ordered):
            break
    return bins


def by_length(records: Sequence[dict[str, Any]], methods: Sequence[str],
              resamples: int = RESAMPLES) -> dict[str, Any] | None:
    """`bins` (words: shortest and longest, n: utterances) and, by method, corpus WER and its 95 % interval in each.

    The length is that of the reference, in words as the judge's normaliser counts them. None where the utterances are
    too few, or too alike, for two bins.
    """
    words = {r["id"]: r["words"][3] for r in records}
    bins = length_bins(list(words.values()))
    if len(bins) < 2:
        return None
    chosen = [sorted(i for i, n in words.items() if low <= n <= high) for low, high in bins]
    found: dict[str, list[dict[str, Any]]] = {}
    for method in methods:
        errors: dict[str, int] = {}
        units: dict[str, int] = {}
        for r in (r for r in records if r["method"] == method):
            errors[r["id"]] = errors.get(r["id"], 0) + sum(r["words"][:3])
            units[r["id"]] = units.get(r["id"], 0) + r["words"][3]
        found[method] = []
        for ids in chosen:
            rate = corpus_interval([errors[i] for i in ids], [units[i] for i in ids], resamples=resamples)
            found[method].append({"wer": rate.value, "ci": [rate.low, rate.high]})
    return {"bins": [{"words": list(b), "n": len(ids)} for b, ids in zip(bins, chosen, strict=True)],
            "methods": found}
