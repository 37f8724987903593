"""The one decoding loop: every method answers what is proposed and what is kept.

A round is one forward pass of the decoder. The pass consumes the tokens that were emitted but not yet read
(`pending`) and, for verifying methods, a draft behind them. From the hidden states the method says which tokens are
emitted, and how many of the drafted positions stay in the cache.

The loop does everything else: batching of ragged rows, the KV cache, EOS inside a chunk, the length guard, the
accounting. Rows that finish leave the batch. `decode` is the entry; `Session` is a batch in flight; `Method` is what a
method must answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from dcar.decoding.ends import distribution_error, length_limit, no_distribution, up_to_end
from dcar.decoding.fast.distributions import probs_of, tokens_of
from dcar.decoding.records import DecodeResult, Prompt, batch_of, check_prompt
from dcar.decoding.tree import DraftTree
from dcar.errors import DistributionError
from dcar.model.base import Decoder
from dcar.sampling import SamplingConfig, group_keys, histories, shifted, uniform
from heads.layers import KVCache, last_of


@dataclass
class Draft:
    """Tokens proposed behind the pending ones: tokens [B, m], of which counts [B] are real; distributions [B, m, V]
    (the warped distribution that each token was drawn from) where verification needs them. With a `tree` the m tokens
    are its nodes in every row; without one they are a chain."""

    tokens: Tensor
    counts: Tensor
    probs: Tensor | None = None
    passes: Tensor | int = 0  # [B] forward passes of a draft model that each row took
    tree: DraftTree | None = None

    @property
    def proposed(self) -> Tensor:
        """Positions [B] that can be accepted at most: the tokens of a chain, the depth of a tree."""
        return self.counts if self.tree is None else torch.full_like(self.counts, self.tree.depth)


@dataclass
class Kept:
    """What a method keeps after a pass: tokens[b, :counts[b]] are emitted; the first `cached` [B] of them were drafted
    and accepted, so their keys and values are in the cache already."""

    tokens: Tensor
    counts: Tensor
    cached: Tensor | None = None
    actions: Tensor | None = None  # [B] chunk size asked for
    chosen: Tensor | None = None  # [B] which of several chunks drawn side by side
    log_probs: Tensor | None = None  # [B] of the action under the policy
    candidates: Tensor | None = None  # [B, N, n, F] candidate features of N chunks drawn side by side
    path: Tensor | None = None  # [B, L] of a tree: the nodes that were accepted, from the root on, padded with 0


class Method(Protocol):
    """A way of decoding. One object serves one `decode` call at a time.

    A method that drafts has an attribute `draft_length`, the most positions that `propose` returns, so that the caches
    have room for them.
    """

    name: str

    def begin(self, session: Session) -> None:
        """Called after the prefill of a batch; allocate state per row."""

    def propose(self, session: Session) -> Draft | None:
        """Tokens to verify in the next pass, or None."""

    def keep(self, session: Session, hidden: Tensor, counts: Tensor, draft: Draft | None) -> Kept:
        """The tokens to emit, given the hidden states [B, m, D] of the counts [B] positions just consumed: the pending
        tokens (on the first call the prompt), then the draft."""

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the state."""


