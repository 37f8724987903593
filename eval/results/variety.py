"""Cost of low temperatures: how different the renderings of one sentence are, and whether speech
loops.

Fewer word errors at a low temperature come with less variety, which no word error rate shows.
Renderings are a method's outputs for one utterance with other seeds or other prompts. Two are
compared by dynamic time warping of their tokens over the distances of the tokenizer's centroids
(dcar/tokens/warping.py): 0 is the same speech, token by token except for their lengths; 1 is the
distance of two codes taken at random.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from dcar.text.bootstrap import RESAMPLES, corpus_interval
from dcar.tokens.warping import warped_distances

LOOP_PERIOD = 25  # a loop repeats at most so many tokens (half a second at 50 Hz) …
# … over at least so many tokens, and three times or more; no recording of the starter corpus does
LOOP_LENGTH = 25


def longest_run(tokens: Sequence[int]) -> int:
    """Return the length of the longest run of one token; 0 for no tokens."""
    return repeated_stretch(tokens, 1) if len(tokens) else 0


def repeated_stretch(tokens: Sequence[int], period: int) -> int:
    """Return the length in tokens of the longest stretch that repeats itself after `period`
    tokens; `period` if nothing does."""
    ids = np.asarray(tokens)
    same = np.concatenate(([False], ids[period:] == ids[:-period], [False])).astype(np.int8)
    edges = np.flatnonzero(np.diff(same))
    return period + int((edges[1::2] - edges[::2]).max(initial=0))


def loops(tokens: Sequence[int]) -> bool:
    """Return whether the same 1 … LOOP_PERIOD tokens occur at least three times in a row, over
    at least LOOP_LENGTH tokens."""
    return any(
        repeated_stretch(tokens, p) >= max(3 * p, LOOP_LENGTH)
        for p in range(1, min(LOOP_PERIOD, len(tokens) - 1) + 1)
    )


def variety(
    records: Sequence[dict[str, Any]], distances: np.ndarray | None, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """Return the fields of a method's row that describe its variety; None for those that cannot be
    computed.

    variety and its interval: mean over utterances of the mean distance of two renderings (without
    pairs of which one is silent), bootstrap over utterances; needs `distances` [V, V] and two
    renderings. duration_spread: standard deviation of an utterance's duration over its renderings,
    divided by its mean, averaged over utterances. longest_run: mean over records, and
    longest_run_max. loop_rate: share of records that loop (`loops`).
    """
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["id"]].append(record)
    runs = [longest_run(r["tokens"]) for r in records]
    row: dict[str, Any] = {
        "variety": None,
        "variety_ci": None,
        "duration_spread": None,
        "longest_run": float(np.mean(runs)),
        "longest_run_max": max(runs),
        "loop_rate": float(np.mean([loops(r["tokens"]) for r in records])),
    }
    spreads = [
        np.std(seconds, ddof=1) / np.mean(seconds)
        for mates in groups.values()
        if len(seconds := [r["duration"] for r in mates if r["duration"]]) > 1
    ]
    if spreads:
        row["duration_spread"] = float(np.mean(spreads))
    pairs = [
        (name, a, b)
        for name in sorted(groups)
        for a, b in combinations([r["tokens"] for r in groups[name] if r["tokens"]], 2)
    ]
    if distances is None or not pairs:
        return row
    # equal lists, as at temperature 0 with other seeds, need no warping
    different = [i for i, (_, a, b) in enumerate(pairs) if a != b]
    apart = np.zeros(len(pairs))
    apart[different] = warped_distances([pairs[i][1:] for i in different], distances)
    by_name: dict[str, list[float]] = defaultdict(list)
    for (name, _, _), distance in zip(pairs, apart.tolist(), strict=True):
        by_name[name].append(distance)
    means = [float(np.mean(distances_of)) for distances_of in by_name.values()]
    interval = corpus_interval(means, [1] * len(means), resamples=resamples)
    return {**row, "variety": interval.value, "variety_ci": interval.ends}
