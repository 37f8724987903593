"""Verification of a drafted chain x_1 … x_m in one pass of the decoder: the part that SD, SSD, PCG
and related methods share.

q are the probabilities of the target (the decoder's base head); p are those from which a draft
token was drawn. Both are taken after `dcar.sampling.warp`, and EOS is forbidden in both at the same
positions. The pass reads [last emitted token, x_1 … x_m] and yields q_1 … q_{m+1}. Tokens are
accepted from left to right, and the first rejected one is replaced. If none is rejected, a bonus
token is drawn from q_{m+1}, except after an accepted EOS.

Random numbers: x_i and the bonus token use the number "token" of their position, as next-token
decoding does. A perfect draft therefore reproduces next-token decoding token by token. A token
depends only on the numbers of its own and earlier positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dcar.decoding import BatchState, Decision, Draft, Method
from dcar.decoding.declare import option, unlisted
from dcar.decoding.step import Prefilled
from dcar.model.models import Borrowed
from eval.verifiers.drafters import Drafter, make_drafter
from heads.layers import at


@dataclass  # not frozen: PyTorch 2.11 does not compile those
class Uniforms:
    """Uniform random numbers in [0, 1) of positions [B] or [B, m], counted from the first
    generated token. `uniform("accept")` looks up the first number of each position; further ones
    are computed."""

    state: BatchState
    positions: Tensor

    def __call__(self, stream: str, number: int = 0) -> Tensor:
        if number == 0:
            return self.state.uniform(stream, self.positions)
        return self.state.further(stream, self.positions, number)

    def several(self, stream: str, numbers: Tensor) -> Tensor:
        """Return the numbers [B, n] of each of the positions [B], given their indices [n], which
        must be in a buffer: Inductor takes those that a step makes by `arange` for indices of
        tensors, which are int32 on a GPU, and their hashes overflow."""
        positions = self.positions[:, None].expand(-1, len(numbers))
        return self.state.further(stream, positions, numbers)


@dataclass(eq=False, repr=False)
class ChainVerifier(Method):
    """Method that verifies drafted chains. A subclass defines two rules on probabilities after
    temperature, top-k and top-p, for all rows at once and by tensor operations alone.

    `accept`: which draft tokens pass, each considered on its own. `replacement`: the distribution
    of the token that replaces the first rejected one (or `following`, which draws the token
    itself).
    """

    drafter: Drafter = unlisted(kw_only=True)
    draft: str = option("heads", "@", word="draft model", choices=("heads", "draft"), kw_only=True)
    length: int | None = option(None, ":", word="{} drafted", minimum=1, kw_only=True)
    streams = ("token", "accept", "residual")
    verifies = True
    keeps_probs = True

    def __post_init__(self) -> None:
        if self.drafter is not None:
            self.draft_by(self.drafter)

    def bind(self, models: Borrowed) -> None:
        self.draft_by(make_drafter(models, self.draft, self.length))

    def draft_by(self, drafter: Drafter) -> None:
        """Set the source of the drafts."""
        self.drafter, self.draft_length = drafter, drafter.length
        self.drafts_by_passes = drafter.runs_passes

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        """Return which tokens pass, bool [B, m], given q, p [B, m, V] and tokens [B, m]. The
        result for padding is ignored."""
        raise NotImplementedError

    def replacement(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int) -> Tensor:
        """Return the distribution [B, V] of the token that replaces a rejected one, given q, p
        [B, V] and the tokens [B] at one position of each row. It is drawn with the number
        "residual". The result for rows without a rejected token is ignored."""
        raise NotImplementedError

    def following(
        self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms, refused: Tensor
    ) -> Tensor:
        """Draw the tokens [B] after the accepted ones: the replacement in rows where `refused`
        [B], and from q in the others."""
        probs = torch.where(refused[:, None], self.replacement(q, p, tokens, eos), q)
        return uniform.state.sample(
            probs, torch.where(refused, uniform("residual"), uniform("token"))
        )

    def width(self, heads: int) -> int:
        return 1 + self.draft_length

    def start(self, state: BatchState) -> None:
        self.drafter.start(state)

    def prefill(self, state: BatchState, rows: Tensor, read: Prefilled) -> None:
        self.drafter.prefill(state, rows, read)

    def propose(self, state: BatchState) -> Draft | None:
        # a pass adds a token, so the last that a limit allows is never drafted
        counts = (state.remaining - 1).clamp(0, self.draft_length)
        most = state.most(counts, self.draft_length)
        return self.drafter.propose(state, counts, most) if most else None

    def keep(self, state: BatchState) -> Decision:
        drafted = state.draft_counts  # [B]
        m = state.most(drafted, self.draft_length)
        states = state.states[:, : m + 1]
        draft = state.draft_tokens[:, :m]
        p = state.draft_probs[:, :m]
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
            accepted = state.zeros
            token = state.sample(q[:, 0], state.uniform("token", state.generated))
        self.drafter.keep(state, at(states, accepted))
        # After an accepted EOS nothing is emitted anyway.
        tokens = torch.cat((draft, token[:, None]), 1).scatter(1, accepted[:, None], token[:, None])
        return Decision(accepted + 1, tokens, accepted)
