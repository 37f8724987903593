"""How far two lists of speech tokens lie apart, whatever their lengths.

Dynamic time warping over the distances d of the tokenizer's centroids, in the symmetric form of Sakoe & Chiba (1978):

    D(i, j) = min(D(i−1, j) + d(i, j),  D(i−1, j−1) + 2 d(i, j),  D(i, j−1) + d(i, j)),   distance = D(n, m) / (n + m)

so that every path weighs n + m. d is the Euclidean distance of two centroids, divided by the mean over all pairs of
different codes: 0 is the same speech, token by token but for their lengths; 1 is as far as two codes taken at random.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcar.errors import DataError

BATCH = 64  # pairs warped at once
Pair = tuple[Sequence[int], Sequence[int]]


def code_distances(centroids: np.ndarray) -> np.ndarray:
    """Distances of all codes [V, V] float32 of centroids [V, P], on average 1 over pairs of different codes."""
    from scipy.spatial.distance import cdist

    table = cdist(centroids, centroids)
    count = len(table)
    mean = table.sum() / (count * (count - 1)) if count > 1 else 0.0
    if not np.isfinite(mean) or mean <= 0:
        raise DataError(f"codebook of {count} codes: their distances are {mean}; its centroids are broken or all alike")
    return (table / mean).astype(np.float32)


def warped_distances(pairs: Sequence[Pair], distances: np.ndarray) -> np.ndarray:
    """Distance [P] of every pair of token lists (none empty) after dynamic time warping; see above."""
    if any(not len(a) or not len(b) for a, b in pairs):
        raise DataError("dynamic time warping: an empty list of tokens has no distance to another")
    found = np.zeros(len(pairs))
    order = sorted(range(len(pairs)), key=lambda p: (len(pairs[p][0]), len(pairs[p][1])))  # like lengths together
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        found[chosen] = _warped([pairs[p] for p in chosen], distances)
    return found


def _warped(pairs: Sequence[Pair], distances: np.ndarray) -> np.ndarray:
    """The distances [P] of a batch. A row of D at a time: in a row D(j) = min(a(j), D(j−1) + d(j)), where a(j) comes
    from the row above; with c the running sum of d, D − c is the running minimum of a − c, which needs no loop over
    columns."""
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
