"""How far two lists of speech tokens lie apart, whatever their lengths.

Dynamic time warping over the distances d of the tokenizer's centroids, in the symmetric form of
Sakoe & Chiba (1978):

    D(i, j) = min(D(i−1, j) + d(i, j),  D(i−1, j−1) + 2 d(i, j),  D(i, j−1) + d(i, j))
    distance = D(n, m) / (n + m)

so that every path weighs n + m. d is the Euclidean distance of two centroids, divided by the mean
over all pairs of different codes: 0 is the same speech, token by token but for their lengths; 1 is
as far as two codes taken at random.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcar.errors import DataError

Pair = tuple[Sequence[int], Sequence[int]]


def code_distances(centroids: np.ndarray) -> np.ndarray:
    """Distances of all codes [V, V] float32 of centroids [V, P], on average 1 over pairs of
    different codes."""
    from scipy.spatial.distance import cdist

    table = cdist(centroids, centroids)
    count = len(table)
    mean = table.sum() / (count * (count - 1)) if count > 1 else 0.0
    if not np.isfinite(mean) or mean <= 0:
        raise DataError(
            f"codebook of {count} codes: their distances are {mean}; its centroids are broken or "
            "all alike"
        )
    return (table / mean).astype(np.float32)


def warped_distances(pairs: Sequence[Pair], distances: np.ndarray) -> np.ndarray:
    """Distance [P] of every pair of token lists (none empty) after dynamic time warping; see
    above."""
    from librosa.sequence import dtw

    if any(not len(a) or not len(b) for a, b in pairs):
        raise DataError("dynamic time warping: an empty list of tokens has no distance to another")
    found = np.zeros(len(pairs))
    for p, (a, b) in enumerate(pairs):
        d = distances[np.ix_(a, b)].astype(np.float64)
        # of the steps (1, 1), (0, 1), (1, 0)
        total = dtw(C=d, weights_mul=np.array([2.0, 1.0, 1.0]), backtrack=False)
        # librosa weighs the first cell once
        found[p] = (total[-1, -1] + d[0, 0]) / (len(a) + len(b))
    return found
