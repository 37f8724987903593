"""State of a batch while it is decoded: fixed buffers on the device, one place per row.

Everything that a step reads or writes is here, so that a step is a program of tensors at fixed
addresses: nothing is allocated from step to step, and the host need not know the outcome.
`view` is the same state of its first rows, for one step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dcar.decoding.reader import Reader
from dcar.decoding.storage import CacheStorage
from dcar.decoding.transfers import HostCopy, to_device
from dcar.repetition import histories
from dcar.sampling import SamplingConfig, sample, shifted, uniform
from heads.layers import KVCache

LOGGED = ("emitted", "proposed", "accepted", "sizes", "chosen")
"""Integers that are logged for every pass."""


CONSTANT = ("offsets", "first_token", "first_pass")
"""Tensors of a state that are the same whatever its rows hold."""

ACTION_STREAMS = ("policy", "chunk", "shuffle")
"""Streams of the random numbers of decisions, which members of a group never share."""


class RowLog(NamedTuple):
    """Tokens [T] of a row, and what was logged for its passes, on the host."""

    tokens: Tensor  # int64 [T]
    log: Tensor  # int64 [passes, len(LOGGED)]
    log_probs: Tensor  # float64 [passes], rounded to float32


class BatchState:
    """Buffers that a step works on. B rows; a row without an utterance, or with a finished one, is
    not `alive`.

    Every tensor, in a dictionary or not, has one entry for each row (the flat ones, as many for
    each), except those of `CONSTANT`.

    `own`: the method's data for each row, [B, …] by name; `shared`: its data for all rows (tables
    on the device, a policy); `caches`: keys and values of a draft model or a policy. `eager`:
    steps run eagerly on a CPU, where reading a value is free, so shapes may follow the data;
    otherwise all shapes are fixed.
    """

    def __init__(
        self,
        reader: Reader,
        sampling: SamplingConfig,
        rows: int,
        capacity: int,
        text: int,
        *,
        width: int,
        draft_length: int = 0,
        keeps_probs: bool = False,
        streams: Sequence[str] = (),
        record_hidden: bool = False,
        features: tuple[int, ...] | None = None,
        eager: bool = True,
        storage: CacheStorage | None = None,
    ):
        """Allocate the buffers. width: maximum number of tokens that a round emits;
        draft_length: positions that a pass reads after the pending ones; keeps_probs: the
        drafted tokens have distributions; streams: of the random numbers that are looked up;
        record_hidden: keep the hidden states of all positions, and the features of all decisions,
        of this shape; storage: of keys and values, if it is shared."""
        self.reader = reader
        self.sampling = sampling
        self.eager = eager
        self.eos = reader.config.eos
        self.width = width
        self.draft_length = draft_length
        device, size, ids = reader.device, reader.config.hidden_size, reader.config.output_size
        self.cache = reader.new_cache(rows, text, capacity + width + draft_length, storage)
        self.cache.eager = eager
        reader.cover(self.cache)
        self.caches: dict[str, KVCache] = {}
        room = capacity + width  # tokens of a row

        def integers(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.long, device=device)

        self.keys = {"token": integers(), "action": integers()}  # addresses of the random numbers
        self.offsets = torch.arange(max(width, draft_length) + 1, device=device)
        self.positions = integers(len(self.offsets))  # generated positions of the next tokens
        self.prompt_lengths = integers()
        self.passes = integers()
        self.draft_passes = integers()
        self.zeros = integers()
        # tokens that may still be emitted: 0 in a row that is finished, or holds no utterance
        self.remaining = integers()
        self.alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self.highest = integers()  # ids drawn so far; above EOS: there was no distribution
        self.reported = integers(6)  # see `report`
        self.draft_tokens = integers(draft_length)
        self.draft_counts = integers()
        self.draft_probs = torch.zeros(rows, draft_length if keeps_probs else 0, ids, device=device)
        # hidden states of the last pending token (until the first pass: of the prompt) and the
        # drafted ones
        self.states = torch.zeros(
            rows, 1 + draft_length, size, dtype=reader.hidden_dtype, device=device
        )
        # flat, all of a row together, so that a write is one `index_put_` (see `KVCache`)
        self.flat_tokens = integers(room).flatten()
        self.flat_log = integers(room + 1, len(LOGGED)).flatten(0, 1)
        self.flat_log_probs = torch.zeros(rows * (room + 1), device=device)
        # where a row begins in them
        self.first_token = torch.arange(0, rows * room, room, device=device)
        self.first_pass = torch.arange(0, rows * (room + 1), room + 1, device=device)
        # stream -> uniform numbers [B, room] of all positions
        self.numbers = {
            stream: torch.zeros_like(self.tokens, dtype=torch.float64) for stream in streams
        }
        self.own: dict[str, Tensor] = {}
        self.shared: dict[str, Any] = {}
        self.hidden: Tensor | None = None
        self.features: Tensor | None = None  # [B, decision, N, n, F], if they are recorded
        if record_hidden:
            self.hidden = torch.zeros(
                rows, self.cache.capacity, size, dtype=reader.hidden_dtype, device=device
            )
            if features is not None:
                self.features = torch.zeros(rows, room + 1, *features, device=device)
        self.longest = 0  # see `view`
        self.forbids = True
        self._first: dict[int, Self] = {}

    # --- rows -------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return len(self.alive)

    @property
    def tokens(self) -> Tensor:
        """Tokens [B, room] emitted so far."""
        return self.flat_tokens.unflatten(0, (self.rows, -1))

    @property
    def log(self) -> Tensor:
        """The `LOGGED` numbers [B, room + 1, len(LOGGED)] of every pass."""
        return self.flat_log.unflatten(0, (self.rows, -1))

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities [B, room + 1] of a policy's decisions, by pass."""
        return self.flat_log_probs.unflatten(0, (self.rows, -1))

    def view(self, rows: int, longest: int, forbids: bool) -> Self:
        """Return the state of the first rows, for a step before which none of them holds more than
        `longest` speech positions, and in which EOS may be forbidden or not."""
        if rows not in self._first:
            self._first[rows] = self._each(lambda tensor: tensor[:rows])
            self._first[rows]._first = {}  # no cycle: memory is freed with the last reference
        view = copy.copy(self._first[rows])
        view.longest = longest
        view.forbids = forbids
        return view

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the state with every tensor changed that has one entry for each row."""

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: changed(entry) for key, entry in value.items()}
            if isinstance(value, KVCache):
                return value.each(change)
            return change(value)

        out = copy.copy(self)
        for name, value in vars(self).items():
            if name.startswith("flat_"):
                value = change(value.unflatten(0, (self.rows, -1))).flatten(0, 1)
                setattr(out, name, value)
                continue
            by_row = isinstance(value, (Tensor, KVCache)) and name not in CONSTANT
            if by_row or name in ("keys", "numbers", "own", "caches"):
                setattr(out, name, changed(value))
        return out

    def admit(
        self,
        rows: Tensor,
        limits: Tensor,
        prompt_lengths: Tensor,
        hidden: Tensor,
        keys: Sequence[Tensor],
    ) -> None:
        """Start utterances in rows [R], given the maximum number of tokens [R], lengths of their
        prompts [R], hidden states [R, D] of the last prompt position, and keys [R] of random
        numbers for tokens and for everything else."""
        for tensor in (self.passes, self.draft_passes, self.draft_counts, self.highest):
            tensor[rows] = 0
        self.positions[rows] = self.offsets
        self.alive[rows] = True
        self.remaining[rows] = limits
        self.prompt_lengths[rows] = prompt_lengths
        self.states[rows, 0] = hidden
        self.keys["token"][rows], self.keys["action"][rows] = keys
        every = torch.arange(self.tokens.shape[1], device=rows.device).expand(len(rows), -1)
        for stream, table in self.numbers.items():
            table[rows] = uniform(keys[stream in ACTION_STREAMS], stream, every)

    def longest_of(self, cache: KVCache, grown: int) -> int:
        """Return an upper bound on the lengths of a cache that may have grown by so many positions
        since the step began."""
        return int(cache.lengths.max()) if self.eager else self.longest + grown

    def report(self) -> None:
        """Gather what the host reads of every row after a step, in `reported` [B, 6]: highest id
        drawn, tokens emitted, tokens left, speech positions, passes, passes of a draft model."""
        facts = (
            self.highest,
            self.generated,
            self.remaining,
            self.cache.lengths,
            self.passes,
            self.draft_passes,
        )
        torch.stack(facts, 1, out=self.reported)

    def read(
        self, rows: Sequence[int], tokens: Sequence[int], passes: Sequence[int]
    ) -> Callable[[], list[RowLog]]:
        """Start to copy rows to the host in one transfer, given the numbers of tokens and of passes
        of each. Return a function that waits for it and returns them."""
        at = to_device(rows, self.tokens.device)
        last = max(passes)
        parts = (
            self.tokens[at, : max(tokens)],
            self.log[at, :last].flatten(1),
            self.log_probs[at, :last].double(),
        )
        # float64 holds ids and counts exactly, next to the log probabilities
        copy, widths = HostCopy(torch.cat(parts, 1)), [part.shape[1] for part in parts]

        def arrived() -> list[RowLog]:
            ids, log, log_probs = copy.get().split(widths, 1)
            log = log.long().view(len(rows), last, len(LOGGED))
            return [
                RowLog(row_ids[:t], row_log[:p], row_log_probs[:p])
                for row_ids, row_log, row_log_probs, t, p in zip(
                    ids.long(), log, log_probs, tokens, passes, strict=True
                )
            ]

        return arrived

    def move(self, source: int, target: int) -> None:
        """Copy row `source` to row `target`."""
        self._each(lambda tensor: tensor[target : target + 1].copy_(tensor[source : source + 1]))

    # --- what methods ask for ---------------------------------------------------------------------

    @property
    def generated(self) -> Tensor:
        """Number of tokens emitted so far [B]."""
        return self.positions[:, 0]

    @property
    def last_hidden(self) -> Tensor:
        """Hidden states [B, D] of the last token that was read."""
        return self.states[:, 0]

    def most(self, counts: Tensor, bound: int) -> int:
        """Return the largest of counts [B], or an upper bound if it is not known without waiting
        for the device."""
        return min(int(counts.max()), bound) if self.eager else bound

    def heads(self, states: Tensor, k: int, first: int = 1) -> Tensor:
        """Return logits [..., k + 1 - first, V + 1] of heads first..k; first: 1 or 2."""
        return self.reader.heads(states, k, first)

    def next_positions(self, count: int) -> Tensor:
        """Return the generated positions [B, k] of the next tokens."""
        return self.positions[:, :count]

    def forbidden(self, positions: Tensor) -> Tensor | None:
        """Return where EOS is masked, given positions [B] or [B, k], counted from the first
        generated token."""
        return positions < self.sampling.min_tokens if self.forbids else None

    def probs(self, logits: Tensor, positions: Tensor, history: Tensor | None = None) -> Tensor:
        """Return the warped distributions [B, …, V] of the tokens at generated positions [B] or
        [B, k], given logits [B, …, V]."""
        return self.reader.backend.probs(
            logits, self.sampling, self.forbidden(positions), self.eos, history
        )

    def draw(self, logits: Tensor, num_candidates: int = 1) -> Tensor:
        """Draw the next tokens [B, k, N], N from each distribution, at the `shifted` random
        numbers of its position, given logits [B, k, V]. Not for repetition-aware sampling."""
        positions = self.next_positions(logits.shape[1])
        u = shifted(self.uniform("token", positions), num_candidates)
        tokens, valid = self.reader.backend.tokens(
            logits, u, self.sampling, self.forbidden(positions), self.eos
        )
        return tokens if valid else self.checked(tokens)

    def draw_in_turn(self, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next tokens [B, k] by repetition-aware sampling at numbers u [B, k], given
        logits [B, k, V]. Also return their distributions [B, k, V]."""
        history = self.histories()
        assert history is not None
        forbidden = self.forbidden(self.next_positions(logits.shape[1]))
        tokens, probs = self.reader.backend.in_turn(
            logits, u, self.sampling, forbidden, self.eos, history[:, 0]
        )
        return self.checked(tokens), probs

    def sample(self, probs: Tensor, u: Tensor) -> Tensor:
        """Draw from distributions [B, …, V] at numbers u [B, …], and record where there is no
        distribution."""
        return self.checked(sample(probs, u))

    def checked(self, tokens: Tensor) -> Tensor:
        """Record whether all drawn tokens [B, …] are ids, and return ids. A row with one that is
        not becomes an error when the host looks at it."""
        highest = tokens if tokens.dim() == 1 else tokens.flatten(1).amax(1)
        torch.maximum(self.highest, highest, out=self.highest)
        return tokens.clamp(max=self.eos)

    def uniform(self, stream: str, positions: Tensor) -> Tensor:
        """Return `dcar.sampling.uniform` at generated positions [B] or [B, k] for the first
        number of a position, looked up in a table."""
        index = positions if positions.dim() == 2 else positions[:, None]
        return self.numbers[stream].gather(1, index).view(positions.shape)

    def further(self, stream: str, positions: Tensor, number: int | Tensor) -> Tensor:
        """Return further numbers of a position, computed from their addresses."""
        return uniform(self.keys["token"], stream, positions, number)

    def histories(self, tokens: Tensor | None = None) -> Tensor | None:
        """Return the `history` argument of `warp`: the window of tokens before the next token
        and after each of the drafted tokens [B, m], [B, m + 1, W], with -1 for none. None
        without a repetition_window."""
        window = self.sampling.repetition_window
        if not window:
            return None
        index = (
            self.generated[:, None] - window + torch.arange(window, device=self.generated.device)
        )
        recent = torch.where(index >= 0, self.tokens.gather(1, index.clamp(min=0)), -1)
        return recent[:, None] if tokens is None else histories(recent, tokens)
