"""Which speech token follows which: bigram counts of the training tokens, smoothed to log-probabilities.

States are the codes 0..V-1, the end of speech V and the start of an utterance V + 1. c_ij counts j behind i; then

    Q(j | i) = (c_ij + alpha) / (c_i + alpha (V + 1)),

over codes and end. Behind the end stands only the end. Transitions into it are counted where utterances end, those from
the start where they begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dcar.errors import ConfigError, DataError


def count_bigrams(utterances: Iterable[Sequence[int]], codes: int) -> tuple[Tensor, Tensor]:
    """Pairs that occur, start and end of speech included: keys previous * (codes + 2) + next ascending, and counts.

    DataError for a token outside the codebook.
    """
    found: list[np.ndarray] = []
    states = codes + 2
    for i, tokens in enumerate(utterances):
        line = np.concatenate(([codes + 1], np.asarray(tokens, np.int64), [codes]))
        if len(line) > 2 and not 0 <= line[1:-1].min() <= line[1:-1].max() < codes:
            raise DataError(f"utterance {i} has a token outside the codebook of {codes}; prepare the corpus with the "
                            "decoder's tokenizer")
        found.append(line[:-1] * states + line[1:])
    if not found:
        raise DataError("no utterances to count transitions in; give a split that is not empty")
    keys, counts = np.unique(np.concatenate(found), return_counts=True)
    return torch.from_numpy(keys), torch.from_numpy(counts.astype(np.int64))


class Transitions:
    """log Q as above, looked up among the pairs that occur: no table of V² numbers, which may be too large."""

    def __init__(self, keys: Tensor, counts: Tensor, states: int, alpha: float = 0.01):
        """keys, counts: as `count_bigrams` gives them. ConfigError where alpha = 0 leaves a token no successor."""
        if not alpha >= 0:
            raise ConfigError(f"transition smoothing needs alpha >= 0, not {alpha}")
        self.states, self.end, self.start, self.alpha = states, states - 2, states - 1, alpha
        self.keys, self.counts = keys, counts.double()
        self.totals = torch.zeros(states, dtype=torch.float64).index_add_(0, keys // states, self.counts)  # c_i
        empty = [i for i in (self.totals == 0).nonzero()[:, 0].tolist() if i != self.end]
        if alpha == 0 and empty:
            raise ConfigError(f"{len(empty)} rows of the transition matrix are empty (token {empty[0]} was never seen "
                              "with a successor): smooth with alpha > 0, or count more speech")

    def to(self, device: torch.device) -> Transitions:
        """Move the tables, in place."""
        self.keys, self.counts, self.totals = (t.to(device) for t in (self.keys, self.counts, self.totals))
        return self

    def log_prob(self, previous: Tensor, following: Tensor) -> Tensor:
        """log Q(following | previous) of all pairs: ids [B, a], [B, b] -> [B, a, b] float32."""
        i, j = previous[:, :, None], following[:, None, :]
        wanted = i * self.states + j
        place = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
        count = torch.where(self.keys[place] == wanted, self.counts[place], 0.0)
        prob = (count + self.alpha) / (self.totals[i] + self.alpha * (self.states - 1))
        return torch.where(i == self.end, (j == self.end).double(), prob).log().float()
