"""Where the draft comes from: the decoder's own additional heads, or a small draft model.

Both draw x_i from a distribution after `dcar.sampling.warp` with the run's sampling, EOS forbidden as for the target,
and hand that distribution over; both stop behind a drafted EOS.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dcar.decoding import Draft, Session
from dcar.decoding.chunks import draw_chunk
from dcar.decoding.records import batch_of
from dcar.model.base import Decoder
from dcar.sampling import sample
from heads.layers import KVCache, last_of


class Drafter(Protocol):
    """Proposes a chain for every row and is told what became of it."""

    length: int  # most tokens of a draft

    def begin(self, session: Session) -> None: ...

    def propose(self, session: Session, counts: Tensor, most: int) -> Draft:
        """Up to counts [B] tokens behind the emitted ones, with distributions; most: the largest count, at least 1."""

    def keep(self, session: Session, state: Tensor, accepted: Tensor) -> None:
        """Of the draft, accepted [B] tokens were kept; state [B, D] is the target's hidden state of the last of them
        (of the token before the draft where none was). Called before the loop counts them as generated."""

    def select(self, rows: Tensor) -> None: ...


class HeadDrafter:
    """Self-speculation: heads 2 … m + 1 of the hidden state that the last emitted token was drawn from.

    That token was drawn from the base head (or its residual), so head 1 + i predicts the i-th token behind it. The
    heads do not see the token, nor each other: p_i is the distribution of head 1 + i given the state. Costs no pass.
    """

    def __init__(self, length: int):
        self.length = length

    def begin(self, session: Session) -> None:
        pass

    def propose(self, session: Session, counts: Tensor, most: int) -> Draft:
        tokens, all_probs = draw_chunk(session, session.model.heads(self._state, most + 1)[:, 1:])  # heads 2 … m + 1
        is_eos = tokens == session.model.config.eos
        first = torch.where(is_eos.any(-1), is_eos.to(torch.uint8).argmax(-1) + 1, most)  # tokens up to the first EOS
        return Draft(tokens, torch.minimum(counts, first), all_probs)

    def keep(self, session: Session, state: Tensor, accepted: Tensor) -> None:
        self._state = state

    def select(self, rows: Tensor) -> None:
        self._state = self._state[rows]


class ModelDrafter:
    """A draft model with its own KV cache, kept in step with the target's.

    A draft of m tokens costs m passes: the first reads what was emitted since (the correction or bonus token, and x_m
    of the last draft where all of it was accepted), the others x_1 … x_{m-1}. What was refused is cut off the cache.
    """

    def __init__(self, draft: Decoder, length: int):
        self.draft, self.length = draft, length

    def begin(self, session: Session) -> None:
        batch = batch_of(session.prompts, self.draft.config, session.rows.device)
        capacity = batch.prompt_ids.shape[1] + int(session.limits.max()) + self.length + 2
        self._cache: KVCache = self.draft.prefill(*batch, capacity)[0]
        session.draft_passes += 1

    def propose(self, session: Session, counts: Tensor, most: int) -> Draft:
        eos = self.draft.config.eos
        state = self._catch_up(session, counts > 0)
        drafting = counts > 0  # rows whose chain goes on
        real = torch.zeros_like(counts)
        tokens: list[Tensor] = []
        all_probs: list[Tensor] = []
        for i in range(most):
            position = torch.minimum(session.generated + i, session.limits)  # of rows that have stopped: anything
            logits = self.draft.heads(state, 1)[:, 0]
            history = session.histories(torch.stack(tokens, 1) if tokens else None)
            probs = session.probs(logits, position, None if history is None else history[:, -1])
            token = sample(probs, session.uniform("token", position))
            tokens.append(token)
            all_probs.append(probs)
            real = real + drafting
            drafting = drafting & (token != eos) & (real < counts)
            if not bool(drafting.any()):
                break
            state = self.draft.extend(self._cache, token[:, None], drafting.long())[:, 0]
        return Draft(torch.stack(tokens, 1), real, torch.stack(all_probs, 1), passes=real)

    def _catch_up(self, session: Session, rows: Tensor) -> Tensor:
        """Read the emitted tokens that the draft model has not read, in these rows; its hidden states [B, D]."""
        read = self._cache.lengths - session.prompt_lengths
        missing = (session.generated - read) * rows
        offset = read[:, None] + torch.arange(int(missing.max()), device=read.device)
        emitted = session.tokens[session.rows]
        tokens = emitted.gather(1, offset.clamp(max=emitted.shape[1] - 1))
        return last_of(self.draft.extend(self._cache, tokens, missing), missing)

    def keep(self, session: Session, state: Tensor, accepted: Tensor) -> None:
        valid = session.prompt_lengths + session.generated + accepted
        self._cache.truncate(torch.minimum(self._cache.lengths, valid))

    def select(self, rows: Tensor) -> None:
        self._cache = self._cache.select(rows)
