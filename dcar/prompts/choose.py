"""Selection of the rows of a prepared split to synthesise, by its columns alone: no other row is
read."""

import numpy as np

from dcar.errors import DataError
from dcar.prepare.columns import Split


def drawn(
    split: Split, seed: int, limit: int | None = None, min_seconds: float = 0.0
) -> np.ndarray:
    """Return the indices of at most `limit` rows of `min_seconds` or more, in an order drawn by
    `seed`."""
    # in float64, the type in which Python compares the durations of rows
    rows = np.flatnonzero(split.columns["duration"].astype(np.float64) >= min_seconds)
    return rows[np.random.default_rng([seed, 7]).permutation(len(rows))[: limit or None]]


def by_digest(digests: np.ndarray, ids: np.ndarray, limit: int = 0) -> np.ndarray:
    """Return the indices of the `limit` utterances (0 = all) whose ids have the smallest SHA-256,
    sorted by id. A larger limit contains a smaller one, so records of earlier runs remain useful.

    digests, ids: of each utterance, or their ranks. Raises DataError if two have the same id."""
    order = np.argsort(digests)
    if (digests[order][1:] == digests[order][:-1]).any():
        raise DataError(
            "the split has utterances of equal id; prepare the corpus again with unique ids"
        )
    rows = order[: limit or None]
    return rows[np.argsort(ids[rows])]


def in_turns(split: Split, count: int) -> np.ndarray:
    """Return the indices of at most `count` rows: one per speaker in turn, speakers in
    alphabetical order, the utterances of each speaker sorted by id."""
    speaker = split.columns["speaker"]
    order = np.lexsort((split.columns["id_rank"], speaker))
    sizes = np.bincount(speaker)
    # number of each row of `order` among the rows of its speaker
    turn = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[np.argsort(turn, kind="stable")[:count]]
