"""The static engine: chunk-wise decoding with buffers that never move and no wait for the device.

The loop in dcar/decoding/loop.py is the reference and serves every method; this engine serves the methods that verify
nothing (FAR, CAR-k, random, DCAR) and gives the same tokens, actions and hidden states. What differs:

- keys, values, tokens, draws and history live in buffers that are allocated once (`StaticCache`, `_Rows`);
- a step is a fixed sequence of kernels over (rows, chunk width, columns), so that it can be captured as a CUDA graph;
- EOS, limits and chunk decisions stay on the device; the host looks every `sync_every` steps;
- rows that finish are replaced by waiting utterances (continuous batching) without touching their neighbours.

Chunk width, for a policy: "exact" reads the decision back and evaluates the kept heads only, one shape per length;
"padded" runs all heads in one shape without reading anything back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.decoding.fused import FusedLayer, Rotation, StaticCache, norm, weights_signature
from dcar.decoding.fused_policy import FusedPolicy
from dcar.decoding.graphs import StepGraphs
from dcar.decoding.loop import check_prompt, length_limit, pad
from dcar.decoding.methods import ChunkMethod, FixedChunk, PolicyChunk, RandomChunk, check_policy
from dcar.decoding.records import DecodeResult, Prompt
from dcar.errors import ConfigError, EngineError
from dcar.model import CARDecoder
from dcar.sampling import SamplingConfig, group_keys, sample, uniform, warp
from heads.layers import TransformerLayer
from heads.policy import ChunkPolicy


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and switches of an engine."""

    batch: int = 1  # rows decoded at once
    capacity: int = 2048  # speech positions of a row, prompt and generated tokens
    text: int = 256  # phonemes of a row
    chunks: Literal["auto", "exact", "padded"] = "auto"  # auto: padded on CUDA, exact elsewhere
    graphs: bool | None = None  # CUDA graphs; None = on CUDA
    compile: bool = False  # torch.compile of the Transformer layers
    sync_every: int = 8  # steps between two looks at the device (1 on the CPU, where looking is free)
    column_block: int = 128  # with graphs, attention reads a multiple of so many columns: one graph per multiple

    def __post_init__(self) -> None:
        if min(self.batch, self.capacity, self.text, self.sync_every, self.column_block) < 1:
            raise ConfigError(f"batch, capacity, text, sync_every and column_block must be at least 1: {self}")
        if self.chunks not in ("auto", "exact", "padded"):
            raise ConfigError(f"chunks must be 'auto', 'exact' or 'padded', not '{self.chunks}'")


@dataclass(frozen=True)
class Job:
    """One utterance to speak: its place in the results, and which member of its group it is."""

    index: int
    prompt: Prompt
    member: int = 0


@dataclass(frozen=True)
class Progress:
    """New tokens of an utterance; `result` once it is complete."""

    job: Job
    tokens: list[int]
    result: DecodeResult | None = None


@dataclass(frozen=True)
class Plan:
    """What one run does at every step; part of the key of its graphs."""

    method: ChunkMethod
    sampling: SamplingConfig
    seed: int = 0
    share_token_draws: bool = False
    record_hidden: bool = False

    @property
    def schedule(self) -> FixedChunk | RandomChunk | PolicyChunk:
        schedule = getattr(self.method, "schedule", None)
        if not isinstance(schedule, FixedChunk | RandomChunk | PolicyChunk):
            raise ConfigError(f"the static engine serves chunk-wise methods, not '{self.method.name}'; use "
                              "dcar.decoding.decode")
        return schedule

    @property
    def step(self) -> Hashable:
        """What a step does, as opposed to what it finds in the buffers."""
        schedule = self.schedule
        if isinstance(schedule, FixedChunk):
            about: Hashable = schedule.size
        elif isinstance(schedule, RandomChunk):
            about = schedule.sizes
        else:
            about = schedule.mode, schedule.forced is not None
        return type(schedule), about, self.sampling, self.record_hidden

    def widths(self) -> tuple[int, ...]:
        """Chunk sizes that the schedule asks for without a policy."""
        schedule = self.schedule
        if isinstance(schedule, FixedChunk):
            return (schedule.size,)
        if isinstance(schedule, RandomChunk):
            return schedule.sizes
        forced = schedule.forced or {}
        return tuple({size for sizes in forced.values() for size in sizes} - {0})


