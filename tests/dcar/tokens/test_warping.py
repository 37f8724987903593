"""Dynamic time warping of speech tokens against a slow reference."""

import numpy as np
import pytest

from dcar.tokens.warping import code_distances, warped_distances


def slow(a, b, distances) -> float:
    """The recursion as it is written, cell by cell."""
    table = np.full((len(a) + 1, len(b) + 1), np.inf)
    table[0, 0] = 0.0
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            d = float(distances[a[i - 1], b[j - 1]])
            table[i, j] = min(table[i - 1, j] + d, table[i - 1, j - 1] + 2 * d, table[i, j - 1] + d)
    return table[-1, -1] / (len(a) + len(b))


@pytest.fixture(scope="module")
def distances():
    return code_distances(np.random.default_rng(0).normal(size=(30, 5)))


def test_warping_equals_the_slow_reference(distances):
    """Lengths from 1 on, more pairs than a batch holds: padding must not reach a result."""
    rng = np.random.default_rng(1)
    pairs = [
        (
            rng.integers(0, 30, rng.integers(1, 40)).tolist(),
            rng.integers(0, 30, rng.integers(1, 40)).tolist(),
        )
        for _ in range(150)
    ]
    found = warped_distances(pairs, distances)
    assert found == pytest.approx([slow(a, b, distances) for a, b in pairs], rel=1e-9)
    # symmetric
    assert found == pytest.approx(warped_distances([(b, a) for a, b in pairs], distances), rel=1e-9)


def test_warping_forgives_speed_and_nothing_else(distances):
    same = [([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1, 1, 1, 2, 3, 3])]
    assert warped_distances(same, distances).tolist() == [0.0, 0.0]
    # 2 d / (1 + 1)
    assert warped_distances([([1], [2])], distances)[0] == pytest.approx(distances[1, 2])
    assert warped_distances([], distances).shape == (0,)


def test_codes_lie_one_apart_on_average(distances):
    off = distances[~np.eye(30, dtype=bool)]
    assert off.mean() == pytest.approx(1.0)
    assert (np.diag(distances) == 0).all()
    assert (distances == distances.T).all()
