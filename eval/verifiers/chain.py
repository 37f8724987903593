"""Verification of a drafted chain x_1 … x_m by one pass of the decoder: what SD, SSD, PCG and their kin share.

q are the probabilities of the target (the decoder's base head), p those that a draft token was drawn from. Both are
taken after `dcar.sampling.warp`, and EOS is forbidden in both at the same positions. The pass reads [last emitted
token, x_1 … x_m] and gives q_1 … q_{m+1}. Tokens are accepted from the left. The first refused one is replaced. If none
is refused, a bonus token is drawn from q_{m+1}, except behind an accepted EOS.

Random numbers: x_i and the bonus token take number "token" of their position, as next-token decoding does. So a perfect
draft reproduces next-token decoding token by token. A token depends on numbers of its own and earlier positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dcar.decoding import Draft, Kept, Session
from dcar.model.draft import AnyDecoder
from dcar.sampling import sample, uniform
from eval.verifiers.drafters import Drafter


@dataclass(frozen=True)
class Uniforms:
    """Uniform numbers in [0, 1) of some positions: `uniform("accept")` gives one a position.

    keys [B]; positions [B] or [B, m], counted from the first generated token. `first` looks up the first number of a
    stream, where the loop has drawn those of all positions.
    """

    keys: Tensor
    positions: Tensor
    first: Callable[[str, Tensor], Tensor] | None = None

    def __call__(self, stream: str, number: int = 0) -> Tensor:
        if number == 0 and self.first is not None:
            return self.first(stream, self.positions)
        return uniform(self.keys, stream, self.positions, number)

    def several(self, stream: str, numbers: range) -> Tensor:
        """Several numbers of each position: [B, n] for positions [B]."""
        number = torch.arange(numbers.start, numbers.stop, numbers.step, device=self.keys.device)
        return uniform(self.keys, stream, self.positions[:, None].expand(-1, len(numbers)), number)


class ChainVerifier:
    """A method of the loop. A subclass answers two questions about probabilities after temperature, top-k and top-p.

    `accept`: which draft tokens pass, each seen by itself. `replace`: the token in the place of the first refused one.
    A subclass is built as `cls(name, drafter, *arguments(decoder, numbers))`, with the numbers that stand in its name.
    """

    numbers: tuple[int, ...] = (0,)
    """How many numbers may stand in its name."""
    relaxes_end = False
    """Whether its name may end on -eos: it is then built with eos_strict=False, and its rule holds for EOS too."""
    identity: Mapping[str, str] = {}
    """What its tokens depend on besides its name, its draft and the decoder."""

    def __init__(self, name: str, drafter: Drafter):
        self.name, self.drafter = name, drafter

    @classmethod
    def arguments(cls, decoder: AnyDecoder, numbers: tuple[float, ...]) -> tuple[Any, ...]:
        """What the constructor takes behind the drafter; asked once for all objects of a method."""
        return numbers

    @property
    def draft_length(self) -> int:
        return self.drafter.length

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        """q, p [B, m, V], tokens [B, m] -> whether each token passes, bool [B, m]. Padding may say anything."""
        raise NotImplementedError

    def replace(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        """q, p [R, V] and the refused tokens [R] at the first refused position of R rows -> tokens [R]."""
        raise NotImplementedError

    def begin(self, session: Session) -> None:
        self.drafter.begin(session)

    def propose(self, session: Session) -> Draft | None:
        """None where no row has room: a pass adds a token, so the last that a limit allows is never drafted."""
        counts = (session.limits - session.generated - 1).clamp(0, self.drafter.length) * session.alive
        most = int(counts.max())
        return self.drafter.propose(session, counts, most) if most else None

    def keep(self, session: Session, hidden: Tensor, counts: Tensor, draft: Draft | None) -> Kept:
        eos = session.model.config.eos
        drafted = torch.zeros_like(counts) if draft is None else draft.counts  # [B]
        m = 0 if draft is None else draft.tokens.shape[1]
        states = states_of(hidden, counts - drafted - 1, m + 1)
        position = session.generated[:, None] + torch.arange(m + 1, device=counts.device)
        history = session.histories(None if draft is None else draft.tokens)
        q = session.probs(session.model.heads(states, 1)[:, :, 0], position, history)  # [B, m + 1, V]

        accepted, last = torch.zeros_like(counts), torch.zeros_like(counts)
        if draft is not None and draft.probs is not None:
            passes = self.accept(q[:, :m], draft.probs, draft.tokens, eos,
                                 Uniforms(session.token_keys, position[:, :m], session.uniform))
            real = torch.arange(m, device=counts.device) < drafted[:, None]
            accepted = (passes & real).cumprod(-1).sum(-1)
            last = draft.tokens.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]
        row = torch.arange(len(counts), device=counts.device)
        following = session.generated + accepted
        token = sample(q[row, accepted], session.uniform("token", following))  # the bonus token
        refused = (accepted < drafted).nonzero()[:, 0]
        if draft is not None and draft.probs is not None and len(refused):
            where = accepted[refused]
            numbers = Uniforms(session.token_keys[refused], following[refused],
                               partial(session.uniform, rows=refused))
            token[refused] = self.replace(q[refused, where], draft.probs[refused, where], draft.tokens[refused, where],
                                          eos, numbers)
        ended = (accepted > 0) & (last == eos)
        tokens = token[:, None] if draft is None else torch.cat((draft.tokens, token[:, None]), 1)
        tokens = tokens.scatter(1, accepted[:, None], token[:, None])
        self.drafter.keep(session, states[row, accepted], accepted)
        return Kept(tokens, accepted + ~ended, cached=accepted)

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)


def states_of(hidden: Tensor, first: Tensor, count: int) -> Tensor:
    """`count` hidden states from column `first` [B] of each row on: [B, n, D] -> [B, count, D]; padding repeats."""
    column = (first[:, None] + torch.arange(count, device=first.device)).clamp(0, hidden.shape[1] - 1)
    return hidden.gather(1, column[..., None].expand(-1, -1, hidden.shape[-1]))
