"""A step of the static engine: the decided chunk is spoken, read, and the next one decided, in buffers that never move.

Which utterance a row belongs to is the business of `StaticEngine` (dcar/decoding/engine/run.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.decoding.chunks import FixedChunk, PolicyChunk, RandomChunk
from dcar.decoding.engine.plan import EngineConfig, Job, Plan
from dcar.decoding.fast.graphs import StepGraphs
from dcar.decoding.fast.policy import FusedPolicy
from dcar.decoding.fast.stack import (
    CausalMask,
    FusedHeads,
    FusedStack,
    Rotation,
    StaticCache,
    additive,
    own_layers,
    round_up,
    weights_signature,
)
from dcar.decoding.records import DecodeResult
from dcar.errors import ConfigError, EngineError
from dcar.model.car import CARDecoder
from dcar.sampling import SamplingConfig, sample, warp
from heads.policy import ChunkPolicy


class Rows:
    """Everything that belongs to a row, [B] or [B, …], on the device."""

    def __init__(self, batch: int, capacity: int, heads: int, width: int, device: torch.device, dtype: torch.dtype):
        room = capacity + heads
        whole = partial(torch.zeros, dtype=torch.long, device=device)
        self.lengths, self.origin, self.start = whole(batch), whole(batch), whole(batch)  # start: column of the text
        self.generated, self.limits, self.passes = whole(batch), whole(batch), whole(batch)
        self.sizes = torch.ones(batch, dtype=torch.long, device=device)  # decided, not yet spoken
        self.log_probs = torch.zeros(batch, device=device)
        self.forced = whole(batch)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)  # by EOS
        self.pending, self.pending_counts = whole(batch, heads), whole(batch)
        self.last_hidden = torch.zeros(batch, width, device=device, dtype=dtype)
        # A row is alive while generated < limits; EOS lowers the limit to what was generated.
        self.small = list(vars(self).values())
        self.tokens = whole(batch, room)
        self.emitted, self.actions = whole(batch, room + 1), whole(batch, room + 1)  # by pass
        self.policy_log_probs = torch.zeros(batch, room + 1, device=device)
        self.token_draws = torch.zeros(batch, room, dtype=torch.float64, device=device)
        self.action_draws = torch.zeros(batch, room, dtype=torch.float64, device=device)
        self._views = {batch: self}

    def first(self, n: int) -> Rows:
        """Views of the first n rows."""
        if n not in self._views:
            view = copy.copy(self)
            for name, tensor in vars(self).items():
                if isinstance(tensor, Tensor):
                    setattr(view, name, tensor[:n])
            self._views[n] = view
        return self._views[n]

    def move(self, source: int, target: int) -> None:
        """Row `source` takes the place of row `target`."""
        for tensor in vars(self).values():
            if isinstance(tensor, Tensor):
                tensor[target] = tensor[source]


@dataclass
class Slot:
    """Who occupies a row."""

    job: Job
    prompt_length: int
    length: int  # bound on its speech positions in the cache, tightened at every look
    given: int = 0  # tokens handed out
    wanted: int | None = None  # size of its next chunk, where a look has told it since


def why_not(model: object, sampling: SamplingConfig | None = None) -> str | None:
    """Why the engine cannot decode with this model and sampling; None where it can."""
    if own_layers(model) is None:
        return f"the static engine needs a CARDecoder of TransformerLayers, not a {type(model).__name__}"
    if sampling is not None and sampling.repetition_window:
        return "the static engine does not look back at the last tokens, as repetition_window asks"
    return None


class EngineSteps:
    """The buffers of an engine, and what a step does with them; `StaticEngine` puts utterances into their rows."""

    def __init__(self, model: CARDecoder, config: EngineConfig | None = None, policy: ChunkPolicy | None = None):
        self.model, self.config = model, config or EngineConfig()
        if reason := why_not(model):
            raise ConfigError(f"{reason}; use dcar.decoding.decode")
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self.heads = model.config.num_prediction_heads
        on_cpu = self.device.type == "cpu"
        self.graphs = StepGraphs(self.config.graphs, self.device)
        mode = self.config.chunks
        self.padded = mode == "padded" or (mode == "auto" and not on_cpu)
        self.sync_every = 1 if on_cpu else self.config.sync_every
        try:
            native = not self.config.compile  # Inductor makes kernels of its own
            self.stack = FusedStack(own_layers(model) or [], [model.norm], native=native)
            self.laws = FusedHeads(model.heads)
            self.policy = None if policy is None else FusedPolicy(policy)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise no_memory(error, self.config, []) from error
        self._allocate()
        self.clock: Callable[[], float] = time.perf_counter  # of `seconds`; time.process_time on a busy CPU
        self.policy_seconds = 0.0

    def load_policy(self, policy: ChunkPolicy) -> None:
        """Decide with the present weights of this policy from the next `run` on: a copy of a few megabytes, nothing is
        built or captured anew. ConfigError if the engine has no policy, or one of another shape."""
        if self.policy is None:
            raise ConfigError("this engine was built without a policy; give one to StaticEngine(policy=…)")
        self.policy.load(policy)

    def fit(self, batch: int, capacity: int, text: int) -> None:
        """Make the buffers at least so large (see EngineConfig); nothing happens where they are. Not during a `run`.

        Sizes grow in steps, so that utterances of many lengths ask seldom. Graphs are captured anew afterwards.
        """
        c = self.config
        if batch <= c.batch and capacity <= c.capacity and text <= c.text:
            return
        most = self.model.speech_rotary.reach - self.heads
        self.config = replace(c, batch=max(batch, c.batch), text=max(round_up(text, 32), c.text),
                              capacity=max(min(round_up(capacity, 128), most), capacity, c.capacity))
        self.graphs = StepGraphs(c.graphs, self.device)
        del self.cache, self.rows, self.hidden  # the old and the new ones need not fit side by side
        self._allocate()

    def _allocate(self) -> None:
        """Buffers of the sizes in `config`."""
        self.capacity = self.config.capacity + self.heads  # padding of the last chunk
        if self.capacity > self.model.speech_rotary.reach:
            raise ConfigError(f"capacity={self.config.capacity} exceeds the {self.model.speech_rotary.reach} positions "
                              "of the rotary table")
        try:
            self._make_buffers()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise no_memory(error, self.config, []) from error
        self._signature = self.signature()

    def _make_buffers(self) -> None:
        model, device, dtype, b = self.model, self.device, self.dtype, self.config.batch
        num_heads = model.config.num_attention_heads
        head_dim = model.config.hidden_size // num_heads
        layers = len(self.stack.layers)
        self.cache = StaticCache(layers, b, self.config.text, self.capacity, num_heads, head_dim, device, dtype)
        first = -self.capacity if model.config.bos else 0
        self.rotation = Rotation(model.speech_rotary, first, self.capacity - 1, device, dtype)
        self.rows = Rows(b, self.config.capacity, self.heads, model.config.hidden_size, device, dtype)
        self.hidden: Tensor | None = None
        if self.policy is not None:
            self.policy.allocate(b, self.capacity, device, dtype)
        self._tables: dict[tuple[int, ...], Tensor] = {}  # of RandomChunk; graphs read them
        self._offsets = torch.arange(max(self.heads, 1), device=device)
        self._columns = torch.arange(self.cache.width, device=device)
        self._row_numbers = torch.arange(b, device=device)
        self._causal = CausalMask(device, dtype)
        self._by_layer = torch.compile(self._layers) if self.config.compile else self._layers

    def signature(self) -> Hashable:
        """What graphs and fused weights were made for; it changes when a weight of the decoder is replaced, moved or
        trained, but not by `load_policy`, which writes to the addresses that graphs read."""
        weights = weights_signature(self.model), None if self.policy is None else self.policy.signature()
        parameter = self.model.norm.weight
        return (self.config.batch, self.config.capacity, self.config.text, str(parameter.dtype),
                str(parameter.device), hash(weights))

    # --- one step -----------------------------------------------------------------------------------------------

    def _step(self, used: int, slots: Sequence[Slot | None], plan: Plan, forbid: bool) -> None:
        """Speak the decided chunk, read it, decide the next one."""
        n = self.config.batch if self.graphs.enabled else used
        schedule, busy = plan.schedule, [slot for slot in slots if slot is not None]
        if isinstance(schedule, FixedChunk):
            width = schedule.size
        elif self.padded:
            width = self.heads
        else:  # the only value that is read back
            width = self._widest(n, busy)
        text, speech = max(len(s.job.prompt.text_ids) for s in busy), max(s.length for s in busy) + width
        padded = self.padded and not isinstance(schedule, FixedChunk)
        tight = n == 1 and not self.graphs.enabled and not padded  # the window is what the one row sees
        if self.graphs.enabled:
            text, speech = (round_up(x, self.config.column_block) for x in (text, speech))
        first, last = max(0, self.cache.text - text), min(self.cache.width, self.cache.text + speech)
        step = partial(self._whole_step, n, width, first, last, tight, plan, forbid)
        key = (n, width, first, last, forbid, plan.step)
        with torch.inference_mode():
            self.graphs.run(key, step, self.rows.small, self._signature)
        for slot in busy:
            slot.length = min(slot.length + width, self.config.capacity)

    def _widest(self, n: int, busy: Sequence[Slot]) -> int:
        """The longest chunk that is asked for; a finished row asks for nothing."""
        wanted = [slot.wanted for slot in busy if slot.wanted is not None]
        for slot in busy:
            slot.wanted = None
        if len(wanted) == len(busy):
            return max(wanted)
        r = self.rows.first(n)
        return max(1, int(torch.minimum(r.sizes, r.limits - r.generated).max()))

    def _whole_step(self, n: int, width: int, first: int, last: int, tight: bool, plan: Plan, forbid: bool) -> None:
        rows = self.rows.first(n)
        self._speak(rows, width, plan, forbid)
        if self.device.type == "cpu" and not bool((rows.generated < rows.limits).any()):
            return  # the last chunk is never read
        self._read(rows, n, width, first, last, tight, plan)

    def _speak(self, r: Rows, width: int, plan: Plan, forbid: bool) -> None:
        """Heads 1..width of the last hidden states -> tokens, kept up to EOS and the limit."""
        eos, offsets = self.model.config.eos, self._offsets[:width]
        position = r.generated[:, None] + offsets
        logits = self.laws(r.last_hidden, width)  # [n, k, V + 1]
        law = warp(logits, plan.sampling, position < plan.sampling.min_tokens if forbid else None, eos)
        tokens = sample(law, r.token_draws.gather(1, position))
        asked = torch.minimum(r.sizes, r.limits - r.generated)  # 0 where a row is finished
        ends = torch.where(tokens == eos, offsets, width).amin(1)
        counts, ended = torch.minimum(asked, ends), ends < asked
        r.tokens.scatter_(1, position, tokens)
        step = r.passes[:, None]
        r.emitted.scatter_(1, step, counts[:, None])
        if not isinstance(plan.schedule, FixedChunk):
            r.actions.scatter_(1, step, r.sizes[:, None])
        if isinstance(plan.schedule, PolicyChunk):
            r.policy_log_probs.scatter_(1, step, r.log_probs[:, None])
        r.passes += asked > 0
        r.generated += counts
        r.ended |= ended
        r.limits.copy_(torch.where(ended, r.generated, r.limits))
        r.pending[:, :width] = tokens
        torch.mul(counts, r.generated < r.limits, out=r.pending_counts)

    def _read(self, r: Rows, n: int, width: int, first: int, last: int, tight: bool, plan: Plan) -> None:
        """The pending tokens through the decoder, behind each row's past; then the next decision. `tight`: the columns
        from first to last are just what one row without padding sees."""
        position = r.lengths[:, None] + self._offsets[:width]  # [n, k] speech positions
        angle, speech = (position - r.origin[:, None]).view(-1), position.view(-1)
        tokens = r.pending[:, :width].reshape(-1)
        row = None if n == 1 else self._row_numbers[:n, None].expand(n, width).reshape(-1)
        ends = (r.pending_counts - 1).clamp(min=0)  # of each row's last real position among the flat ones
        real = None
        if row is not None and width > 1 and not self.graphs.enabled and not self.padded:
            # Rows of a ragged batch read different numbers of tokens: leave the padding out of all but the attention.
            real = (self._offsets[:width] < r.pending_counts[:, None]).view(-1).nonzero()[:, 0]
            tokens, row, speech, angle = (t.index_select(0, real) for t in (tokens, row, speech, angle))
            ends = (r.pending_counts.cumsum(0) - 1).clamp(min=0)
        elif n > 1:
            ends = ends + torch.arange(0, n * width, width, device=self.device)
        index = self.cache.index(row, speech)
        x = F.embedding(tokens, self.model.speech_embedding.weight)
        if (own := self.stack.takes(len(x))) is not None:
            turns = self.rotation
            x = own(x, turns.cos, turns.sin, angle, self.cache.places(index, r.start), turns.first)
        else:
            mask = self._mask(r, position, first, last, tight)
            x = self._by_layer(x, *self.rotation(angle), index, real, mask, n, width, first, last)
            x = self.stack.behind(x)
        torch.index_select(x, 0, ends, out=r.last_hidden)
        if plan.record_hidden and self.hidden is not None:
            flat = speech if row is None else row * self.capacity + speech
            self.hidden.view(-1, x.shape[1]).index_copy_(0, flat, x)
        if not isinstance(plan.schedule, FixedChunk):
            self._decide(r, x, speech, row, ends, last - self.cache.text, tight, plan)
        r.lengths += r.pending_counts

    def _mask(self, r: Rows, position: Tensor, first: int, last: int, tight: bool) -> Tensor | None:
        """What new speech positions [n, k] see of the columns first..last, [n, 1, k, columns], added to the scores."""
        if tight:
            return self._causal(position.shape[1], last - first)
        column = self._columns[first:last]
        seen = column <= self.cache.text + position[:, :, None]
        seen = seen & (column >= r.start[:, None, None])
        return additive(seen, self.dtype)[:, None]

    def _layers(self, x: Tensor, cos: Tensor, sin: Tensor, index: Tensor, real: Tensor | None, mask: Tensor | None,
                n: int, width: int, first: int, last: int) -> Tensor:
        """x [N, D] of N = n * width positions, or of the `real` [N] ones among them."""
        for i, layer in enumerate(self.stack.layers):
            rotated = layer.project(x, cos, sin)  # [N, 3, H, D/H]
            self.cache.write(i, index, rotated[:, 1:])
            keys, values = self.cache.read(i, n, first, last)
            queries = rotated[:, 0]
            if real is not None:
                padded = queries.new_zeros(n * width, *queries.shape[1:])
                queries = padded.index_copy_(0, real, queries)
            queries = queries.unflatten(0, (n, width)).transpose(1, 2)
            y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).transpose(1, 2)
            y = y.reshape(n * width, -1)
            x = layer.finish(x, y if real is None else y.index_select(0, real))
        return x

    def _decide(self, r: Rows, x: Tensor, position: Tensor, row: Tensor | None, ends: Tensor, last: int, tight: bool,
                plan: Plan) -> None:
        """Sizes of the next chunks, from the normed hidden states x [N, D] just read, at speech positions [N] of rows
        [N] (None: the first one); ends [n] are each row's last ones."""
        schedule = plan.schedule
        draws = r.action_draws.gather(1, r.generated[:, None])[:, 0]
        if isinstance(schedule, RandomChunk):
            r.sizes.copy_(self._random_sizes(schedule, draws))
            return
        assert isinstance(schedule, PolicyChunk) and self.policy is not None
        started = self.clock()
        seen = None if tight else r.lengths + r.pending_counts
        log_law = self.policy.read(x, position, row, ends, last, seen)
        sizes, log_probs = self._choose(log_law, draws, r.forced, schedule)
        r.sizes.copy_(sizes)
        r.log_probs.copy_(log_probs)
        self.policy_seconds += self.clock() - started

    def _random_sizes(self, schedule: RandomChunk, draws: Tensor) -> Tensor:
        table = self._tables[schedule.sizes]
        return table[(draws * len(table)).long()]

    @staticmethod
    def _choose(log_law: Tensor, draws: Tensor, forced: Tensor, schedule: PolicyChunk) -> tuple[Tensor, Tensor]:
        index = log_law.argmax(-1) if schedule.mode == "greedy" else sample(log_law.exp(), draws)
        if schedule.forced is not None:
            index = torch.where(forced > 0, forced - 1, index)
        return index + 1, log_law.gather(-1, index[:, None])[:, 0]


def no_memory(error: BaseException, config: EngineConfig, finished: Sequence[DecodeResult]) -> BaseException:
    """EngineError in place of an allocation that failed; any other error as it was."""
    if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
        return error
    return EngineError(
        f"out of memory with batch={config.batch}, capacity={config.capacity}, text={config.text} ({error}); lower "
        f"batch first, then capacity (max_tokens bounds it), or set graphs=false; {len(finished)} utterances are "
        "finished and kept", finished)
