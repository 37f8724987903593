"""Chunk-wise decoding: the heads propose the next tokens, a chunk rule decides how many to keep.

FAR and CAR-k keep a fixed number (DCAR paper §3.1), `RandomChunk` draws one from a range (the
paper's ablation), and DCAR uses the policy (§4.2). Nothing is verified: the kept tokens are
emitted, and the next pass reads the whole chunk.

Rules after the draw, which are not in the paper, read all candidates before they choose where
the chunk ends: policies that read candidates (heads/candidates.py), and rules such as
`EndOnConfident`. Dropped tokens are drawn again from another distribution at the same random
number, so the emitted tokens do not follow the heads' distribution, by intent.

Several candidates may be drawn from the same distributions, of which the one with the best joint
score is kept (heads/chunk_scorer.py): importance resampling from the product of the heads'
distributions towards their joint distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dcar.decoding.state import BatchState
from dcar.decoding.step import Admitted, Kept, Method, record
from dcar.errors import ConfigError
from dcar.sampling import shifted
from heads.candidates import FEATURES, candidate_features, resampling_log_weights, select_candidate
from heads.chunk_scorer import ChunkScorer, scored_features


class Choice(NamedTuple):
    """Choice of a chunk rule for every row."""

    sizes: Tensor  # [B] in 1..K
    log_probs: Tensor | None = None  # [B] of what was chosen, from a policy
    chosen: Tensor | None = None  # [B] which candidate is kept, where there are several


class ChunkRule:
    """Rule that decides how many of the heads' next tokens are kept, for a `ChunkMethod`.
    Override `choose`.

    `drawn`: tokens drawn before it decides; 0 = it decides first, and only the kept ones are
    drawn. `num_candidates`: N, candidates drawn side by side. `streams`: the random numbers that
    `choose` looks up besides those of the tokens ("chunk" is free for a rule of your own). A rule
    contains settings only; its data for each row are in `BatchState.own`.
    """

    name = "rule"
    drawn = 0
    num_candidates = 1
    streams: Sequence[str] = ()
    has_log_probs = False
    num_features = len(FEATURES)
    """Number of features of each token of a candidate (`candidate_features`)."""

    def largest(self, heads: int) -> int:
        """Return the longest chunk that the rule may choose, given the decoder's number of
        heads. Raises ConfigError if there are too few."""
        if self.drawn:
            check_size(self.drawn, heads)
        return self.drawn or heads

    def start(self, state: BatchState) -> None:
        """See `Method.start`."""

    def refresh(self, state: BatchState) -> None:
        """See `Method.refresh`."""

    def admit(self, state: BatchState, rows: Tensor, admitted: Admitted) -> None:
        """See `Method.admit`."""

    def observe(
        self, state: BatchState, hidden: Tensor, counts: Tensor, real: Tensor | None
    ) -> None:
        """See `Method.observe`."""

    def draw_and_choose(self, state: BatchState, logits: Tensor) -> tuple[Tensor, Tensor, Choice]:
        """Draw N candidates from logits [B, n, V + 1] and choose. Return candidates [B, N, n],
        their features [B, N, n, F], and the choice."""
        chunks = draw_chunks(state, logits, self.num_candidates)
        features = self.candidate_features(state, logits, chunks)
        return chunks, features, self.choose(state, features)

    def candidate_features(self, state: BatchState, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the features [B, N, n, F] that `choose` receives for candidates [B, N, n] drawn
        from logits [B, n, V + 1]."""
        return candidate_features(logits, tokens)

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        """Choose the sizes [B] in 1..K of the next chunk of every row, by tensor operations alone.

        features: [B, N, n, 3], for each drawn token its log-probability, that of the most likely
        token, and the entropy in nats, all at temperature 1; None for a rule that decides first.
        state.last_hidden [B, D]: the decoder's state.
        """
        raise NotImplementedError