class _Rows:
    """Everything that belongs to a row, [B] or [B, …], on the device."""

    def __init__(self, batch: int, capacity: int, heads: int, width: int, device: torch.device, dtype: torch.dtype):
        room = capacity + heads
        whole = partial(torch.zeros, dtype=torch.long, device=device)
        self.lengths, self.origin, self.text = whole(batch), whole(batch), whole(batch)
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

    def move(self, source: int, target: int) -> None:
        """Row `source` takes the place of row `target`."""
        for tensor in vars(self).values():
            if isinstance(tensor, Tensor):
                tensor[target] = tensor[source]


@dataclass
class _Slot:
    """Who occupies a row."""

    job: Job
    prompt_length: int
    length: int  # bound on its speech positions in the cache, tightened at every look
    given: int = 0  # tokens handed out


def why_not(model: object, sampling: SamplingConfig | None = None) -> str | None:
    """Why the engine cannot decode with this model and sampling; None where it can."""
    if not all(isinstance(layer, TransformerLayer) for layer in getattr(model, "layers", [None])):
        return f"the static engine needs a CARDecoder of TransformerLayers, not a {type(model).__name__}"
    if sampling is not None and sampling.repetition_window:
        return "the static engine does not look back at the last tokens, as repetition_window asks"
    return None


