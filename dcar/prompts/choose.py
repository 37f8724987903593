"""The rows of a prepared split that are spoken, chosen by its columns, so that no other row is
read."""

from __future__ import annotations

import numpy as np

from dcar.errors import DataError
from dcar.prepare.columns import Split


def drawn(
    split: Split, seed: int, limit: int | None = None, min_seconds: float = 0.0
) -> np.ndarray:
    """At most `limit` rows of `min_seconds` or more, in an order drawn by `seed`."""
    # compared in float64, as Python compares the durations of rows
    rows = np.flatnonzero(split.columns["duration"].astype(np.float64) >= min_seconds)
    return rows[np.random.default_rng([seed, 7]).permutation(len(rows))[: limit or None]]


def by_digest(split: Split, limit: int = 0) -> np.ndarray:
    """The `limit` rows (0 = all) whose ids have the smallest SHA-256, sorted by id: a larger
    limit contains a smaller one. DataError for a split with equal ids."""
    ranks = split.columns["digest_rank"]
    order = np.argsort(ranks)
    if not np.diff(ranks[order]).all():
        raise DataError(
            "the split has utterances of equal id; prepare the corpus again with unique ids"
        )
    rows = order[: limit or None]
    return rows[np.argsort(split.columns["id_rank"][rows])]


def in_turns(split: Split, count: int) -> np.ndarray:
    """At most `count` rows: the speakers in turn in alphabetical order, each with its utterances
    sorted by id."""
    speaker = split.columns["speaker"]
    order = np.lexsort((split.columns["id_rank"], speaker))
    sizes = np.bincount(speaker)
    # of each row of `order`
    turn = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[np.argsort(turn, kind="stable")[:count]]
