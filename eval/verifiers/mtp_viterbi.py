"""MTP with Viterbi (arXiv 2410.13839): one path through the proposals of n heads, weighted by token
transitions.

Head t proposes its k best ids; C is the union over the n heads. With S_t(j) the probabilities of
head t and Q(j | i) the transitions of the training tokens,

    delta_1(j) = S_1(j),    delta_t(j) = S_t(j) max_i delta_{t-1}(i) Q(j | i),    i, j in C,

and the whole best path is emitted: n tokens per pass, without verification. S is taken after
temperature, top-k and top-p, as for every method here. At temperature 0 it is one-hot, and the path
consists of each head's best id.

A path is cut at its first end of speech e. Only e can follow e, and S_t(e) counts as at least the
probability that an earlier head gave e: speech that has ended by one position has ended by the
next. A later head whose probabilities were cut by top-k or temperature therefore cannot make an end
impossible.

The states of Q are the codes 0..V-1, the end of speech V and the start of an utterance V + 1. With
c_ij the number of times that j follows i in the training tokens,

    Q(j | i) = (c_ij + alpha) / (c_i + alpha (V + 1)),

over codes and end. Only the end follows the end. Transitions into it are counted at the ends of
utterances, those from the start at their beginnings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.decoding import BatchState, Decision, Method
from dcar.decoding.chunks import check_size
from dcar.decoding.declare import Style, decoding_method, option, unlisted
from dcar.errors import ConfigError
from dcar.model.models import Borrowed
from dcar.ties import likeliest

IDS_PER_HEAD = 3  # k; the value of the paper's main table
ALPHA = 0.01  # smoothing of the transitions


def count_bigrams(utterances: Sequence[Sequence[int]], codes: int) -> tuple[Tensor, Tensor]:
    """Count the pairs that occur, including start and end of speech. Return keys previous * (codes
    + 2) + next, ascending, and counts."""
    pairs: list[np.ndarray] = []
    states = codes + 2
    for tokens in utterances:
        line = np.concatenate(([codes + 1], np.asarray(tokens, np.int64), [codes]))
        pairs.append(line[:-1] * states + line[1:])
    keys, counts = np.unique(np.concatenate(pairs), return_counts=True)
    return torch.from_numpy(keys), torch.from_numpy(counts.astype(np.int64))


class Transitions:
    """Table of log Q as above, looked up among the pairs that occur: a dense table of V² numbers
    may be too large."""

    def __init__(self, keys: Tensor, counts: Tensor, states: int, alpha: float = ALPHA):
        """Make the table. keys, counts: as returned by `count_bigrams`. alpha > 0, or a token
        may have no successor."""
        self.states, self.end, self.start, self.alpha = states, states - 2, states - 1, alpha
        self.keys, self.counts = keys, counts.double()
        # c_i
        self.totals = torch.zeros(states, dtype=torch.float64).index_add_(
            0, keys // states, self.counts
        )

    def to(self, device: torch.device) -> Transitions:
        """Move the tables, in place."""
        self.keys, self.counts, self.totals = (
            t.to(device) for t in (self.keys, self.counts, self.totals)
        )
        return self

    def log_prob(self, previous: Tensor, following: Tensor) -> Tensor:
        """Return log Q(following | previous) of all pairs, [B, a, b] float32, given ids [B, a]
        and [B, b]."""
        i, j = previous[:, :, None], following[:, None, :]
        wanted = i * self.states + j
        place = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
        count = torch.where(self.keys[place] == wanted, self.counts[place], 0.0)
        prob = (count + self.alpha) / (self.totals[i] + self.alpha * (self.states - 1))
        return torch.where(i == self.end, (j == self.end).double(), prob).log().float()


def best_path(emission: Tensor, transition: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best path by Viterbi: delta_t(j) = log S_t(j) + max_i [delta_{t-1}(i) + log Q(j |
    i)], then backtracking.

    emission: [B, n, m] log S; transition: [B, m, m] log Q (from row to column). Return states [B,
    n] and the path's score [B]; of equal paths, the one with the lowest state.
    """
    delta = emission[:, 0]
    origins: list[Tensor] = []
    for t in range(1, emission.shape[1]):
        scores = delta[:, :, None] + transition
        origins.append(scores.argmax(1))
        delta = emission[:, t] + scores.amax(1)
    states = [delta.argmax(-1)]
    for origin in reversed(origins):
        states.append(origin.gather(1, states[-1][:, None])[:, 0])
    return torch.stack(states[::-1], dim=1), delta.amax(-1)