class Session:
    """The state of a batch while it is decoded. Tensors of rows have one entry for each row still decoding; `rows` maps
    them to the batch that was started, in whose order the results are stored."""

    def __init__(self, model: Decoder, prompts: Sequence[Prompt], members: Sequence[int], sampling: SamplingConfig,
                 seed: int, share_token_draws: bool, record_hidden: bool, cache: KVCache, hidden: Tensor,
                 prompt_lengths: Tensor):
        device = hidden.device
        size = len(prompts)
        self.model, self.sampling, self.seed, self.prompts, self.members = model, sampling, seed, prompts, members
        self.cache = cache
        names = [p.utterance_id for p in prompts]
        self.token_keys, self.action_keys = (  # each [B]
            keys.to(device) for keys in group_keys(seed, names, members, share_token_draws))
        self.rows = torch.arange(size, device=device)
        self.alive = torch.ones(size, dtype=torch.bool, device=device)  # a finished row stays until the batch shrinks
        self.prompt_lengths = self.prompt_lengths_started = prompt_lengths
        self.generated = torch.zeros(size, dtype=torch.long, device=device)  # [B] tokens emitted so far
        self.limits = torch.tensor([length_limit(p, sampling) for p in prompts], device=device)
        self.last_hidden = last_of(hidden, prompt_lengths)  # [B, D] of the last consumed position
        self.pending = torch.zeros(size, 0, dtype=torch.long, device=device)  # emitted, not yet consumed
        self.pending_counts = torch.zeros(size, dtype=torch.long, device=device)
        # Per batch started, not per live row:
        room = int(self.limits.max()) + model.config.num_prediction_heads
        self.tokens = torch.zeros(size, room, dtype=torch.long, device=device)
        self.lengths = torch.zeros(size, dtype=torch.long, device=device)
        self.truncated = torch.zeros(size, dtype=torch.bool, device=device)
        # first position that had no distribution
        self.undefined_at = torch.full((size,), -1, dtype=torch.long, device=device)
        self.passes = torch.zeros(size, dtype=torch.long, device=device)
        self.history: list[dict[str, Tensor | None]] = []
        self.hidden: Tensor | None = None
        self.candidates: Tensor | None = None  # [B, decision, N, n, F], made with the first decision that saw any
        if record_hidden:
            with torch.inference_mode(False):  # a policy is trained on these
                self.hidden = torch.zeros(size, int(prompt_lengths.max()) + room, hidden.shape[-1], device=device,
                                          dtype=hidden.dtype)
        self.draft_passes = torch.zeros(size, dtype=torch.long, device=device)
        self.policy_seconds = 0.0
        self._steps = 0  # a lower bound on the tokens of every live row
        self._uniforms: dict[str, Tensor] = {}  # stream -> [B, room], drawn once for all positions

    def forbid_eos(self, positions: Tensor) -> Tensor | None:
        """Where EOS is masked: positions [B] or [B, k], counted from the first generated token."""
        return positions < self.sampling.min_tokens if self._some_eos_forbidden else None

    @property
    def _some_eos_forbidden(self) -> bool:
        """Whether some row may have less than `min_tokens`."""
        return self._steps < self.sampling.min_tokens

    def next_positions(self, count: int) -> Tensor:
        """Generated positions [B, k] of the next tokens."""
        return self.generated[:, None] + torch.arange(count, device=self.generated.device)

    def next_forbidden(self, count: int) -> Tensor | None:
        """Where EOS is masked among the next tokens [B, k]."""
        return self.forbid_eos(self.next_positions(count)) if self._some_eos_forbidden else None

    def probs(self, logits: Tensor, positions: Tensor, history: Tensor | None = None) -> Tensor:
        """The warped distributions of the tokens at generated positions [B] or [B, k]: logits [B, …, V] -> [B, …, V].

        Where the logits give no distribution, `decode` raises when it next synchronises.
        """
        probs = probs_of(logits, self.sampling, self.forbid_eos(positions), self.model.config.eos, history)
        self.check(probs)
        return probs

    def draw(self, logits: Tensor, num_candidates: int = 1) -> Tensor:
        """The next tokens [B, k, N], N draws of each from its warped distribution, at the `shifted` random numbers of
        its position: logits [B, k, V]. Not for repetition-aware sampling."""
        k = logits.shape[1]
        tokens, probs = tokens_of(logits, self.next_numbers(k, num_candidates), self.sampling, self.next_forbidden(k),
                                  self.model.config.eos)
        if probs is not None:
            self.check(probs)
        return tokens

    def check(self, probs: Tensor) -> None:
        """Record the rows whose distributions [B, …, V] are none (see `no_distribution`)."""
        if probs.device.type != "cpu" or not bool((probs.sum(-1) > 0).all()):  # reading is free on the CPU
            self.note(no_distribution(probs))

    def note(self, undefined_at: Tensor) -> None:
        """Record the present position of the rows [B] that have no distribution."""
        if undefined_at.device.type == "cpu" and not bool(undefined_at.any()):
            return
        known = self.undefined_at[self.rows]
        self.undefined_at[self.rows] = torch.where(undefined_at & self.alive & (known < 0), self.generated, known)

    def uniform(self, stream: str, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """`dcar.sampling.uniform` of the rows in flight (or of those of them in `rows` [R]) at generated positions [B]
        or [B, k], for the first number of a position.

        The numbers of all positions are drawn when a stream is first used, which is cheaper than drawing them step by
        step. Chunk decisions use `action_keys`, tokens `token_keys`. Positions beyond the last one are padding and may
        get any number.
        """
        if stream not in self._uniforms:
            keys = self.action_keys if stream in ("policy", "chunk", "shuffle") else self.token_keys
            every = torch.arange(self.tokens.shape[1], device=keys.device).expand(len(keys), -1)
            self._uniforms[stream] = uniform(keys, stream, every)
        table = self._uniforms[stream]
        table = table if rows is None else table.index_select(0, rows)
        index = (positions if positions.dim() == 2 else positions[:, None]).clamp(max=table.shape[1] - 1)
        return table.gather(1, index).view(positions.shape)

    def next_numbers(self, count: int, num_candidates: int) -> Tensor:
        """`shifted` numbers [B, k, N] of the next tokens; computed once for all positions, too."""
        stream = f"token, {num_candidates} draws"
        if stream not in self._uniforms:
            every = torch.arange(self.tokens.shape[1], device=self.rows.device).expand(len(self.rows), -1)
            self._uniforms[stream] = shifted(self.uniform("token", every), num_candidates)
        table = self._uniforms[stream]
        if len(table) == 1 and table.device.type == "cpu":  # a view
            first = int(self.generated)
            return table[:, first : first + count]
        index = self.next_positions(count).clamp(max=table.shape[1] - 1)
        return table.gather(1, index.unsqueeze(-1).expand(-1, -1, num_candidates))

    def recent(self, window: int) -> Tensor:
        """The last `window` generated tokens of every row [B, window], -1 where there were none; no prompt tokens."""
        index = self.generated[:, None] - window + torch.arange(window, device=self.rows.device)
        return torch.where(index >= 0, self.tokens[self.rows].gather(1, index.clamp(min=0)), -1)

    def histories(self, tokens: Tensor | None = None) -> Tensor | None:
        """The `history` argument of `warp`: the window of tokens before the next token and after each of the drafted
        tokens [B, m], [B, m + 1, W]. None without a repetition_window."""
        if not self.sampling.repetition_window:
            return None
        recent = self.recent(self.sampling.repetition_window)
        return recent[:, None] if tokens is None else histories(recent, tokens)

    def consumed(self, hidden: Tensor, counts: Tensor, start: Tensor) -> None:
        """Store the hidden states of counts[b] positions from speech position start[b] on."""
        self.last_hidden = last_of(hidden, counts)
        self.record(hidden, start)

    def record(self, hidden: Tensor, start: Tensor) -> None:
        """Write hidden states [B, m, D] from speech position start[b] on, if they are recorded; padding after a row's
        real positions is overwritten by its next ones."""
        if self.hidden is not None:
            scatter_rows(self.hidden, self.rows, start, hidden)

    def roll_back(self, kept: Kept, draft: Draft, hidden: Tensor) -> None:
        """Drop the drafted positions that were not accepted; hidden [B, m, D] of the pass that read them."""
        accepted = torch.zeros_like(draft.counts) if kept.cached is None else kept.cached
        accepted = accepted * self.alive  # a finished row must not grow
        first = self.cache.lengths - draft.counts
        if draft.tree is None:
            self.cache.truncate(first + accepted)
        elif kept.path is None:
            raise ValueError("a method that drafts trees must say which path it keeps")
        else:
            self.cache.gather(first, kept.path, accepted)
            column = (self.pending_counts[:, None] + kept.path).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            self.record(hidden.gather(1, column), first)

    def emit(self, kept: Kept, proposed: Tensor | None) -> None:
        """Store the kept tokens up to EOS and the length limit, and mark the rows that end there as finished."""
        asked = torch.minimum(kept.counts, self.limits - self.generated) * self.alive
        cached = kept.cached
        if proposed is None:
            proposed = None if cached is None else torch.zeros_like(cached)
        elif cached is None:
            cached = torch.zeros_like(proposed)
        counts, ended = up_to_end(kept.tokens, asked, self.model.config.eos)
        scatter_rows(self.tokens, self.rows, self.generated, kept.tokens)
        self.history.append({
            "rows": torch.where(self.alive, self.rows, -1), "emitted": counts,
            "position": self.prompt_lengths + self.generated - 1, "actions": kept.actions,
            "chosen": kept.chosen, "log_probs": kept.log_probs, "cached": cached, "proposed": proposed,
        })
        if self.hidden is not None and kept.candidates is not None:
            self._record_candidates(kept.candidates)
        self.passes[self.rows] += self.alive
        self._steps += 1
        self.generated = self.generated + counts
        full = self.alive & ~ended & (self.generated >= self.limits)
        self.lengths[self.rows] = self.generated
        self.truncated[self.rows] |= full
        self.alive = self.alive & ~ended & ~full
        # The next pass reads the emitted tokens that are not in the cache.
        if cached is None:
            self.pending, self.pending_counts = kept.tokens, counts * self.alive
            return
        cached, width = torch.minimum(cached, counts), max(1, kept.tokens.shape[1])
        shift = (cached[:, None] + torch.arange(width, device=cached.device)).clamp(max=width - 1)
        self.pending, self.pending_counts = kept.tokens.gather(1, shift), (counts - cached) * self.alive

    def _record_candidates(self, candidates: Tensor) -> None:
        """Store the candidate features [B, N, n, F] of this pass. A finished row writes after its last decision."""
        if self.candidates is None:
            with torch.inference_mode(False):  # a policy is trained on these
                self.candidates = candidates.new_zeros(self.tokens.shape[0], self.tokens.shape[1] + 1,
                                                       *candidates.shape[1:])
        self.candidates[self.rows, self.passes[self.rows]] = candidates

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (indices into the live rows)."""
        self.cache = self.cache.select(rows)
        for name in ("token_keys", "action_keys", "rows", "alive", "prompt_lengths", "generated", "limits",
                     "last_hidden", "pending", "pending_counts"):
            setattr(self, name, getattr(self, name)[rows])
        self._uniforms = {stream: table[rows] for stream, table in self._uniforms.items()}


def scatter_rows(target: Tensor, rows: Tensor, start: Tensor, values: Tensor) -> None:
    """Write values [B, m, …] to target[rows[b], start[b] : start[b] + m]. Padding after a row's real values is
    overwritten by the next write or never read; beyond the target's end it goes to the last column, which no row
    reaches."""
    new, last = values.shape[1], target.shape[1] - 1
    if len(rows) == 1 and target.device.type == "cpu":
        first = int(start)
        target[int(rows), first : first + new] = values[0, : last + 1 - first]
        return
    column = (start[:, None] + torch.arange(new, device=start.device)).clamp(max=last)
    target[rows[:, None], column] = values.to(target.dtype)


@torch.inference_mode()  # a tenth less time a step than no_grad, at the size of the starter model
def decode(model: Decoder, prompts: Sequence[Prompt], method: Method, sampling: SamplingConfig, *, seed: int = 0,
           group_size: int = 1, share_token_draws: bool = False, record_hidden: bool = False, batch_size: int = 32,
           ) -> list[DecodeResult]:
    """Speak every prompt `group_size` times; results in the order of the prompts, members of a group adjacent.

    Args:
        model: decoder in eval mode; its device and dtype are used.
        method: what is proposed and what is kept (FixedChunk, PolicyChunk, …, or a verifier of `eval`).
        seed: with it, every draw is addressed by utterance id, member of the group, and position.
        share_token_draws: give the members of a group common random numbers for tokens (actions keep their own).
        record_hidden: return the hidden states of all consumed positions, float, on the model's device, and what
            decisions after the draw saw: ordinary tensors that a policy can be trained on.
        batch_size: utterances decoded at once (times group_size rows); no effect on the tokens.

    Raises TextError or DataError if a prompt cannot be decoded by this model; nothing has been decoded then.
    DistributionError if the model gives no distribution for some token; its `finished` are the utterances of the
    batches before.
    """
    for prompt in prompts:
        check_prompt(prompt, model.config)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].text_ids))  # similar lengths finish together
    results: list[list[DecodeResult]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        try:
            batch = _decode_batch(model, [prompts[i] for i in chosen], method, sampling, seed, group_size,
                                  share_token_draws, record_hidden)
        except DistributionError as error:
            error.finished = list(chain.from_iterable(results))
            raise
        for j, i in enumerate(chosen):
            results[i] = batch[j * group_size : (j + 1) * group_size]
    return list(chain.from_iterable(results))


def _decode_batch(model: Decoder, prompts: list[Prompt], method: Method, sampling: SamplingConfig, seed: int,
                  group_size: int, share_token_draws: bool, record_hidden: bool) -> list[DecodeResult]:
    started = time.perf_counter()
    device = model.norm.weight.device
    batch = batch_of(prompts, model.config, device)
    longest = max(length_limit(p, sampling) for p in prompts)
    slack = 2 * model.config.num_prediction_heads + getattr(method, "draft_length", 0)
    capacity = batch.prompt_ids.shape[1] + longest + slack
    cache, hidden = model.prefill(*batch, capacity)
    prompt_lengths = batch.prompt_lengths
    if group_size > 1:  # the members of a group share one prefill
        cache = cache.select(torch.arange(len(prompts), device=device), group_size)
        hidden, prompt_lengths = (x.repeat_interleave(group_size, 0) for x in (hidden, prompt_lengths))
    session = Session(
        model, [p for p in prompts for _ in range(group_size)], list(range(group_size)) * len(prompts), sampling,
        seed, share_token_draws, record_hidden, cache, hidden, prompt_lengths,
    )
    method.begin(session)
    session.consumed(hidden, prompt_lengths, torch.zeros_like(prompt_lengths))
    counts, draft = prompt_lengths, None
    while True:
        kept = method.keep(session, hidden, counts, draft)
        if draft is not None:
            session.roll_back(kept, draft, hidden)
        session.emit(kept, None if draft is None else draft.proposed)
        left, undefined_at = torch.stack((session.alive.sum(), session.undefined_at.max())).tolist()
        if undefined_at >= 0:
            row = int(session.undefined_at.argmax())
            raise distribution_error(session.prompts[row].utterance_id, undefined_at)
        if left == 0:
            break
        if left <= len(session.rows) // 2:  # shrink seldom: it copies the cache
            rows = session.alive.nonzero()[:, 0]
            session.select(rows)
            method.select(rows)
        draft = method.propose(session)
        pending = session.pending_counts
        tokens, counts, layout = session.pending[:, : int(pending.max())], pending, None
        if draft is not None:
            session.draft_passes[session.rows] += draft.passes
            tokens, counts = append_draft(tokens, pending, draft)
            layout = None if draft.tree is None else draft.tree.layout(pending, tokens.shape[1])
        start = session.cache.lengths
        hidden = model.extend(session.cache, tokens, counts, layout)
        session.consumed(hidden, counts if layout is None else pending, start)
    return list(_results(session, method.name, time.perf_counter() - started))


def append_draft(tokens: Tensor, counts: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """Concatenate each row's pending tokens and its draft: [B, m], [B]."""
    parts = ((tokens, counts), (draft.tokens, draft.counts))
    real = torch.cat([torch.arange(t.shape[1], device=t.device) < many[:, None] for t, many in parts], 1)
    order = real.sort(dim=1, descending=True, stable=True).indices  # padding goes behind
    total = counts + draft.counts
    both = torch.cat((tokens, draft.tokens), 1).masked_fill(~real, 0)
    return both.gather(1, order)[:, : int(total.max())], total


def _results(session: Session, name: str, seconds: float) -> Iterator[DecodeResult]:
    size = len(session.prompts)
    fields = ("emitted", "position", "actions", "chosen", "log_probs", "cached", "proposed")
    by_row: list[dict[str, list]] = [{k: [] for k in fields} for _ in range(size)]
    for step in session.history:
        columns = {k: v.tolist() for k, v in step.items() if v is not None}
        for i, row in enumerate(columns.pop("rows")):
            if row >= 0:
                for key, values in columns.items():
                    by_row[row][key].append(values[i])
    totals, passes, draft_passes = (x.tolist() for x in (session.lengths, session.passes, session.draft_passes))
    for row, prompt in enumerate(session.prompts):
        steps = by_row[row]
        length = int(session.prompt_lengths_started[row])
        hidden = None
        if session.hidden is not None:
            # The last chunk was emitted but never read, so its positions have no hidden state.
            hidden = session.hidden[row, : steps["position"][-1] + 1]
        verified = [(p, a) for p, a in zip(steps["proposed"], steps["cached"], strict=True) if p]
        yield DecodeResult(
            prompt.utterance_id, name, session.seed, session.tokens[row, : totals[row]].tolist(),
            bool(session.truncated[row]), passes[row], draft_passes[row], sum(steps["proposed"]), sum(steps["cached"]),
            steps["emitted"], steps["actions"], steps["position"], steps["log_probs"], hidden, length,
            seconds={"lm": seconds / size, "policy": session.policy_seconds / size},
            rounds_proposed=[p for p, _ in verified], rounds_accepted=[a for _, a in verified],
            candidates=None if session.candidates is None else session.candidates[row, : passes[row]],
            chosen=steps["chosen"],
        )
