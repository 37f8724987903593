"""What greediness costs: how far the renderings of one sentence lie apart, and whether speech loops.

Fewer word errors at a low temperature are bought with sameness, which no word error rate shows. Renderings are what a
method makes of one utterance with other seeds or other prompts. Two are compared by dynamic time warping of their
tokens over the distances of the tokenizer's centroids, in the symmetric form of Sakoe & Chiba (1978):

    D(i, j) = min(D(i−1, j) + d(i, j),  D(i−1, j−1) + 2 d(i, j),  D(i, j−1) + d(i, j)),   distance = D(n, m) / (n + m)

so that every path weighs n + m. d is the Euclidean distance of two centroids, divided by the mean over all pairs of
different codes: 0 is the same speech, token by token but for their lengths; 1 is as far as two codes taken at random.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from dcar.errors import DataError
from dcar.text.bootstrap import RESAMPLES, corpus_interval

BATCH = 64  # pairs warped at once
LOOP_PERIOD = 25  # a loop repeats at most so many tokens (half a second at 50 Hz) …
LOOP_LENGTH = 25  # … over at least so many tokens, and three times or more; no recording of the starter corpus does


def code_distances(centroids: np.ndarray) -> np.ndarray:
    """Distances of all codes [V, V] float32 of centroids [V, P], on average 1 over pairs of different codes."""
    from scipy.spatial.distance import cdist

    table = cdist(centroids, centroids)
    count = len(table)
    mean = table.sum() / (count * (count - 1)) if count > 1 else 0.0
    if not np.isfinite(mean) or mean <= 0:
        raise DataError(f"codebook of {count} codes: their distances are {mean}; its centroids are broken or all alike")
    return (table / mean).astype(np.float32)


def warped_distances(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], distances: np.ndarray) -> np.ndarray:
    """Distance [P] of every pair of token lists (none empty) after dynamic time warping; see above."""
    if any(not len(a) or not len(b) for a, b in pairs):
        raise DataError("dynamic time warping: an empty list of tokens has no distance to another")
    found = np.zeros(len(pairs))
    order = sorted(range(len(pairs)), key=lambda p: (len(pairs[p][0]), len(pairs[p][1])))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        found[chosen] = _warp([pairs[p] for p in chosen], distances)
    return found


def _warp(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], distances: np.ndarray) -> np.ndarray:
    """A batch of pairs, a row of D at a time. In a row D(j) = min(a(j), D(j−1) + d(j)), where a(j) comes from the row
    above; with c the running sum of d, D − c is the running minimum of a − c, which needs no loop over columns."""
    sizes = np.array([(len(a), len(b)) for a, b in pairs])
    rows, columns = sizes.max(0)
    a, b = np.zeros((len(pairs), rows), np.int64), np.zeros((len(pairs), columns), np.int64)  # [P, N], [P, M]
    for p, (first, second) in enumerate(pairs):
        a[p, : len(first)], b[p, : len(second)] = first, second
    above = np.full((len(pairs), columns + 1), np.inf)  # D(i − 1, ·) behind its edge
    above[:, 0] = 0.0
    result = np.zeros(len(pairs))
    for i in range(rows):
        d = distances[a[:, i, None], b].astype(np.float64)  # [P, M]
        entered = np.minimum(above[:, 1:] + d, above[:, :-1] + 2 * d)
        total = d.cumsum(1)
        above[:, 1:] = np.minimum.accumulate(entered - total, axis=1) + total
        above[:, 0] = np.inf
        ended = sizes[:, 0] == i + 1  # what lies behind a list's end is padding, and is never looked at
        result[ended] = above[ended, sizes[ended, 1]]
    return result / sizes.sum(1)


def longest_run(tokens: Sequence[int]) -> int:
    """How often one token stands behind itself at most; 0 for no tokens."""
    return repeated_stretch(tokens, 1) if len(tokens) else 0


def repeated_stretch(tokens: Sequence[int], period: int) -> int:
    """Tokens of the longest stretch that repeats itself after `period` tokens; `period` where nothing does."""
    ids = np.asarray(tokens)
    same = np.concatenate(([False], ids[period:] == ids[:-period], [False])).astype(np.int8)
    edges = np.flatnonzero(np.diff(same))
    return period + int((edges[1::2] - edges[::2]).max(initial=0))


def loops(tokens: Sequence[int]) -> bool:
    """Whether the same 1 … LOOP_PERIOD tokens come three times or more in a row, over LOOP_LENGTH tokens or more."""
    return any(repeated_stretch(tokens, p) >= max(3 * p, LOOP_LENGTH)
               for p in range(1, min(LOOP_PERIOD, len(tokens) - 1) + 1))


def variety(records: Sequence[dict[str, Any]], distances: np.ndarray | None,
            resamples: int = RESAMPLES) -> dict[str, Any]:
    """The fields of a method's row that say how lively it speaks; None where they cannot be computed.

    variety and its interval: mean over utterances of the mean distance of two renderings (pairs of which one is silent
    left out), bootstrap over utterances; needs `distances` [V, V] and two renderings. duration_spread: standard
    deviation of an utterance's duration over its renderings, divided by its mean, averaged over utterances.
    longest_run: mean over records, and longest_run_max. loop_rate: share of records that loop (`loops`).
    """
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["id"]].append(record)
    runs = [longest_run(r["tokens"]) for r in records]
    row: dict[str, Any] = {"variety": None, "variety_ci": None, "duration_spread": None,
                           "longest_run": float(np.mean(runs)), "longest_run_max": max(runs),
                           "loop_rate": float(np.mean([loops(r["tokens"]) for r in records]))}
    spreads = [np.std(seconds, ddof=1) / np.mean(seconds) for mates in groups.values()
               if len(seconds := [r["duration"] for r in mates if r["duration"]]) > 1]
    if spreads:
        row["duration_spread"] = float(np.mean(spreads))
    pairs = [(name, a, b) for name in sorted(groups)
             for a, b in combinations([r["tokens"] for r in groups[name] if r["tokens"]], 2)]
    if distances is None or not pairs:
        return row
    # equal lists, as at temperature 0 with other seeds, need no warping
    different = [i for i, (_, a, b) in enumerate(pairs) if a != b]
    apart = np.zeros(len(pairs))
    apart[different] = warped_distances([pairs[i][1:] for i in different], distances)
    by_name: dict[str, list[float]] = defaultdict(list)
    for (name, _, _), distance in zip(pairs, apart.tolist(), strict=True):
        by_name[name].append(distance)
    means = [float(np.mean(found)) for found in by_name.values()]
    interval = corpus_interval(means, [1] * len(means), resamples=resamples)
    return {**row, "variety": interval.value, "variety_ci": [interval.low, interval.high]}
