"""Cost of low temperatures: how different the renderings of one sentence are, and whether speech
loops.

Fewer word errors at a low temperature come with less variety, which no word error rate shows.
Renderings are a method's outputs for one utterance with other seeds or other prompts. Two are
compared by dynamic time warping of their tokens over the distances of the tokenizer's centroids
(dcar/tokens/warping.py): 0 is the same speech, token by token except for their lengths; 1 is the
distance of two codes taken at random.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from dcar.text.bootstrap import RESAMPLES, Interval, corpus_interval
from dcar.tokens.warping import warped_distances
from eval.results.types import Record, Variety

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
    records: Sequence[Record], distances: np.ndarray | None, resamples: int = RESAMPLES
) -> Variety:
    """Return the variety of a method's records; None for what cannot be computed.

    distance: mean over utterances of the mean distance of two renderings (without pairs of which
    one is silent), bootstrap over utterances; needs `distances` [V, V] and two renderings.
    duration_spread: standard deviation of an utterance's duration over its renderings, divided by
    its mean, averaged over utterances. longest_run: mean over records. loop_rate: share of records
    that loop (`loops`).
    """
    renderings: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.id):
        renderings.setdefault(record.id, []).append(record)
    runs = [longest_run(r.tokens) for r in records]
    seconds = [[r.duration for r in of if r.duration] for of in renderings.values()]
    spreads = [np.std(of, ddof=1) / np.mean(of) for of in seconds if len(of) > 1]
    return Variety(
        None if distances is None else _distance(renderings, distances, resamples),
        float(np.mean(spreads)) if spreads else None,
        float(np.mean(runs)),
        max(runs),
        float(np.mean([loops(r.tokens) for r in records])),
    )


def _distance(
    renderings: Mapping[str, Sequence[Record]], distances: np.ndarray, resamples: int
) -> Interval | None:
    """Return the mean distance of two renderings; None if no utterance has two."""
    pairs = [
        (name, a, b)
        for name, of in renderings.items()
        for a, b in combinations([r.tokens for r in of if r.tokens], 2)
    ]
    if not pairs:
        return None
    # equal lists, as at temperature 0 with other seeds, need no warping
    different = [i for i, (_, a, b) in enumerate(pairs) if a != b]
    apart = np.zeros(len(pairs))
    apart[different] = warped_distances([pairs[i][1:] for i in different], distances)
    means = pd.Series(apart).groupby([name for name, _, _ in pairs], sort=False).mean()
    return corpus_interval(means.tolist(), [1] * len(means), resamples=resamples)