def choose(probs: Tensor, proposed: Tensor, transitions: Transitions) -> tuple[Tensor, Tensor]:
    """Return the tokens [B, n] of the best path through the proposed ids, and its score [B].

    probs: [B, n, V + 1]; proposed: [B, n, k] ids.
    """
    # [B, n] of the state after an end
    ended = probs[:, :, transitions.end].cummax(-1).values.double().log()
    ids = proposed.flatten(1).sort(dim=-1).values
    repeated = F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
    emission = probs.gather(2, ids[:, None].expand(-1, probs.shape[1], -1)).double().log()
    emission = emission.masked_fill(repeated[:, None], -torch.inf)
    transition = transitions.log_prob(ids, ids).double()
    ids, emission, transition = _with_ended(ids, emission, transition, ended, transitions.end)
    states, score = best_path(emission, transition)
    return ids.gather(1, states), score


def _with_ended(
    ids: Tensor, emission: Tensor, transition: Tensor, ended: Tensor, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a state "has ended" to the lattice: it follows the end and itself, and nothing else
    follows the end."""
    never = -torch.inf
    is_end = ids == end  # [B, m]
    into = torch.where(is_end, 0.0, never).to(transition.dtype)[:, :, None]
    transition = torch.cat((transition.masked_fill(is_end[:, :, None], never), into), dim=2)
    stay = F.pad(transition.new_zeros(len(ids), 1, 1), (ids.shape[1], 0), value=never)
    transition = torch.cat((transition, stay), dim=1)
    ended = F.pad(ended[:, 1:], (1, 0), value=never)  # no path begins there
    emission = torch.cat((emission, ended[:, :, None]), dim=2)
    return F.pad(ids, (0, 1), value=end), emission, transition


@decoding_method("mtp-viterbi", Style("MTP-Viterbi", "#2a8f4e", "p", "n"), "mtp-viterbi-4-5")
class MTPViterbi(Method):
    """Decoding method: n tokens per pass, chosen together by `choose`."""

    heads: int = option(minimum=1)
    k: int = option(IDS_PER_HEAD, minimum=1)
    transitions: Transitions = unlisted()
    streams = ()
    logged = ("sizes",)

    def bind(self, models: Borrowed) -> None:
        if self.k > models.decoder.config.output_size:
            raise ConfigError(
                f"k = {self.k} ids of each head, but the vocabulary has "
                f"{models.decoder.config.output_size} tokens; choose at most as many"
            )
        table = models.statistics("bigram_keys", "bigram_counts")
        self.transitions = Transitions(table.bigram_keys, table.bigram_counts, table.states)

    def width(self, heads: int) -> int:
        check_size(self.heads, heads)
        return self.heads

    def start(self, state: BatchState) -> None:
        state.shared["transitions"] = self.transitions.to(state.tokens.device)
        state.own["size"] = torch.full_like(state.generated, self.heads)

    def keep(self, state: BatchState) -> Decision:
        probs = state.probs(
            state.heads(state.last_hidden, self.heads), state.next_positions(self.heads)
        )
        tokens, score = choose(probs, likeliest(probs, self.k)[1], state.shared["transitions"])
        # NaN: no distribution
        tokens = state.checked(torch.where(score.isfinite()[:, None], tokens, state.eos + 1))
        return Decision(state.own["size"], tokens)