class ForwardsToRule:
    """Mixin that forwards the events of a batch to its `rule`."""

    rule: ChunkRule

    def start(self, state: BatchState) -> None:
        self.rule.start(state)

    def refresh(self, state: BatchState) -> None:
        self.rule.refresh(state)

    def admit(self, state: BatchState, rows: Tensor, admitted: Admitted) -> None:
        self.rule.admit(state, rows, admitted)

    def observe(
        self, state: BatchState, hidden: Tensor, counts: Tensor, real: Tensor | None
    ) -> None:
        self.rule.observe(state, hidden, counts, real)


class ChunkMethod(ForwardsToRule, Method):
    """Method that emits the tokens of heads 1..a for the size a chosen by the rule; heads
    sample independently given h."""

    def __init__(self, rule: ChunkRule):
        self.rule = rule
        self.name = rule.name
        self.streams = ("token", *rule.streams)
        self.logged = (
            "actions",
            *(["log_probs"] if rule.has_log_probs else []),
            *(["chosen"] if rule.num_candidates > 1 else []),
        )

    def width(self, heads: int) -> int:
        return self.rule.largest(heads)

    def start(self, state: BatchState) -> None:
        super().start(state)
        if state.hidden is not None and self.rule.drawn:
            state.features = torch.zeros(
                *state.log.shape[:2],
                self.rule.num_candidates,
                self.rule.drawn,
                self.rule.num_features,
                device=state.log.device,
            )

    def keep(self, state: BatchState) -> Kept:
        rule = self.rule
        if not rule.drawn:
            sizes, log_probs, _ = rule.choose(state, None)
            widest = state.most(sizes, state.width)  # heads that are not kept need not be evaluated
            tokens = draw_chunks(state, state.heads(state.last_hidden, widest), 1)[:, 0]
            return Kept(tokens, sizes, actions=sizes, log_probs=log_probs)
        logits = state.heads(state.last_hidden, rule.drawn)
        chunks, features, (sizes, log_probs, chosen) = rule.draw_and_choose(state, logits)
        if state.features is not None:  # a finished row writes after its last decision
            record(state.features, state.passes, features[:, None])
        tokens = select_candidate(chunks, chosen)[:, : state.most(sizes, rule.drawn)]
        return Kept(tokens, sizes, actions=sizes, chosen=chosen, log_probs=log_probs)


