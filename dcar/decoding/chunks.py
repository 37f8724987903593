"""Chunk-wise decoding: the heads propose the next tokens, a chunk rule decides how many to keep.

FAR and CAR-k keep a fixed number (DCAR paper §3.1), `RandomChunk` draws one from a range (the
paper's ablation), and DCAR uses the policy (§4.2). Nothing is verified: the kept tokens are
emitted, and the next pass reads the whole chunk.

Rules after the draw, which are not in the paper, read all candidates before they choose where
the chunk ends: policies that read candidates (heads/candidates.py), and the controls of
eval/verifiers/controls.py. Dropped tokens are drawn again from another distribution at the same
random number, so the emitted tokens do not follow the heads' distribution, by intent.

Several candidates may be drawn from the same distributions, of which the one with the best joint
score is kept (heads/chunk_scorer.py): importance resampling from the product of the heads'
distributions towards their joint distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from dcar.decoding.declare import Style, decoding_method, option
from dcar.decoding.records import Choice, Decision
from dcar.decoding.state import BatchState
from dcar.decoding.step import Method
from dcar.errors import ConfigError
from dcar.model.models import Borrowed
from dcar.sampling import shifted
from heads.candidates import FEATURES, candidate_features, select_candidate


class ChunkRule(Method):
    """Method that decides how many of the heads' next tokens are kept; heads sample independently
    given h. Override `choose`.

    `after_draw`: all candidates are drawn before it decides; otherwise only the tokens that are
    kept. `longest`: most tokens that it chooses or reads; 0 = as many as the decoder has heads.
    `num_candidates`: N, candidates drawn side by side after which it decides.
    """

    logged: Sequence[str] = ("sizes",)
    after_draw = False
    longest = 0
    num_candidates = 1
    num_features = len(FEATURES)
    """Number of features of each token of a candidate (`candidate_features`)."""

    def width(self, heads: int) -> int:
        if self.longest:
            check_size(self.longest, heads)
        return self.longest or heads

    def recorded(self, width: int) -> tuple[int, ...] | None:
        return (self.num_candidates, width, self.num_features) if self.after_draw else None

    @final
    def keep(self, state: BatchState) -> Decision:
        if self.after_draw:
            # all heads, because any end may be chosen
            logits = state.heads(state.last_hidden, state.width)
            chunks, features, choice = self.draw_and_choose(state, logits)
            tokens = select_candidate(chunks, choice.chosen)
            tokens = tokens[:, : state.most(choice.sizes, state.width)]
        else:
            choice, features = self.choose(state, None), None
            # heads that are not kept need not be evaluated
            logits = state.heads(state.last_hidden, state.most(choice.sizes, state.width))
            tokens = draw_chunks(state, logits, 1)[:, 0]
        return Decision(
            choice.sizes,
            tokens,
            chosen=choice.chosen,
            log_probs=choice.log_probs,
            features=features,
        )

    def draw_and_choose(self, state: BatchState, logits: Tensor) -> tuple[Tensor, Tensor, Choice]:
        """Draw N candidates from logits [B, n, V + 1] and choose. Return the candidates [B, N, n],
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

        features: [B, N, n, F], for each drawn token its log-probability, that of the most likely
        token, and the entropy in nats, all at temperature 1, and with a chunk scorer its
        contribution to the joint score; None for a rule that decides first.
        state.last_hidden [B, D]: the decoder's state.
        """
        raise NotImplementedError


def draw_chunk(state: BatchState, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the next tokens [B, k] from the heads' logits [B, k, V + 1]; also return their
    distributions [B, k, V + 1]."""
    position = state.next_positions(logits.shape[1])
    u = state.uniform("token", position)
    if state.sampling.repetition_window:
        return state.draw_in_turn(logits, u)
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
    return torch.stack([state.draw_in_turn(logits, one)[0] for one in u.unbind(-1)], 1)


@decoding_method("far", Style("FAR", "#222222", "s"))
class NextToken(ChunkRule):
    """Next-token decoding by the decoder that was trained with one head: FAR."""

    longest = 1

    def bind(self, models: Borrowed) -> None:
        models.decode_by_far()

    def start(self, state: BatchState) -> None:
        state.own["size"] = torch.ones_like(state.generated)

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        return Choice(state.own["size"])


@decoding_method("car", Style("CAR-k", "#1f5fa8", "o", "k"), example="car-3")
class FixedChunk(ChunkRule):
    """Rule that always keeps k tokens: CAR-k; k = 1 is next-token decoding. decoder: name of
    another decoder that it decodes with."""

    size: int = option(minimum=1)
    decoder: str = option("", ":", word="{} decoder", kw_only=True)

    def __post_init__(self) -> None:
        check_listed([self.size])
        self.longest = self.size

    def bind(self, models: Borrowed) -> None:
        if self.decoder:
            models.decode_by(self.decoder)

    def start(self, state: BatchState) -> None:
        state.own["size"] = torch.full_like(state.generated, self.size)

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        return Choice(state.own["size"])


@decoding_method("random", Style("random size", "#8a8f98", "v"), example="random-2-3-4")
class RandomChunk(ChunkRule):
    """Rule that draws a size uniformly from a list at every step: a baseline for policies. A
    size that is listed twice is drawn twice as often, so that the shares can be those of a
    policy."""

    sizes: list[int] = option(minimum=1)
    streams = ("token", "chunk")

    def __post_init__(self) -> None:
        check_listed(self.sizes)
        self.longest = max(self.sizes)

    def bind(self, models: Borrowed) -> None:
        if list(self.sizes) != sorted(self.sizes):
            ordered = "-".join(map(str, sorted(self.sizes)))
            raise ConfigError(
                f"write sizes in order, and twice if they are drawn twice as often: "
                f"random-{ordered}"
            )

    def start(self, state: BatchState) -> None:
        state.shared["sizes"] = torch.tensor(self.sizes, device=state.generated.device)

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        u = state.uniform("chunk", state.generated)
        return Choice(state.shared["sizes"][(u * len(self.sizes)).long()])


def check_listed(sizes: Sequence[int]) -> None:
    """Raise ConfigError unless there is a size to choose, and all are at least 1."""
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"sizes: a chunk rule needs sizes of at least 1 token, not {list(sizes)}")


def check_size(size: int, heads: int) -> None:
    """Raise ConfigError for a chunk of more tokens than a decoder's heads predict."""
    if not 1 <= size <= heads:
        raise ConfigError(
            f"chunk size {size} needs {size} heads, but this decoder predicts 1..{heads} tokens "
            "per step"
        )
