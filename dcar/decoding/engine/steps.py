"""A step of the static engine on fixed buffers: emit the decided chunk, run the decoder on it, decide the next one.

`StaticEngine` (dcar/decoding/engine/run.py) assigns utterances to rows.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dcar.decoding.chunks import FixedChunk, PolicyChunk, choose_end, fused_end
from dcar.decoding.ends import no_distribution, up_to_end
from dcar.decoding.engine.plan import EngineConfig, Job, Plan
from dcar.decoding.fast.columns import real_positions, round_up
from dcar.decoding.fast.distributions import tokens_of
from dcar.decoding.fast.graphs import StepGraphs
from dcar.decoding.fast.passes import Passes
from dcar.decoding.fast.policy import FusedPolicy
from dcar.decoding.fast.stack import has_own_layers, weights_signature
from dcar.decoding.records import DecodeResult
from dcar.errors import ConfigError, EngineError
from dcar.model.draft import AnyDecoder
from dcar.sampling import SamplingConfig, shifted
from heads.candidates import select_draw
from heads.layers import KVCache
from heads.policy import ChunkPolicy


class Rows:
    """The state of every row, [B] or [B, …], on the device."""

    def __init__(self, batch: int, capacity: int, heads: int, width: int, num_action_logits: int, device: torch.device,
                 dtype: torch.dtype):
        room = capacity + heads
        whole = partial(torch.zeros, dtype=torch.long, device=device)
        self.lengths, self.origin, self.texts = whole(batch), whole(batch), whole(batch)  # texts: phonemes
        self.generated, self.limits, self.passes = whole(batch), whole(batch), whole(batch)
        self.sizes = torch.ones(batch, dtype=torch.long, device=device)  # decided, not yet emitted
        self.draw = whole(batch)  # which of several candidates is emitted
        self.log_probs = torch.zeros(batch, device=device)
        # undefined_at: 1 + the first position that had no distribution, or 0
        self.forced, self.undefined_at = whole(batch), whole(batch)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)  # by EOS
        self.pending, self.pending_counts = whole(batch, heads), whole(batch)
        self.last_hidden = torch.zeros(batch, width, device=device, dtype=dtype)
        self.action_logits = torch.zeros(batch, num_action_logits, device=device, dtype=dtype)  # of the policy
        # A row is alive while generated < limits; EOS lowers the limit to what was generated.
        self.small = list(vars(self).values())
        self.tokens = whole(batch, room)
        # by pass
        self.emitted, self.actions, self.chosen = whole(batch, room + 1), whole(batch, room + 1), whole(batch, room + 1)
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
        """Copy row `source` to row `target`."""
        for tensor in vars(self).values():
            if isinstance(tensor, Tensor):
                tensor[target] = tensor[source]


@dataclass
class Slot:
    """The utterance in a row, as far as the host knows it since the last synchronisation."""

    job: Job
    prompt_length: int
    length: int  # upper bound on its speech positions in the cache
    returned: int = 0  # tokens handed out
    next_size: int | None = None  # of its next chunk, if known


def why_not(model: object, sampling: SamplingConfig | None = None) -> str | None:
    """Why the engine does not support this model or sampling; None if it does."""
    if not has_own_layers(model):
        return f"the static engine needs a CARDecoder of TransformerLayers, not a {type(model).__name__}"
    if sampling is not None and sampling.repetition_window:
        return "the static engine does not look back at the last tokens, as repetition_window asks"
    return None


class EngineSteps:
    """The buffers of an engine, and what a step does with them; `StaticEngine` puts utterances into their rows."""

    def __init__(self, model: AnyDecoder, config: EngineConfig | None = None, policy: ChunkPolicy | None = None):
        if not has_own_layers(model):
            raise ConfigError(f"{why_not(model)}; use dcar.decoding.decode")
        self.model, self.config = model, config or EngineConfig()
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self.heads = model.config.num_prediction_heads
        on_cpu = self.device.type == "cpu"
        self._reset_graphs()
        mode = self.config.chunks
        self.padded = mode == "padded" or (mode == "auto" and not on_cpu)
        self.sync_every = 1 if on_cpu else self.config.sync_every
        try:
            self.passes = Passes(model)
            self.policy = None if policy is None else FusedPolicy(policy, self.device, self.dtype)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise no_memory(error, self.config, []) from error
        self._allocate()
        self.clock: Callable[[], float] = time.perf_counter  # of `seconds`; time.process_time on a busy CPU
        self.policy_seconds = 0.0

    def load_policy(self, policy: ChunkPolicy) -> None:
        """Copy the present weights of this policy for the next `run`; no graph is captured again. ConfigError if the
        engine has no policy, or one of another shape."""
        if self.policy is None:
            raise ConfigError("this engine was built without a policy; give one to StaticEngine(policy=…)")
        self.policy.load(policy)

    def fit(self, batch: int, capacity: int, text: int) -> None:
        """Grow the buffers to at least these sizes (see EngineConfig), in steps, so that it happens seldom. Not during
        a `run`. Graphs are captured again afterwards."""
        c = self.config
        if batch <= c.batch and capacity <= c.capacity and text <= c.text:
            return
        most = self.model.speech_rotary.reach - self.heads
        self.config = replace(c, batch=max(batch, c.batch), text=max(round_up(text, 32), c.text),
                              capacity=max(min(round_up(capacity, 128), most), capacity, c.capacity))
        self._reset_graphs()
        # the old and the new ones need not fit side by side
        del self.cache, self.policy_cache, self.rows, self.hidden, self.candidates
        self._allocate()

    def _reset_graphs(self) -> None:
        """Drop the captured graphs: a buffer moves."""
        self.graphs = StepGraphs(self.config.graphs, self.device)

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
        heads = model.config.num_attention_heads
        self.cache = KVCache(len(self.passes.stack.layers), b, heads, self.capacity, model.config.hidden_size // heads,
                             prefix=self.config.text, device=device, dtype=dtype)
        self.passes.rotary.cover(-self.capacity if model.config.bos else 0, self.capacity - 1)
        self.policy_cache: KVCache | None = None
        if self.policy is not None:
            self.policy_cache = self.policy.source.new_cache(b, self.capacity, device=device, dtype=dtype)
            if self.policy.rotary is not None:
                self.policy.rotary.cover(0, self.capacity - 1)
        self._views: dict[tuple[int, int], KVCache] = {}
        self.rows = Rows(b, self.config.capacity, self.heads, model.config.hidden_size,
                         0 if self.policy is None else self.policy.num_action_logits, device, dtype)
        self.hidden: Tensor | None = None
        self.candidates: Tensor | None = None  # [B, decision, N, n, F] what decisions after the draw saw
        self._offsets = torch.arange(max(self.heads, 1), device=device)

    def signature(self) -> Hashable:
        """What graphs were captured for; it changes when a weight of the decoder is replaced, moved or trained, but not
        by `load_policy`, which writes to the addresses that graphs read."""
        weights = weights_signature(self.model), None if self.policy is None else self.policy.signature()
        parameter = self.model.norm.weight
        return (self.config.batch, self.config.capacity, self.config.text, str(parameter.dtype),
                str(parameter.device), hash(weights))

    # --- one step -----------------------------------------------------------------------------------------------

    def _step(self, used: int, slots: Sequence[Slot | None], plan: Plan, forbid: bool) -> None:
        """Emit the decided chunk, run the decoder on it, decide the next one."""
        n = self.config.batch if self.graphs.enabled else used
        schedule, busy = plan.schedule, [slot for slot in slots if slot is not None]
        if isinstance(schedule, FixedChunk):
            width = schedule.size
        elif schedule.candidates:
            width = schedule.candidates
        elif self.padded:
            width = self.heads
        else:  # the only value that is read back from the device
            width = self._widest(n, busy)
        longest = max(slot.length for slot in busy)
        if self.graphs.enabled:  # one graph for a multiple of so many columns
            before = self.cache.prefix + width
            longest = min(round_up(before + longest, self.config.column_block) - before, self.capacity - width)
        step = partial(self._whole_step, n, width, longest, plan, forbid)
        key = (n, width, longest, forbid, plan.step)
        with torch.inference_mode():
            self.graphs.run(key, step, self.rows.small, self._signature)
        for slot in busy:
            slot.length = min(slot.length + width, self.config.capacity)

    def _widest(self, n: int, busy: Sequence[Slot]) -> int:
        """The longest next chunk of the rows that have not finished."""
        sizes = [slot.next_size for slot in busy if slot.next_size is not None]
        for slot in busy:
            slot.next_size = None
        if len(sizes) == len(busy):
            return max(sizes)
        r = self.rows.first(n)
        return max(1, int(torch.minimum(r.sizes, r.limits - r.generated).max()))

    def _whole_step(self, n: int, width: int, longest: int, plan: Plan, forbid: bool) -> None:
        rows = self.rows.first(n)
        self._emit(rows, width, plan, forbid)
        if self.device.type == "cpu" and not self.graphs.enabled:
            if not bool((rows.generated < rows.limits).any()):
                return  # the last chunk is never read
            if plan.schedule.candidates and not self.padded:
                width = max(1, int(rows.pending_counts.max()))  # what is kept of the candidates
        self._forward(rows, n, width, longest, plan)

    def _emit(self, r: Rows, width: int, plan: Plan, forbid: bool) -> None:
        """Heads 1..width of the last hidden states -> tokens, kept up to EOS and the limit."""
        eos = self.model.config.eos
        position = r.generated[:, None] + self._offsets[:width]
        logits = self.passes.heads(r.last_hidden, width)  # [n, k, V + 1]
        schedule = plan.schedule
        after_draw = schedule if isinstance(schedule, PolicyChunk) and schedule.candidates else None
        u = shifted(r.token_draws.gather(1, position), after_draw.num_candidates if after_draw else 1)  # [n, k, N]
        forbidden = position < plan.sampling.min_tokens if forbid else None
        if after_draw is None:
            tokens = self._draw_chunks(r, logits, u, plan, forbidden)[:, 0]
        else:
            tokens = self._decide_after_draw(r, logits, u, after_draw, plan, forbidden)
            width = tokens.shape[1]
            position = position[:, :width]
        asked = torch.minimum(r.sizes, r.limits - r.generated)  # 0 where a row is finished
        counts, ended = up_to_end(tokens, asked, eos)
        r.tokens.scatter_(1, position, tokens)
        step = r.passes[:, None]
        r.emitted.scatter_(1, step, counts[:, None])
        if not isinstance(plan.schedule, FixedChunk):
            r.actions.scatter_(1, step, r.sizes[:, None])
        if isinstance(plan.schedule, PolicyChunk):
            r.policy_log_probs.scatter_(1, step, r.log_probs[:, None])
            r.chosen.scatter_(1, step, r.draw[:, None])
        r.passes += asked > 0
        r.generated += counts
        r.ended |= ended
        r.limits.copy_(torch.where(ended, r.generated, r.limits))
        r.pending[:, :width] = tokens
        torch.mul(counts, r.generated < r.limits, out=r.pending_counts)

    def _draw_chunks(self, r: Rows, logits: Tensor, u: Tensor, plan: Plan, forbidden: Tensor | None) -> Tensor:
        """Chunks [n, N, k] drawn from logits [n, k, V + 1] at numbers u [n, k, N]."""
        drawn, probs = tokens_of(logits, u, plan.sampling, forbidden, self.model.config.eos)
        if probs is not None:
            self._check_distribution(r, probs)
        return drawn.mT

    def _forward(self, r: Rows, n: int, width: int, longest: int, plan: Plan) -> None:
        """The pending tokens through the decoder, behind each row's past; then the next decision."""
        counts = r.pending_counts
        ragged = not self.graphs.enabled and not self.padded  # then the padding is left out of all but the attention
        real = real_positions(counts, width) if ragged else None
        cache = self._view(self.cache, r, longest)
        hidden = self.passes.read(cache, r.pending[:, :width], real=real)  # [n, k, D]
        flat, row = hidden.view(n * width, -1), torch.arange(n, device=self.device)
        torch.index_select(flat, 0, row * width + (counts - 1).clamp(min=0), out=r.last_hidden)
        if plan.record_hidden and self.hidden is not None:
            # what stands behind a row's real positions is overwritten by its next ones, or never read
            position = (row * self.capacity + r.lengths)[:, None] + self._offsets[:width]
            self.hidden.view(-1, flat.shape[1]).index_copy_(0, position.view(-1), flat)
        if isinstance(plan.schedule, PolicyChunk):
            started = self.clock()
            if self.policy is not None and self.policy_cache is not None:
                view = self._view(self.policy_cache, r, longest)
                r.action_logits.copy_(self.policy.read(view, hidden, counts, real))
            if not plan.schedule.candidates:
                self._decide(r, plan.schedule)
            self.policy_seconds += self.clock() - started
        r.lengths += counts

    @staticmethod
    def _check_distribution(r: Rows, probs: Tensor) -> None:
        """Record the live rows [n] whose distributions [n, …, V] are none (see `no_distribution`)."""
        first = no_distribution(probs) & (r.generated < r.limits) & (r.undefined_at == 0)
        r.undefined_at.copy_(torch.where(first, r.generated + 1, r.undefined_at))

    def _view(self, cache: KVCache, r: Rows, longest: int) -> KVCache:
        """A view of the first rows of a cache with the lengths of `r`; `longest`: a bound on these."""
        n = len(r.lengths)
        if (n, id(cache)) not in self._views:
            view = self._views[n, id(cache)] = cache.over(cache.kv[:, :n])
            view.lengths, view.origin = r.lengths, r.origin
            view.prefix_lengths = r.texts if cache.prefix else cache.prefix_lengths[:n]
        view = self._views[n, id(cache)]
        view.longest = longest
        return view

    def _decide(self, r: Rows, schedule: PolicyChunk) -> None:
        """Sizes of the next chunks, before they are drawn."""
        assert self.policy is not None
        log_dist = self.policy.log_probs(r.action_logits, None, schedule.dial)
        self._check_distribution(r, log_dist.exp())
        sizes, log_probs, _ = choose_end(log_dist, *self._how(r, schedule))
        r.sizes.copy_(sizes)
        r.log_probs.copy_(log_probs)

    def _decide_after_draw(self, r: Rows, logits: Tensor, u: Tensor, schedule: PolicyChunk, plan: Plan,
                           forbidden: Tensor | None) -> Tensor:
        """Draw chunks [n, N, k] side by side from logits [n, k, V + 1] at numbers u [n, k, N] and choose among them;
        returns the chosen ones [n, k or the longest size]."""
        assert self.policy is not None
        started, how = self.clock(), self._how(r, schedule)
        fused = self.policy.decide(r.last_hidden, logits, u, plan.sampling, forbidden, self.model.config.eos,
                                   schedule.dial)
        if fused is not None:
            candidates, (sizes, log_probs, draw, tokens) = fused.candidates, fused_end(fused, *how)
        else:
            chunks, started = self._draw_chunks(r, logits, u, plan, forbidden), self.clock()
            candidates = self.policy.candidate_features(r.last_hidden, logits, chunks)
            log_dist = self.policy.log_probs(None, candidates, schedule.dial)
            self._check_distribution(r, log_dist.exp())
            sizes, log_probs, draw = choose_end(log_dist, *how)
            tokens = select_draw(chunks, draw)
        r.sizes.copy_(sizes)
        r.log_probs.copy_(log_probs)
        if draw is not None:
            r.draw.copy_(draw)
        if plan.record_hidden and self.candidates is not None:
            rows, passes = torch.arange(len(r.passes), device=self.device), self.candidates.shape[1]
            flat = self.candidates.view(-1, *self.candidates.shape[2:])
            # a finished row writes after its last decision
            flat.index_copy_(0, rows * passes + r.passes, candidates)
        self.policy_seconds += self.clock() - started
        return tokens

    @staticmethod
    def _how(r: Rows, schedule: PolicyChunk) -> tuple[Tensor | None, Tensor | None, int]:
        """How `choose_end` chooses: the random numbers and forced sizes of the rows."""
        u = None if schedule.mode == "greedy" else r.action_draws.gather(1, r.generated[:, None])[:, 0]
        return u, None if schedule.forced is None else r.forced, schedule.policy.config.num_actions


def no_memory(error: BaseException, config: EngineConfig, finished: Sequence[DecodeResult]) -> BaseException:
    """EngineError in place of an allocation that failed; any other error as it was."""
    if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
        return error
    return EngineError(
        f"out of memory with batch={config.batch}, capacity={config.capacity}, text={config.text} ({error}); lower "
        f"batch first, then capacity (max_tokens bounds it), or set graphs=false; {len(finished)} utterances are "
        "finished and kept", finished)
