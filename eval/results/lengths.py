"""Word error rate by length of the utterance: which method breaks on long sentences, and which on short ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcar.text.bootstrap import RESAMPLES, corpus_interval
from eval.results.rows import by_utterance

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

    The length is that of the reference, in words as the normaliser of WER counts them. None where the utterances are
    too few, or too alike, for two bins.
    """
    words = {r["id"]: r["words"][3] for r in records}
    bins = length_bins(list(words.values()))
    if len(bins) < 2:
        return None
    chosen = [sorted(i for i, n in words.items() if low <= n <= high) for low, high in bins]
    found: dict[str, list[dict[str, Any]]] = {}
    for method in methods:
        errors, units, ids = by_utterance([r for r in records if r["method"] == method])
        counts = {name: (errors[i], units[i]) for i, name in enumerate(ids)}
        found[method] = []
        for some in chosen:
            rate = corpus_interval(*zip(*(counts[name] for name in some), strict=True), resamples=resamples)
            found[method].append({"wer": rate.value, "ci": [rate.low, rate.high]})
    return {"bins": [{"words": list(b), "n": len(ids)} for b, ids in zip(bins, chosen, strict=True)],
            "methods": found}
