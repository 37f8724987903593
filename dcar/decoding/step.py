"""The one decoding step, the same for every method, on any device.

    keep     the method selects the tokens to emit, given the hidden states of what was read
    emit     they are stored up to EOS and the length limit
    propose  the method may draft tokens for the next pass
    read     one pass of the decoder over the emitted tokens that were not read yet, and the draft

A step is a program of tensors on the buffers of a `BatchState`. The host reads nothing, and no
shape depends on data, so it can be captured as a CUDA graph, and its parts compiled. Eager on a
CPU, where reading is free, widths follow the data (`BatchState.most`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dcar.decoding.columns import real_positions
from dcar.decoding.declare import Style, compact_name, settings_of
from dcar.decoding.reader import Layout
from dcar.decoding.records import Decision, Prompt, PromptBatch
from dcar.decoding.state import BatchState
from dcar.decoding.tree import DraftTree
from dcar.model.models import Borrowed
from heads.layers import at


@dataclass
class Draft:
    """Tokens [B, m] proposed after the pending one, of which counts [B] are real; probs [B, m, V
    + 1] are the warped distributions that they were drawn from, if verification needs them;
    passes [B] of a draft model; layout of a tree."""

    tokens: Tensor
    counts: Tensor
    probs: Tensor | None = None
    passes: Tensor | None = None
    layout: Layout | None = None


class Method:
    """Decoding method. It contains settings and constant tensors only; its data for each row are
    in `BatchState.own`, so one object serves any number of batches. A subclass overrides `keep`,
    and `propose` if it drafts. Its settings are fields (`dcar.decoding.declare`)."""

    kind = ""
    """Name of the method without settings; empty = the path of its class."""
    example = ""
    """A compact name, as it is written."""
    style = Style()
    verifies = False
    """True if a pass checks drafted tokens."""
    draft_length = 0
    """Maximum number of positions that `propose` returns."""
    keeps_probs = False
    """True if its drafts have distributions."""
    streams: Sequence[str] = ("token",)
    """Streams of random numbers that it looks up by `BatchState.uniform`; "chunk" is free for a
    method of your own."""
    drafts_by_passes = False
    """True if `propose` runs passes of another model: it is not compiled as a whole then."""
    tree: DraftTree | None = None
    """Shape of its drafts, if they are trees."""
    logged: Sequence[str] = ()
    """Fields among `sizes`, `log_probs` and `chosen` that its results contain."""

    _name = ""

    @property
    def name(self) -> str:
        """Compact name, with the settings that are not defaults: car-5."""
        if self._name:
            return self._name
        own = {s: getattr(self, s.attribute) for s in settings_of(type(self))}
        changed = {s.name: value for s, value in own.items() if value != s.default}
        return compact_name(self.kind or type(self).__qualname__, type(self), changed)

    def named(self, name: str) -> Self:
        """Give the method another name, and return it."""
        self._name = name
        return self

    def bind(self, models: Borrowed) -> None:
        """Take the models that the method needs; those become part of the identity of its tokens.
        Raises ConfigError if one is missing or the settings do not fit."""

    def width(self, heads: int) -> int:
        """Return the maximum number of tokens that a round emits, given the decoder's number of
        heads. Raises ConfigError if there are too few."""
        return 1

    def key(self) -> Hashable:
        """Return what a captured step of the method depends on: its class and settings, models and
        tensors by identity. Methods with the same key can take turns in an engine."""
        settings = (
            (name, by_value(value)) for name, value in vars(self).items() if name != "_name"
        )
        return type(self), *settings

    def start(self, state: BatchState) -> None:
        """Allocate the method's data for each row, once for a state. Raises ConfigError if the
        decoder does not fit."""

    def recorded(self, width: int) -> tuple[int, ...] | None:
        """Return the shape of the features of a decision on chunks of `width` tokens, which
        training reads; None if decisions read none."""
        return None

    def refresh(self, state: BatchState) -> None:
        """Load the present weights of the models that the method uses (a policy). Called before
        every run."""

    def prefill(self, state: BatchState, rows: Tensor, read: Prefilled) -> None:
        """Set the method's data for rows [R] in which utterances start, by tensor operations alone:
        it may be captured. A row may occur several times, with the same utterance."""

    def admit(self, state: BatchState, rows: Tensor, admitted: Admitted) -> None:
        """Set the method's data for rows [R] in which utterances start, after `prefill`, where that
        needs more than tensors."""

    def keep(self, state: BatchState) -> Decision:
        """Return the tokens to emit, given `state.states` [B, 1 + m, D]: hidden states of the
        last token and of the drafted ones (`state.draft_tokens`, of which `state.draft_counts`
        are real)."""
        raise NotImplementedError

    def propose(self, state: BatchState) -> Draft | None:
        """Return tokens to verify in the next pass."""
        return None

    def observe(
        self, state: BatchState, hidden: Tensor, counts: Tensor, real: Tensor | None
    ) -> None:
        """Process the hidden states [B, m, D] of a pass, of which counts [B] are new (those of
        `real_positions`, if given), before the cache moves on."""


def by_value(value: Any) -> Hashable:
    """Return a setting if it is a plain value, or its identity."""
    if isinstance(value, list | tuple):
        return tuple(by_value(part) for part in value)
    return value if value is None or isinstance(value, int | float | str | range) else id(value)


@dataclass
class Prefilled:
    """Prompts that were read for R rows. Those of a group share one: there are U of them."""

    batch: PromptBatch
    hidden: Tensor  # [U, P, D]
    origins: Tensor  # [R] which of them each row continues

    @property
    def lengths(self) -> Tensor:
        """Speech positions [U] of the prompts."""
        return self.batch.prompt_lengths


@dataclass
class Admitted:
    """Utterances that start in R rows."""

    prompts: Sequence[Prompt]
    members: Sequence[int]  # of each in its group
    seed: int


def step(state: BatchState, method: Method) -> None:
    """Advance every live row by one round. Its parts between two passes may be compiled, each as a
    whole."""
    part = state.reader.backend.part
    # keep and emit: tokens [B, n], of which the next pass reads the first counts [B]
    tokens, counts = part(choose)(state, method)
    if state.eager and not bool(state.alive.any()):
        return  # what was emitted last is never read
    tokens, layout = tokens[:, : state.most(counts, tokens.shape[1])], None
    # propose: tokens [B, n + m] with a draft behind them
    if state.draft_length:
        drafting = draft if method.drafts_by_passes else part(draft)
        tokens, layout = drafting(state, method, tokens)
    # read: hidden states [B, n + m, D]; on a CPU padding is left out
    real = None
    if state.eager and state.rows > 1 and layout is None:
        new = counts + state.draft_counts if state.draft_length else counts
        real = real_positions(new, tokens.shape[1])
    longest = state.longest_of(state.cache, state.width - 1 if state.draft_length else 0)
    hidden = state.reader.read(state.cache, tokens, longest, layout, real)
    part(store)(state, hidden, counts)
    if state.hidden is not None:
        record(state.hidden, state.cache.lengths, hidden)
    method.observe(state, hidden, counts, real)
    # the emitted tokens are in the cache now; of a draft, those that the next step accepts
    state.cache.lengths.add_(counts)


def choose(state: BatchState, method: Method) -> tuple[Tensor, Tensor]:
    """Have the method select tokens, and emit them. Return those [B, n] of which the next pass
    reads counts [B]."""
    decision = method.keep(state)
    if state.features is not None and decision.features is not None:
        # a finished row writes after its last decision
        record(state.features, state.passes, decision.features[:, None])
    tokens = decision.tokens
    counts = emit(state, decision)
    # The next pass reads the emitted tokens that are not in the cache: a whole chunk, or the one
    # after accepted drafts.
    if decision.accepted is not None:
        tokens = tokens.gather(1, decision.accepted[:, None])
    return tokens, counts


def emit(state: BatchState, decision: Decision) -> Tensor:
    """Store the kept tokens up to EOS and the length limit, and end the rows that reach one of
    them. Return how many tokens [B] the next pass reads of each row."""
    tokens, accepted, alive = decision.tokens, decision.accepted, state.alive
    width = tokens.shape[1]
    asked = torch.minimum(decision.sizes, state.remaining)
    first_end = torch.where(tokens == state.eos, state.offsets[:width], width).amin(1)
    counts = torch.minimum(asked, first_end)
    places = state.first_token[: state.rows, None] + state.next_positions(width)
    state.flat_tokens.index_put_((places,), tokens)
    log(state, decision, counts)
    state.passes.add_(alive)
    state.positions.add_(counts[:, None])
    state.remaining.sub_(counts).masked_fill_(first_end < asked, 0)
    torch.gt(state.remaining, 0, out=alive)
    if accepted is None:
        return counts * alive
    if decision.path is not None:
        state.cache.gather(state.cache.lengths, decision.path)
    state.cache.lengths.add_(accepted * alive)
    return alive.long()


def log(state: BatchState, decision: Decision, counts: Tensor) -> None:
    """Log this pass: the `LOGGED` numbers, and log-probabilities of a policy."""
    columns = (counts, state.draft_counts, decision.accepted, decision.sizes, decision.chosen)
    logged = torch.stack([state.zeros if c is None else c for c in columns], -1)
    place = state.first_pass[: state.rows] + state.passes
    state.flat_log.index_put_((place,), logged)
    if decision.log_probs is not None:
        state.flat_log_probs.index_put_((place,), decision.log_probs)


def draft(state: BatchState, method: Method, tokens: Tensor) -> tuple[Tensor, Layout | None]:
    """Have the method draft tokens that follow the tokens [B, n]. Return both, [B, n + m], and the
    layout of a tree."""
    drafted = method.propose(state)
    if drafted is None:
        state.draft_counts.zero_()
        return tokens, None
    m = drafted.tokens.shape[1]
    state.draft_tokens[:, :m].copy_(drafted.tokens)
    state.draft_counts.copy_(drafted.counts)
    if drafted.probs is not None:
        state.draft_probs[:, :m].copy_(drafted.probs)
    if drafted.passes is not None:
        state.draft_passes.add_(drafted.passes)
    return torch.cat((tokens, drafted.tokens), 1), drafted.layout


def store(state: BatchState, hidden: Tensor, counts: Tensor) -> None:
    """Store the hidden states [B, m, D] of a pass that the next decision reads."""
    if state.draft_length or hidden.shape[1] == 1:
        state.states[:, : hidden.shape[1]].copy_(hidden)
    else:
        state.last_hidden.copy_(at(hidden, (counts - 1).clamp(min=0)))


def record(target: Tensor, start: Tensor, values: Tensor) -> None:
    """Write values [B, m, …] to target[b, start[b] : start[b] + m]. Padding after a row's real
    values is overwritten by its next ones, or never read."""
    rows, room = target.shape[:2]
    index = (torch.arange(0, rows * room, room, device=start.device) + start)[:, None]
    index = (index + torch.arange(values.shape[1], device=start.device)).view(-1)
    target.view(rows * room, *target.shape[2:]).index_copy_(0, index, values.flatten(0, 1))