class StaticEngine:
    """Speaks utterances with one decoder, and a policy where the schedule asks one. Not for several threads.

    The decoder must stay as it is. The policy's weights are copied; `load_policy` takes new ones, `fit` makes room for
    longer utterances or more rows.
    Raises ConfigError for an impossible combination and EngineError if the buffers do not fit in memory.
    """

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
            self.layers = [FusedLayer(layer) for layer in model.layers if isinstance(layer, TransformerLayer)]
            self.norm = norm(model.norm)
            self.policy = None if policy is None else FusedPolicy(policy)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise _no_memory(error, self.config, []) from error
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
        self.config = replace(c, batch=max(batch, c.batch), text=max(-(-text // 32) * 32, c.text),
                              capacity=max(min(-(-capacity // 128) * 128, most), capacity, c.capacity))
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
            raise _no_memory(error, self.config, []) from error
        self._signature = self.signature()

    def _make_buffers(self) -> None:
        model, device, dtype, b = self.model, self.device, self.dtype, self.config.batch
        num_heads = model.config.num_attention_heads
        head_dim = model.config.hidden_size // num_heads
        self.cache = StaticCache(len(self.layers), b, self.config.text, self.capacity, num_heads, head_dim, device,
                                 dtype)
        first = -self.capacity if model.config.bos else 0
        self.rotation = Rotation(model.speech_rotary, first, self.capacity - 1, device, dtype)
        self.rows = _Rows(b, self.config.capacity, self.heads, model.config.hidden_size, device, dtype)
        self.hidden: Tensor | None = None
        if self.policy is not None:
            self.policy.allocate(b, self.capacity, device, dtype)
        self._tables: dict[tuple[int, ...], Tensor] = {}  # of RandomChunk; graphs read them
        self._offsets = torch.arange(max(self.heads, 1), device=device)
        self._columns = torch.arange(self.cache.width, device=device)
        self._stack = torch.compile(self._layers, dynamic=True) if self.config.compile else self._layers

    def signature(self) -> Hashable:
        """What graphs and fused weights were made for; it changes when a weight of the decoder is replaced, moved or
        trained, but not by `load_policy`, which writes to the addresses that graphs read."""
        weights = weights_signature(self.model), None if self.policy is None else self.policy.signature()
        parameter = self.model.norm.weight
        return (self.config.batch, self.config.capacity, self.config.text, str(parameter.dtype),
                str(parameter.device), hash(weights))

    # --- running ------------------------------------------------------------------------------------------------

    def decode(self, prompts: Sequence[Prompt], method: ChunkMethod, sampling: SamplingConfig, *, seed: int = 0,
               group_size: int = 1, share_token_draws: bool = False,
               record_hidden: bool = False) -> list[DecodeResult]:
        """As `dcar.decoding.decode`, in batches of this engine. Errors: those of `run`."""
        started, policy_before = self.clock(), self.policy_seconds
        plan = Plan(method, sampling, seed, share_token_draws, record_hidden)
        jobs = [Job(i * group_size + g, p, g) for i, p in enumerate(prompts) for g in range(group_size)]
        results = {p.job.index: p.result for p in self.run(jobs, plan) if p.result is not None}
        share = 1 / max(1, len(jobs))
        seconds = {"lm": share * (self.clock() - started),
                   "policy": share * (self.policy_seconds - policy_before)}
        for result in results.values():
            result.seconds = dict(seconds)
        return [results[j.index] for j in jobs]

    def run(self, jobs: Iterable[Job], plan: Plan, stream: bool = False) -> Iterator[Progress]:
        """Speak the jobs, which are taken as rows become free; yields each result when it is there, and with
        `stream` also the new tokens of unfinished utterances at every look at the device.

        Raises TextError, DataError (a prompt that the model cannot read), ConfigError (schedule and model do not
        fit), EngineError (an utterance exceeds the buffers, no memory, the model was changed): what had finished is
        in its `finished`.
        """
        self._check(plan)
        self._prepare(plan)
        waiting, finished = iter(jobs), []
        slots: list[_Slot | None] = [None] * self.config.batch
        used, fresh, since = 0, 0, 0  # rows in use; steps since an admission; steps since a look
        exhausted = False
        try:
            while True:
                while not exhausted and None in slots:
                    free = [i for i, slot in enumerate(slots) if slot is None]
                    taken = [job for _, job in zip(free, waiting, strict=False)]
                    exhausted = len(taken) < len(free)
                    if not taken:
                        break
                    self._admit(taken, free, slots, plan)
                    fresh = 0
                    used = max(i for i, slot in enumerate(slots) if slot is not None) + 1
                if not any(slots):
                    return
                used = self._compact(slots, used) if exhausted else used
                self._step(used, slots, plan, fresh < plan.sampling.min_tokens)
                fresh, since = fresh + 1, since + 1
                if since < self.sync_every:
                    continue
                since = 0
                for progress in self._look(slots, plan, stream):
                    if progress.result is not None:
                        finished.append(progress.result)
                    yield progress
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise _no_memory(error, self.config, finished) from error
        except EngineError as error:
            error.finished = finished
            raise

    def _check(self, plan: Plan) -> None:
        StepGraphs.check(self._signature, self.signature())
        schedule, heads = plan.schedule, self.heads
        if any(not 1 <= size <= heads for size in plan.widths()):
            raise ConfigError(f"chunk sizes {plan.widths()}: this decoder predicts 1..{heads} tokens a step")
        if isinstance(schedule, PolicyChunk):
            if self.policy is None or schedule.policy is not self.policy.source:
                raise ConfigError("this engine was built without that policy; give it to StaticEngine(policy=…) or "
                                  "load_policy")
            if self.policy.stale:
                raise EngineError("the policy was changed after this engine took its weights; call load_policy")
            check_policy(schedule.policy, heads)

    def _prepare(self, plan: Plan) -> None:
        rows = self.rows
        for tensor in (rows.generated, rows.limits, rows.pending_counts, rows.lengths):
            tensor.zero_()
        if isinstance(plan.schedule, RandomChunk) and plan.schedule.sizes not in self._tables:
            self._tables[plan.schedule.sizes] = torch.tensor(plan.schedule.sizes, device=self.device)
        if plan.record_hidden and self.hidden is None:
            width = self.model.config.hidden_size
            self.hidden = torch.zeros(self.config.batch, self.capacity, width, device=self.device, dtype=self.dtype)

    def _admit(self, jobs: Sequence[Job], free: Sequence[int], slots: list[_Slot | None], plan: Plan) -> None:
        """Read prompts, each once for its whole group, and put them into free rows."""
        bos = (self.model.config.speech_vocab_size + 1,) if self.model.config.bos else ()
        unique: dict[int, int] = {}
        prompts: list[Prompt] = []
        for job in jobs:
            self._check_room(job.prompt, plan)
            if id(job.prompt) not in unique:
                unique[id(job.prompt)] = len(prompts)
                prompts.append(job.prompt)
        text, text_lengths = pad([p.text_ids for p in prompts], self.device)
        speech, lengths = pad([p.prompt_ids + bos for p in prompts], self.device)
        reference, hidden = self.model.prefill(text, text_lengths, speech, lengths, 0)
        schedule = plan.schedule
        log_law: Tensor | None = None
        if isinstance(schedule, PolicyChunk):
            policy_reference = schedule.policy.new_cache(len(prompts), speech.shape[1], device=self.device,
                                                         dtype=self.dtype)
            logits = schedule.policy.extend(policy_reference, hidden, lengths)
            log_law = logits[torch.arange(len(prompts), device=self.device), lengths - 1].float().log_softmax(-1)
        rows = free[: len(jobs)]
        sources = [unique[id(job.prompt)] for job in jobs]
        for job, row, source in zip(jobs, rows, sources, strict=True):
            p = len(job.prompt.prompt_ids) + len(bos)
            self.cache.load(row, reference.kv, len(job.prompt.text_ids), p, source, text.shape[1])
            if log_law is not None:
                assert self.policy is not None
                self.policy.cache.load(row, policy_reference.kv, 0, p, source, 0)
            if plan.record_hidden and self.hidden is not None:
                self.hidden[row, :p] = hidden[source, :p]
            slots[row] = _Slot(job, p, p)
        r = self.rows
        where, origins = (torch.tensor(x, device=self.device) for x in (rows, sources))
        r.lengths[where], r.text[where] = lengths[origins], text_lengths[origins]
        r.origin[where] = reference.origin[origins]
        r.last_hidden[where] = hidden[origins, lengths[origins] - 1]
        r.limits[where] = torch.tensor([length_limit(j.prompt, plan.sampling) for j in jobs], device=self.device)
        for tensor in (r.generated, r.passes, r.pending_counts):
            tensor[where] = 0
        r.ended[where] = False
        self._draw(jobs, where, plan)
        if isinstance(schedule, FixedChunk):
            r.sizes[where] = schedule.size
        elif isinstance(schedule, RandomChunk):
            r.sizes[where] = self._random_sizes(schedule, r.action_draws[where, 0])
        else:
            r.forced[where] = torch.tensor([schedule._forced_size(j.prompt.utterance_id, j.member) for j in jobs],
                                           device=self.device)
            assert log_law is not None
            r.sizes[where], r.log_probs[where] = self._choose(log_law[origins], r.action_draws[where, 0],
                                                              r.forced[where], schedule)

    def _check_room(self, prompt: Prompt, plan: Plan) -> None:
        check_prompt(prompt, self.model)
        limit = length_limit(prompt, plan.sampling)
        need = len(prompt.prompt_ids) + int(self.model.config.bos) + limit
        if need > self.config.capacity:
            raise EngineError(f"{prompt.utterance_id}: prompt and up to {limit} tokens need {need} positions, the "
                              f"engine has capacity={self.config.capacity}; raise it, or lower max_tokens")
        if len(prompt.text_ids) > self.config.text:
            raise EngineError(f"{prompt.utterance_id}: {len(prompt.text_ids)} phonemes, the engine has "
                              f"text={self.config.text}; raise it, or split the text")

    def _draw(self, jobs: Sequence[Job], where: Tensor, plan: Plan) -> None:
        """The random numbers of whole utterances, as the reference addresses them."""
        token_keys, action_keys = group_keys(plan.seed, [j.prompt.utterance_id for j in jobs],
                                             [j.member for j in jobs], plan.share_token_draws)
        every = torch.arange(self.rows.tokens.shape[1], device=self.device).expand(len(jobs), -1)
        self.rows.token_draws[where] = uniform(token_keys.to(self.device), "token", every)
        if not isinstance(plan.schedule, FixedChunk):
            stream = "policy" if isinstance(plan.schedule, PolicyChunk) else "chunk"
            self.rows.action_draws[where] = uniform(action_keys.to(self.device), stream, every)

    # --- one step -----------------------------------------------------------------------------------------------

    def _step(self, used: int, slots: Sequence[_Slot | None], plan: Plan, forbid: bool) -> None:
        """Speak the decided chunk, read it, decide the next one."""
        n = self.config.batch if self.graphs.enabled else used
        schedule = plan.schedule
        if isinstance(schedule, FixedChunk):
            width = schedule.size
        elif self.padded:
            width = self.heads
        else:  # the only value that is read back; a finished row asks for nothing
            r = self.rows
            width = max(1, int(torch.minimum(r.sizes[:n], r.limits[:n] - r.generated[:n]).max()))
        busy = [slot for slot in slots if slot is not None]
        text, speech = max(len(s.job.prompt.text_ids) for s in busy), max(s.length for s in busy) + width
        padded = self.padded and not isinstance(schedule, FixedChunk)
        tight = n == 1 and not self.graphs.enabled and not padded  # the window is what the one row sees
        if self.graphs.enabled:
            block = self.config.column_block
            text, speech = (-(-x // block) * block for x in (text, speech))
        first, last = max(0, self.cache.text - text), min(self.cache.width, self.cache.text + speech)
        step = partial(self._whole_step, n, width, first, last, tight, plan, forbid)
        key = (n, width, first, last, forbid, plan.step)
        with torch.inference_mode():
            self.graphs.run(key, step, self.rows.small, self._signature)
        for slot in busy:
            slot.length = min(slot.length + width, self.config.capacity)

    def _whole_step(self, n: int, width: int, first: int, last: int, tight: bool, plan: Plan, forbid: bool) -> None:
        self._speak(n, width, plan, forbid)
        if self.device.type == "cpu" and not bool((self.rows.generated[:n] < self.rows.limits[:n]).any()):
            return  # the last chunk is never read
        self._read(n, width, first, last, tight, plan)

    def _speak(self, n: int, width: int, plan: Plan, forbid: bool) -> None:
        """Heads 1..width of the last hidden states -> tokens, kept up to EOS and the limit."""
        r, eos = self.rows, self.model.config.eos
        position = r.generated[:n, None] + self._offsets[:width]
        logits = self.model.heads(r.last_hidden[:n], width)  # [n, k, V + 1]
        law = warp(logits, plan.sampling, position < plan.sampling.min_tokens if forbid else None, eos)
        tokens = sample(law, r.token_draws[:n].gather(1, position))
        sizes = r.sizes[:n]
        asked = torch.minimum(sizes, r.limits[:n] - r.generated[:n])  # 0 where a row is finished
        ends = torch.where(tokens == eos, self._offsets[:width], width).amin(1)
        counts, ended = torch.minimum(asked, ends), ends < asked
        r.tokens[:n].scatter_(1, position, tokens)
        step = r.passes[:n, None]
        r.emitted[:n].scatter_(1, step, counts[:, None])
        if not isinstance(plan.schedule, FixedChunk):
            r.actions[:n].scatter_(1, step, sizes[:, None])
        if isinstance(plan.schedule, PolicyChunk):
            r.policy_log_probs[:n].scatter_(1, step, r.log_probs[:n, None])
        r.passes[:n] += asked > 0
        r.generated[:n] += counts
        r.ended[:n] |= ended
        r.limits[:n] = torch.where(ended, r.generated[:n], r.limits[:n])
        r.pending[:n, :width] = tokens
        r.pending_counts[:n] = counts * (r.generated[:n] < r.limits[:n])

    def _read(self, n: int, width: int, first: int, last: int, tight: bool, plan: Plan) -> None:
        """The pending tokens through the decoder, behind each row's past; then the next decision. `tight`: the columns
        from first to last are just what one row without padding sees."""
        r = self.rows
        position = r.lengths[:n, None] + self._offsets[:width]  # [n, k] speech positions
        cos, sin = self.rotation((position - r.origin[:n, None]).view(-1))
        mask = None
        if not tight or width > 1:
            column = self._columns[first:last]
            seen = column <= self.cache.text + position[:, :, None]
            if not tight:
                seen = seen & (column >= self.cache.text - r.text[:n, None, None])
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
            mask = mask.masked_fill_(~seen, -torch.inf)[:, None]  # [n, 1, k, columns]
        tokens, index = r.pending[:n, :width].reshape(-1), (self.cache.base[:n] + position).view(-1)
        ends = (r.pending_counts[:n] - 1).clamp(min=0)  # of each row's last real position among the flat ones
        real, speech = None, position.view(-1)
        if n > 1 and width > 1 and not self.graphs.enabled and not self.padded:
            # Rows of a ragged batch read different numbers of tokens: leave the padding out of all but the attention.
            real = (self._offsets[:width] < r.pending_counts[:n, None]).view(-1).nonzero()[:, 0]
            tokens, index, speech, cos, sin = (t.index_select(0, real) for t in (tokens, index, speech, cos, sin))
            ends = (r.pending_counts[:n].cumsum(0) - 1).clamp(min=0)
        elif n > 1:
            ends = ends + torch.arange(0, n * width, width, device=self.device)
        x = F.embedding(tokens, self.model.speech_embedding.weight)
        x = self.norm(self._stack(x, cos, sin, index, real, mask, n, width, first, last))
        r.last_hidden[:n] = x.index_select(0, ends)
        if plan.record_hidden and self.hidden is not None:
            row = index // self.cache.width  # of the flat columns
            self.hidden.view(-1, x.shape[1]).index_copy_(0, row * self.capacity + speech, x)
        if not isinstance(plan.schedule, FixedChunk):
            self._decide(x, speech, index // self.cache.width, ends, last - self.cache.text, n, tight, plan)
        r.lengths[:n] += r.pending_counts[:n]

    def _layers(self, x: Tensor, cos: Tensor, sin: Tensor, index: Tensor, real: Tensor | None, mask: Tensor | None,
                n: int, width: int, first: int, last: int) -> Tensor:
        """x [N, D] of N = n * width positions, or of the `real` [N] ones among them."""
        for i, layer in enumerate(self.layers):
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

    def _decide(self, x: Tensor, position: Tensor, row: Tensor, ends: Tensor, last: int, n: int, tight: bool,
                plan: Plan) -> None:
        """Sizes of the next chunks, from the normed hidden states x [N, D] just read, at speech positions [N] of rows
        [N]; ends [n] are each row's last ones."""
        schedule, r = plan.schedule, self.rows
        draws = r.action_draws[:n].gather(1, r.generated[:n, None])[:, 0]
        if isinstance(schedule, RandomChunk):
            r.sizes[:n] = self._random_sizes(schedule, draws)
            return
        assert isinstance(schedule, PolicyChunk) and self.policy is not None
        started = self.clock()
        seen = None if tight else r.lengths[:n] + r.pending_counts[:n]
        log_law = self.policy.read(x, position, row, ends, last, seen)
        sizes, log_probs = self._choose(log_law, draws, r.forced[:n], schedule)
        r.sizes[:n], r.log_probs[:n] = sizes, log_probs
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

    # --- results ------------------------------------------------------------------------------------------------

    def _look(self, slots: list[_Slot | None], plan: Plan, stream: bool) -> Iterator[Progress]:
        """Which rows have finished, and what is new; tightens the bound on the columns."""
        r = self.rows
        generated, limits, lengths = torch.stack((r.generated, r.limits, r.lengths)).tolist()
        for row, slot in enumerate(slots):
            if slot is None:
                continue
            slot.length = lengths[row]
            done = generated[row] >= limits[row]
            if not done and not (stream and generated[row] > slot.given):
                continue
            new = r.tokens[row, slot.given : generated[row]].tolist()
            slot.given = generated[row]
            if done:
                slots[row] = None
            yield Progress(slot.job, new, self._result(row, slot, plan) if done else None)

    def _result(self, row: int, slot: _Slot, plan: Plan) -> DecodeResult:
        r = self.rows
        passes = int(r.passes[row])
        emitted = r.emitted[row, :passes].tolist()
        schedule = plan.schedule
        fixed = isinstance(schedule, FixedChunk)
        positions = [slot.prompt_length - 1 + sum(emitted[:i]) for i in range(passes)]
        hidden = None
        if plan.record_hidden and self.hidden is not None:
            hidden = self.hidden[row, : positions[-1] + 1].clone()
        return DecodeResult(
            slot.job.prompt.utterance_id, plan.method.name, plan.seed, r.tokens[row, : int(r.generated[row])].tolist(),
            truncated=not bool(r.ended[row]), target_passes=passes, emitted=emitted,
            actions=[schedule.size] * passes if fixed else r.actions[row, :passes].tolist(),  # type: ignore[union-attr]
            decision_positions=positions,
            action_log_probs=r.policy_log_probs[row, :passes].tolist() if isinstance(schedule, PolicyChunk) else [],
            hidden=hidden, prompt_length=slot.prompt_length)

    def _compact(self, slots: list[_Slot | None], used: int) -> int:
        """Nothing waits any more: once half of the rows are empty, move the others together (not under graphs, whose
        shapes are fixed). Returns the rows in use."""
        alive = [i for i, slot in enumerate(slots) if slot is not None]
        if self.graphs.enabled or len(alive) > used // 2:
            return used
        holes = [i for i in range(len(alive)) if slots[i] is None]
        for target, source in zip(holes, reversed(alive), strict=False):
            self.rows.move(source, target)
            self.cache.kv[:, target] = self.cache.kv[:, source]
            if self.policy is not None:
                self.policy.cache.kv[:, target] = self.policy.cache.kv[:, source]
            if self.hidden is not None:
                self.hidden[target] = self.hidden[source]
            slots[target], slots[source] = slots[source], None
        return len(alive)


class Room(NamedTuple):
    """Sizes of an engine's buffers, as in EngineConfig."""

    capacity: int
    text: int


def room_for(prompts: Sequence[Prompt], sampling: SamplingConfig) -> Room:
    """What these prompts need."""
    longest = max((len(p.prompt_ids) + 1 + length_limit(p, sampling) for p in prompts), default=1)
    return Room(longest, max((len(p.text_ids) for p in prompts), default=1) or 1)


def engine_for(model: CARDecoder, prompts: Sequence[Prompt], sampling: SamplingConfig, *, batch: int = 32,
               policy: ChunkPolicy | None = None, **settings) -> StaticEngine:
    """An engine whose buffers fit these prompts; `settings` are those of EngineConfig."""
    room = room_for(prompts, sampling)
    return StaticEngine(model, EngineConfig(batch, room.capacity, room.text, **settings), policy)


def _no_memory(error: BaseException, config: EngineConfig, finished: Sequence[DecodeResult]) -> BaseException:
    """EngineError in place of an allocation that failed; any other error as it was."""
    if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
        return error
    return EngineError(
        f"out of memory with batch={config.batch}, capacity={config.capacity}, text={config.text} ({error}); lower "
        f"batch first, then capacity (max_tokens bounds it), or set graphs=false; {len(finished)} utterances are "
        "finished and kept", finished)