def draw_chunk(state: BatchState, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the next tokens [B, k] from the heads' logits [B, k, V + 1]; also return their
    distributions [B, k, V + 1]."""
    position = state.next_positions(logits.shape[1])
    u = state.uniform("token", position)
    if state.sampling.repetition_window:
        return _without_repetition(state, logits, position, u)
    probs = state.probs(logits, position)
    return state.sample(probs, u), probs


def draw_chunks(state: BatchState, logits: Tensor, num_candidates: int) -> Tensor:
    """Draw several candidates [B, N, k] from the same logits [B, k, V + 1]. The first is that of
    `draw_chunk`; the others use random numbers `shifted` from its own, so each has the heads'
    marginal distribution too."""
    if not state.sampling.repetition_window:
        return state.draw(logits, num_candidates).mT
    position = state.next_positions(logits.shape[1])
    u = shifted(state.uniform("token", position), num_candidates)
    return torch.stack(
        [_without_repetition(state, logits, position, one)[0] for one in u.unbind(-1)], 1
    )


def _without_repetition(
    state: BatchState, logits: Tensor, position: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Return tokens and distributions at random numbers u [B, k] in repetition-aware sampling,
    where the distribution of a token depends on those before it in the chunk."""
    tokens, probs = position[:, :0], []
    for j in range(logits.shape[1]):
        history = state.histories(tokens)
        assert history is not None
        probs.append(state.probs(logits[:, j], position[:, j], history[:, -1]))
        tokens = torch.cat((tokens, state.sample(probs[-1], u[:, j])[:, None]), dim=1)
    return tokens, torch.stack(probs, dim=1)


class FixedChunk(ChunkRule):
    """Rule that always keeps k tokens: CAR-k; k = 1 is next-token decoding (on a model trained
    with one head, FAR)."""

    def __init__(self, size: int, name: str | None = None):
        self.size = size
        self.name = name or f"car-{size}"

    def largest(self, heads: int) -> int:
        check_size(self.size, heads)
        return self.size

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        return Choice(state.own["size"])

    def start(self, state: BatchState) -> None:
        state.own["size"] = torch.full_like(state.generated, self.size)


class _ListedSizes(ChunkRule):
    """Rule that chooses among the sizes of a list."""

    def __init__(self, sizes: Sequence[int], name: str):
        if not sizes:
            raise ConfigError("sizes: a chunk rule needs at least one size to choose from")
        self.sizes, self.name = tuple(sizes), name

    def largest(self, heads: int) -> int:
        for size in self.sizes:
            check_size(size, heads)
        return max(self.sizes)

    def start(self, state: BatchState) -> None:
        state.shared["sizes"] = torch.tensor(self.sizes, device=state.generated.device)


class RandomChunk(_ListedSizes):
    """Rule that draws a size uniformly from a list at every step: a baseline for policies. A
    size that is listed twice is drawn twice as often, so that the shares can be those of a
    policy."""

    streams = ("chunk",)

    def __init__(self, sizes: Sequence[int], name: str | None = None):
        super().__init__(sizes, name or f"random-{'-'.join(map(str, sizes))}")

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        u = state.uniform("chunk", state.generated)
        return Choice(state.shared["sizes"][(u * len(self.sizes)).long()])


class EndOnConfident(_ListedSizes):
    """Rule that ends the chunk on the most likely of the drawn tokens: argmax over the sizes a
    of log p_a(x_a). A baseline for policies after the draw; not from a paper."""

    def __init__(self, sizes: Sequence[int], name: str | None = None):
        super().__init__(
            sorted(set(sizes)), name or f"end-on-confident-{'-'.join(map(str, sizes))}"
        )
        self.drawn = max(sizes)

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        assert features is not None
        sizes = state.shared["sizes"]
        return Choice(sizes[features[:, 0, sizes - 1, 0].argmax(-1)])


class BestOfChunk(ChunkRule):
    """Rule that always keeps k tokens, of the candidate with the highest joint score: argmax
    over candidates of r_k. A baseline for policies with as many candidates; not from a paper."""

    def __init__(
        self, size: int, num_candidates: int, chunk_scorer: ChunkScorer, name: str | None = None
    ):
        self.name = name or f"best-of-{size}-{num_candidates}"
        if num_candidates < 2:
            raise ConfigError(f"{self.name}: needs at least 2 candidates, not {num_candidates}")
        self.drawn, self.num_candidates, self.chunk_scorer = size, num_candidates, chunk_scorer
        self.num_features = len(FEATURES) + 1

    def largest(self, heads: int) -> int:
        if self.chunk_scorer.config.num_heads < self.drawn:
            raise ConfigError(
                f"{self.name}: this chunk scorer reads chunks of at most "
                f"{self.chunk_scorer.config.num_heads} tokens"
            )
        return super().largest(heads)

    def refresh(self, state: BatchState) -> None:
        state.shared["chunk_scorer"] = state.reader.chunk_scorer(self.chunk_scorer)

    def candidate_features(self, state: BatchState, logits: Tensor, tokens: Tensor) -> Tensor:
        return scored_features(state.shared["chunk_scorer"], state.last_hidden, logits, tokens)

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        assert features is not None
        chosen = resampling_log_weights(features)[..., -1].argmax(1)
        return Choice(torch.full_like(chosen, self.drawn), None, chosen)


def check_size(size: int, heads: int) -> None:
    """Raise ConfigError for a chunk of more tokens than a decoder's heads predict."""
    if not 1 <= size <= heads:
        raise ConfigError(
            f"chunk size {size} needs {size} heads, but this decoder predicts 1..{heads} tokens "
            "per step"
        )
