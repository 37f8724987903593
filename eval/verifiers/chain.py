"""Verification of a drafted chain x_1 … x_m by one pass of the decoder: what SD, SSD, PCG and their
kin share.

q are the probabilities of the target (the decoder's base head), p those that a draft token was
drawn from. Both are taken after `dcar.sampling.warp`, and EOS is forbidden in both at the same
positions. The pass reads [last emitted token, x_1 … x_m] and gives q_1 … q_{m+1}. Tokens are
accepted from the left. The first refused one is replaced. If none is refused, a bonus token is
drawn from q_{m+1}, except after an accepted EOS.

Random numbers: x_i and the bonus token take number "token" of their position, as next-token
decoding does. So a perfect draft reproduces next-token decoding token by token. A token depends on
numbers of its own and earlier positions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcar.decoding import BatchState, Draft, Kept, Method
from dcar.decoding.step import Admitted
from dcar.model.draft import AnyDecoder
from eval.verifiers.drafters import Drafter
from eval.verifiers.statistics import VerifierStatistics
from heads.layers import at


@dataclass(frozen=True)
class Uniforms:
    """Uniform numbers in [0, 1) of positions [B] or [B, m], counted from the first generated
    token: `uniform("accept")` gives the first one of each position, which is looked up; others
    are computed."""

    state: BatchState
    positions: Tensor

    def __call__(self, stream: str, number: int = 0) -> Tensor:
        if number == 0:
            return self.state.uniform(stream, self.positions)
        return self.state.further(stream, self.positions, number)

    def several(self, stream: str, count: int) -> Tensor:
        """The first `count` numbers of each position: [B, n] for positions [B]."""
        number = torch.arange(count, device=self.positions.device)
        return self.state.further(stream, self.positions[:, None].expand(-1, count), number)


class ChainVerifier(Method):
    """A method that verifies drafted chains. A subclass answers two questions about probabilities
    after temperature, top-k and top-p, for all rows, by tensor operations alone.

    `accept`: which draft tokens pass, each seen by itself. `replacement`: the distribution of the
    token in the place of the first refused one (or `following`, the token itself). A subclass is
    built as `cls(name, drafter, *arguments(decoder, statistics, numbers))`, with the numbers that
    stand in its name.
    """

    numbers: tuple[int, ...] = (0,)
    """Possible counts of numbers in its name."""
    relaxes_end = False
    """True if its name may end on -eos: it is then built with eos_strict=False, and its rule
    holds for EOS too."""
    identity: Mapping[str, str] = {}
    """Facts that its tokens depend on besides its name, its draft and the decoder."""
    streams = ("token", "accept", "residual")
    keeps_probs = True

    def __init__(self, name: str, drafter: Drafter):
        self.name, self.drafter, self.draft_length = name, drafter, drafter.length

    @classmethod
    def arguments(
        cls, decoder: AnyDecoder, statistics: VerifierStatistics | None, numbers: tuple[float, ...]
    ) -> tuple[Any, ...]:
        """Return what the constructor takes after the drafter; asked once for all objects of a
        method. statistics: those of the decoder, if it has been measured."""
        return numbers

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        """q, p [B, m, V], tokens [B, m] -> whether each token passes, bool [B, m]. Padding may
        say anything."""
        raise NotImplementedError

    def replacement(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int) -> Tensor:
        """q, p [B, V] and the tokens [B] at one position of each row -> the distribution [B, V]
        of what replaces a refused one; it is drawn at number "residual". Rows without a refused
        token may say anything."""
        raise NotImplementedError

    def following(
        self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms, refused: Tensor
    ) -> Tensor:
        """Draw the tokens [B] after the accepted ones: the replacement in `refused` [B] rows,
        and from q in the others."""
        probs = torch.where(refused[:, None], self.replacement(q, p, tokens, eos), q)
        return uniform.state.sample(
            probs, torch.where(refused, uniform("residual"), uniform("token"))
        )

    def width(self, heads: int) -> int:
        return 1 + self.draft_length

    def start(self, state: BatchState) -> None:
        self.drafter.start(state)

    def admit(self, state: BatchState, rows: Tensor, admitted: Admitted) -> None:
        self.drafter.admit(state, rows, admitted)

    def propose(self, state: BatchState) -> Draft | None:
        # a pass adds a token, so the last that a limit allows is never drafted
        counts = (state.remaining - 1).clamp(0, self.draft_length)
        most = state.most(counts, self.draft_length)
        return self.drafter.propose(state, counts, most) if most else None

    def keep(self, state: BatchState) -> Kept:
        drafted = state.draft_counts  # [B]
        m = state.most(drafted, self.draft_length)
        states, draft, p = (
            state.states[:, : m + 1],
            state.draft_tokens[:, :m],
            state.draft_probs[:, :m],
        )
        position = state.next_positions(m + 1)
        # [B, m + 1, V]
        q = state.probs(state.heads(states, 1)[:, :, 0], position, state.histories(draft))
        if m:
            passes = self.accept(q[:, :m], p, draft, state.eos, Uniforms(state, position[:, :m]))
            accepted = (passes & (state.offsets[:m] < drafted[:, None])).cumprod(-1).sum(-1)
            where = accepted.clamp(max=m - 1)
            token = self.following(
                at(q, accepted),
                at(p, where),
                at(draft, where),
                state.eos,
                Uniforms(state, state.generated + accepted),
                accepted < drafted,
            )
        else:
            accepted, token = (
                state.zeros,
                state.sample(q[:, 0], state.uniform("token", state.generated)),
            )
        self.drafter.keep(state, at(states, accepted))
        # After an accepted EOS nothing is emitted anyway.
        tokens = torch.cat((draft, token[:, None]), 1).scatter(1, accepted[:, None], token[:, None])
        return Kept(tokens, accepted + 1, cached=accepted)
