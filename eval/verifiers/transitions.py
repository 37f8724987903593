"""Which speech token follows which: bigram counts of the training tokens, smoothed to log-probabilities.

States are the codes 0..V-1, the end of speech V and the start of an utterance V + 1. c_ij counts j behind i; then

    Q(j | i) = (c_ij + alpha) / (c_i + alpha (V + 1)),

add-alpha over codes and end. Behind the end stands only the end. Transitions into it are counted where utterances end,
those from the start where they begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dcar.errors import ConfigError, DataError

DENSE_BYTES = 256 << 20  # larger matrices are looked up among the pairs that occur


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
    """log Q as above, dense where it fits into memory, else by binary search among the counted pairs."""

    def __init__(self, keys: Tensor, counts: Tensor, states: int, alpha: float = 0.01, dense: bool | None = None):
        if not alpha >= 0:
            raise ConfigError(f"transition smoothing needs alpha >= 0, not {alpha}")
        self.states, self.end, self.start = states, states - 2, states - 1
        outcomes = states - 1  # codes and end
        previous, following = keys // states, keys % states
        self.rows = torch.zeros(states, dtype=torch.float64).index_add_(0, previous, counts.double())
        empty = (self.rows == 0).nonzero()[:, 0].tolist()
        if alpha == 0 and (empty := [i for i in empty if i != self.end]):
            raise ConfigError(f"{len(empty)} rows of the transition matrix are empty (token {empty[0]} was never seen "
                              "with a successor): smooth with alpha > 0, or count more speech")
        self.alpha, self.outcomes = alpha, outcomes
        self.keys, self.counts = keys, counts.double()
        if dense is None:
            dense = states * outcomes * 4 <= DENSE_BYTES
        self.table: Tensor | None = None
        if dense:
            matrix = torch.full((states, outcomes), alpha, dtype=torch.float64)
            matrix[previous, following] += self.counts
            matrix[self.end] = 0
            matrix[self.end, self.end] = 1
            self.table = (matrix / matrix.sum(-1, keepdim=True)).log().float()

    def to(self, device: torch.device) -> Transitions:
        """Move the tables, in place."""
        for name in ("rows", "keys", "counts", "table"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.to(device))
        return self

    def log_prob(self, previous: Tensor, following: Tensor) -> Tensor:
        """log Q(following | previous) of all pairs: ids [B, a], [B, b] -> [B, a, b] float32."""
        i, j = previous[:, :, None], following[:, None, :]
        if self.table is not None:
            return self.table[i, j]
        wanted = i * self.states + j
        place = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
        count = torch.where(self.keys[place] == wanted, self.counts[place], 0.0)
        law = (count + self.alpha) / (self.rows[i] + self.alpha * self.outcomes)
        return torch.where(i == self.end, (j == self.end).double(), law).log().float()
