"""Distance between two sequences of speech tokens of any lengths.

Dynamic time warping over the distances d of the tokenizer's centroids, in the symmetric form of
Sakoe & Chiba (1978):

    D(i, j) = min(D(i−1, j) + d(i, j),  D(i−1, j−1) + 2 d(i, j),  D(i, j−1) + d(i, j))
    distance = D(n, m) / (n + m)

so that every path has the weight n + m. d is the Euclidean distance of two centroids, divided by
the mean over all pairs of different codes. A distance of 0 means the same speech, token by token
except for durations; 1 is the mean distance of two codes drawn at random.
"""

from collections.abc import Sequence

import numpy as np

Pair = tuple[Sequence[int], Sequence[int]]


def code_distances(centroids: np.ndarray) -> np.ndarray:
    """Return the distances of all codes [V, V] float32 of centroids [V, P], scaled to a mean of
    1 over pairs of different codes."""
    from scipy.spatial.distance import cdist

    table = cdist(centroids, centroids)
    mean = table.sum() / (len(table) * (len(table) - 1))
    return (table / mean).astype(np.float32)


def warped_distances(pairs: Sequence[Pair], distances: np.ndarray) -> np.ndarray:
    """Return the distance [P] of every pair of token sequences, none of them empty, after dynamic
    time warping; see the module."""
    from librosa.sequence import dtw

    distance = np.zeros(len(pairs))
    for p, (a, b) in enumerate(pairs):
        d = distances[np.ix_(a, b)].astype(np.float64)
        # weights of the steps (1, 1), (0, 1), (1, 0)
        total = dtw(C=d, weights_mul=np.array([2.0, 1.0, 1.0]), backtrack=False)
        # librosa counts the first cell once, the symmetric form twice
        distance[p] = (total[-1, -1] + d[0, 0]) / (len(a) + len(b))
    return distance
