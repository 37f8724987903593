"""Verification of a chain x_1 … x_m by one pass of the decoder: what SD, SSD, PCG and their kin share.

Letters: q is the law of the target (the decoder's base head), p the law that a draft token was drawn from; both are
laws after `dcar.sampling.warp`, EOS forbidden alike. The pass reads [last emitted token, x_1 … x_m] and so yields
q_1 … q_{m+1}. Tokens are accepted from the left; the first one refused is replaced; if none is, the bonus token is
drawn from q_{m+1}, except behind an accepted EOS.

Draws: x_i and the bonus token take the draw "token" of their position, as next-token decoding does, so that a perfect
draft reproduces it token by token. A token of the output depends on draws of its own and earlier positions only: a
draft that was thrown away leaves no trace, and its positions may take the same draws again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dcar.decoding import Draft, Kept, Session
from dcar.sampling import sample, uniform
from eval.verifiers.drafters import Drafter


@dataclass(frozen=True)
class Draws:
    """Uniform numbers of some positions: keys [B], positions [B] or [B, m], counted from the first generated token.
    `first` looks the first draws of a stream up, where somebody has drawn those of all positions."""

    keys: Tensor
    positions: Tensor
    first: Callable[[str, Tensor], Tensor] | None = None

    def __call__(self, stream: str, draw: int = 0) -> Tensor:
        if draw == 0 and self.first is not None:
            return self.first(stream, self.positions)
        return uniform(self.keys, stream, self.positions, draw)

    def several(self, stream: str, draws: range) -> Tensor:
        """These draws of each position: [B, n] for positions [B]."""
        number = torch.arange(draws.start, draws.stop, draws.step, device=self.keys.device)
        return uniform(self.keys, stream, self.positions[:, None].expand(-1, len(draws)), number)


class ChainVerifier:
    """A method of the loop. A subclass answers two questions, both about laws after the warp.

    `accept`: which draft tokens pass, each seen by itself. `replace`: the token in the place of the first refused one.
    """

    def __init__(self, name: str, drafter: Drafter):
        self.name, self.drafter = name, drafter

    @property
    def draft_length(self) -> int:
        return self.drafter.length

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, draws: Draws) -> Tensor:
        """q, p [B, m, V], tokens [B, m] -> whether each token passes, bool [B, m]. Padding may say anything."""
        raise NotImplementedError

    def replace(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, draws: Draws) -> Tensor:
        """q, p [R, V] and the refused tokens [R] at the first refused position of R rows -> tokens [R]."""
        raise NotImplementedError

    def begin(self, session: Session) -> None:
        self.drafter.begin(session)

    def propose(self, session: Session) -> Draft | None:
        return self.drafter.propose(session)

    def keep(self, session: Session, hidden: Tensor, counts: Tensor, draft: Draft | None) -> Kept:
        eos = session.model.config.eos
        drafted = torch.zeros_like(counts) if draft is None else draft.counts  # [B]
        m = 0 if draft is None else draft.tokens.shape[1]
        # Hidden states of the last emitted token and of the draft behind it: [B, m + 1, D].
        column = (counts - drafted - 1)[:, None] + torch.arange(m + 1, device=counts.device)
        column = column.clamp(0, hidden.shape[1] - 1)
        states = hidden.gather(1, column[..., None].expand(-1, -1, hidden.shape[-1]))
        position = session.generated[:, None] + torch.arange(m + 1, device=counts.device)
        logits = session.model.heads(states, 1)[:, :, 0]
        history = session.histories(None if draft is None else draft.tokens)
        q = session.law(logits, position, history)  # [B, m + 1, V]

        accepted, last = torch.zeros_like(counts), torch.zeros_like(counts)
        if draft is not None and draft.laws is not None:
            passes = self.accept(q[:, :m], draft.laws, draft.tokens, eos,
                                 Draws(session.token_keys, position[:, :m], session.uniform))
            real = torch.arange(m, device=counts.device) < drafted[:, None]
            accepted = (passes & real).cumprod(-1).sum(-1)
            last = draft.tokens.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]
        row = torch.arange(len(counts), device=counts.device)
        following = session.generated + accepted
        token = sample(q[row, accepted], session.uniform("token", following))  # the bonus token
        refused = (accepted < drafted).nonzero()[:, 0]
        if draft is not None and draft.laws is not None and len(refused):
            where = accepted[refused]
            draws = Draws(session.token_keys[refused], following[refused],
                          partial(session.uniform, rows=refused))
            token[refused] = self.replace(q[refused, where], draft.laws[refused, where], draft.tokens[refused, where],
                                          eos, draws)
        ended = (accepted > 0) & (last == eos)
        tokens = token[:, None] if draft is None else torch.cat((draft.tokens, token[:, None]), 1)
        tokens = tokens.scatter(1, accepted[:, None], token[:, None])
        self.drafter.keep(session, states[row, accepted], accepted)
        return Kept(tokens, accepted + ~ended, cached=accepted)

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)
