"""Word error rate by length of the utterance and by kind of text: which method breaks on what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    return {"bins": [{"words": list(b), "n": len(ids)} for b, ids in zip(bins, chosen, strict=True)],
            "methods": _rates(records, methods, chosen, resamples)}


def by_category(records: Sequence[dict[str, Any]], methods: Sequence[str], categories: Mapping[str, str],
                resamples: int = RESAMPLES) -> dict[str, Any] | None:
    """The same by kind of text: `bins` (category, n: utterances), in order of their names. categories: by utterance id.
    None where there are not two."""
    names = sorted(set(categories.values()))
    if len(names) < 2:
        return None
    chosen = [sorted(i for i, category in categories.items() if category == name) for name in names]
    return {"bins": [{"category": name or "none", "n": len(ids)} for name, ids in zip(names, chosen, strict=True)],
            "methods": _rates(records, methods, chosen, resamples)}


def _rates(records: Sequence[dict[str, Any]], methods: Sequence[str], chosen: Sequence[Sequence[str]],
           resamples: int) -> dict[str, list[dict[str, Any]]]:
    """By method: corpus WER and interval of every group of utterance ids."""
    found: dict[str, list[dict[str, Any]]] = {}
    for method in methods:
        errors, units, ids = by_utterance([r for r in records if r["method"] == method])
        counts = {name: (errors[i], units[i]) for i, name in enumerate(ids)}
        found[method] = []
        for some in chosen:
            rate = corpus_interval(*zip(*(counts[name] for name in some), strict=True), resamples=resamples)
            found[method].append({"wer": rate.value, "ci": [rate.low, rate.high]})
    return found
