"""The static engine: continuous batching of chunk-wise decoding on fixed buffers, seldom synchronised.

The loop in dcar/decoding/loop.py is the reference and serves every method. This engine serves those without
verification (FAR, CAR-k, DCAR) and gives the same tokens, actions and hidden states. It exists for rollouts, where it
saves a quarter of the time of the loop with fast passes, and for streaming. What differs:

- keys, values, tokens, draws and history live in buffers that are allocated once (`KVCache`, `Rows`);
- a step is a fixed sequence of kernels over (rows, chunk width, columns), so that it can be captured as a CUDA graph
  (dcar/decoding/engine/steps.py);
- EOS, limits and chunk decisions stay on the device; the host synchronises every `sync_every` steps;
- rows that finish are replaced by waiting utterances (continuous batching) without touching their neighbours.

Chunk width, for a policy: "exact" reads the decision back and evaluates the kept heads only, one shape per length;
"padded" runs all heads in one shape without reading anything back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dcar.decoding.chunks import ChunkMethod, FixedChunk, PolicyChunk, check_policy, check_size
from dcar.decoding.ends import distribution_error, length_limit
from dcar.decoding.engine.plan import EngineConfig, Job, Plan, Progress
from dcar.decoding.engine.steps import EngineSteps, Slot, no_memory, why_not
from dcar.decoding.fast.graphs import StepGraphs
from dcar.decoding.records import DecodeResult, Prompt, batch_of, check_prompt
from dcar.errors import ConfigError, DistributionError, EngineError
from dcar.model.draft import AnyDecoder
from dcar.sampling import SamplingConfig, group_keys, uniform
from heads.policy import ChunkPolicy

__all__ = ["EngineConfig", "Job", "Plan", "Progress", "StaticEngine", "engine_for", "room_for", "why_not"]


class StaticEngine(EngineSteps):
    """Decodes utterances with one decoder and, where the schedule has one, a policy. Not thread-safe.

    The decoder must not change. The policy's weights are copied; `load_policy` copies new ones, `fit` makes room for
    longer utterances or more rows.
    Raises ConfigError for an impossible combination and EngineError if the buffers do not fit in memory.
    """

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
        """Decode the jobs, which are admitted as rows become free; yields each result when it is complete, and with
        `stream` also the new tokens of unfinished utterances at every synchronisation.

        Raises TextError, DataError (a prompt that the model cannot read), ConfigError (schedule and model do not
        fit), EngineError (an utterance exceeds the buffers, no memory, the model was changed) or DistributionError
        (the model gives no distribution for some token): what had finished is in its `finished`.
        """
        self._check(plan)
        self._prepare(plan)
        waiting, finished = iter(jobs), []
        slots: list[Slot | None] = [None] * self.config.batch
        used, since_admission, since_sync = 0, 0, 0  # rows in use; steps since the last of each
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
                    since_admission = 0
                    used = max(i for i, slot in enumerate(slots) if slot is not None) + 1
                if not any(slots):
                    return
                used = self._compact(slots, used) if exhausted else used
                self._step(used, slots, plan, since_admission < plan.sampling.min_tokens)
                since_admission, since_sync = since_admission + 1, since_sync + 1
                if since_sync < self.sync_every:
                    continue
                since_sync = 0
                for progress in self._synchronise(slots, plan, stream):
                    if progress.result is not None:
                        finished.append(progress.result)
                    yield progress
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise no_memory(error, self.config, finished) from error
        except (EngineError, DistributionError) as error:
            error.finished = finished
            raise

    def _check(self, plan: Plan) -> None:
        StepGraphs.check(self._signature, self.signature())
        schedule = plan.schedule
        if isinstance(schedule, FixedChunk):
            check_size(schedule.size, self.model)
        else:
            for size in {size for sizes in (schedule.forced or {}).values() for size in sizes} - {0}:
                check_size(size, self.model)
            if self.policy is None or schedule.policy is not self.policy.source:
                raise ConfigError("this engine was built without that policy; give it to StaticEngine(policy=…) or "
                                  "load_policy")
            if self.policy.stale:
                raise EngineError("the policy was changed after this engine took its weights; call load_policy")
            check_policy(schedule.policy, self.heads)

    def _prepare(self, plan: Plan) -> None:
        rows = self.rows
        for tensor in (rows.generated, rows.limits, rows.pending_counts, rows.lengths, rows.undefined_at):
            tensor.zero_()
        if plan.record_hidden and self.hidden is None:
            width = self.model.config.hidden_size
            self.hidden = torch.zeros(self.config.batch, self.capacity, width, device=self.device, dtype=self.dtype)
        schedule = plan.schedule
        if plan.record_hidden and isinstance(schedule, PolicyChunk) and schedule.candidates:
            shape = (self.config.batch, rows.emitted.shape[1], schedule.num_candidates, schedule.candidates,
                     schedule.policy.config.features)
            if self.candidates is None or self.candidates.shape != shape:
                if self.candidates is not None:  # graphs write to its old address
                    self.candidates = None
                    self._reset_graphs()
                self.candidates = torch.zeros(shape, device=self.device)

    def _admit(self, jobs: Sequence[Job], free: Sequence[int], slots: list[Slot | None], plan: Plan) -> None:
        """Prefill prompts, each once for its whole group, into free rows."""
        unique: dict[int, int] = {}
        prompts: list[Prompt] = []
        for job in jobs:
            self._check_room(job.prompt, plan)
            if id(job.prompt) not in unique:
                unique[id(job.prompt)] = len(prompts)
                prompts.append(job.prompt)
        batch = batch_of(prompts, self.model.config, self.device)
        lengths = batch.prompt_lengths
        reference, hidden = self.passes.prefill(*batch, 0)
        r, schedule, rows = self.rows, plan.schedule, free[: len(jobs)]
        where, origins = (torch.tensor(x, device=self.device) for x in (rows, [unique[id(j.prompt)] for j in jobs]))
        self.cache.copy_rows(where, reference, origins)
        if isinstance(schedule, PolicyChunk):
            reader = self.model.policy_reader(schedule.policy, hidden, hidden.shape[1])
            action_logits = reader.read(hidden, lengths)
            if action_logits is not None and reader.cache is not None and self.policy_cache is not None:
                self.policy_cache.copy_rows(where, reader.cache, origins)
                r.action_logits[where] = action_logits[origins]
        for job, row, prompt_length in zip(jobs, rows, lengths[origins].tolist(), strict=True):
            slots[row] = Slot(job, prompt_length, prompt_length)
        if plan.record_hidden and self.hidden is not None:
            self.hidden[where, : hidden.shape[1]] = hidden[origins]  # what is padding is overwritten
        r.lengths[where], r.texts[where] = lengths[origins], batch.text_lengths[origins]
        r.origin[where] = reference.origin[origins]
        r.last_hidden[where] = hidden[origins, lengths[origins] - 1]
        r.limits[where] = torch.tensor([length_limit(j.prompt, plan.sampling) for j in jobs], device=self.device)
        for tensor in (r.generated, r.passes, r.pending_counts, r.undefined_at):
            tensor[where] = 0
        r.ended[where] = False
        self._draw(jobs, where, plan)
        if isinstance(schedule, FixedChunk):
            r.sizes[where] = schedule.size
        else:
            r.forced[where] = torch.tensor([schedule.forced_size(j.prompt.utterance_id, j.member) for j in jobs],
                                           device=self.device)
        if isinstance(schedule, PolicyChunk) and not schedule.candidates:
            self._decide(r, schedule)  # the others as before

    def _check_room(self, prompt: Prompt, plan: Plan) -> None:
        check_prompt(prompt, self.model.config)
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
        if isinstance(plan.schedule, PolicyChunk):
            self.rows.action_draws[where] = uniform(action_keys.to(self.device), "policy", every)

    # --- results ------------------------------------------------------------------------------------------------

    def _synchronise(self, slots: list[Slot | None], plan: Plan, stream: bool) -> Iterator[Progress]:
        """Read lengths and ends back from the device: finished rows and, for a stream, new tokens."""
        r = self.rows
        generated, limits, lengths, sizes, undefined_at = torch.stack(
            (r.generated, r.limits, r.lengths, r.sizes, r.undefined_at)).tolist()
        for row, slot in enumerate(slots):
            if slot is None:
                continue
            if undefined_at[row]:
                raise distribution_error(slot.job.prompt.utterance_id, undefined_at[row] - 1)
            slot.length = lengths[row]
            slot.next_size = min(sizes[row], limits[row] - generated[row])
            done = generated[row] >= limits[row]
            if not done and not (stream and generated[row] > slot.returned):
                continue
            new = r.tokens[row, slot.returned : generated[row]].tolist()
            slot.returned = generated[row]
            if done:
                slots[row] = None
            yield Progress(slot.job, new, self._result(row, slot, plan) if done else None)

    def _result(self, row: int, slot: Slot, plan: Plan) -> DecodeResult:
        r, schedule = self.rows, plan.schedule
        passes = int(r.passes[row])
        emitted = r.emitted[row, :passes].tolist()
        positions = [slot.prompt_length - 1 + sum(emitted[:i]) for i in range(passes)]
        result = DecodeResult(
            slot.job.prompt.utterance_id, plan.method.name, plan.seed, r.tokens[row, : int(r.generated[row])].tolist(),
            truncated=not bool(r.ended[row]), target_passes=passes, emitted=emitted, decision_positions=positions,
            prompt_length=slot.prompt_length)
        if isinstance(schedule, FixedChunk):
            result.actions = [schedule.size] * passes
        else:
            result.actions = r.actions[row, :passes].tolist()
            result.action_log_probs = r.policy_log_probs[row, :passes].tolist()
            result.chosen = r.chosen[row, :passes].tolist() if schedule.num_candidates > 1 else []
        if plan.record_hidden and self.hidden is not None:
            result.hidden = self.hidden[row, : positions[-1] + 1].clone()
        if plan.record_hidden and schedule.candidates and self.candidates is not None:
            result.candidates = self.candidates[row, :passes].clone()
        return result

    def _compact(self, slots: list[Slot | None], used: int) -> int:
        """When no job waits and half of the rows are empty, move the others together (not under graphs, which fix the
        shapes). Returns the rows in use."""
        alive = [i for i, slot in enumerate(slots) if slot is not None]
        if self.graphs.enabled or len(alive) > used // 2:
            return used
        holes = [i for i in range(len(alive)) if slots[i] is None]
        for target, source in zip(holes, reversed(alive), strict=False):
            self.rows.move(source, target)
            for cache in (self.cache, self.policy_cache):
                if cache is not None:
                    cache.kv[:, target] = cache.kv[:, source]
            for recorded in (self.hidden, self.candidates):
                if recorded is not None:
                    recorded[target] = recorded[source]
            slots[target], slots[source] = slots[source], None
        return len(alive)


def room_for(prompts: Sequence[Prompt], sampling: SamplingConfig) -> tuple[int, int]:
    """The `capacity` and `text` of an EngineConfig that these prompts need."""
    longest = max((len(p.prompt_ids) + 1 + length_limit(p, sampling) for p in prompts), default=1)
    return longest, max((len(p.text_ids) for p in prompts), default=1) or 1


def engine_for(model: AnyDecoder, prompts: Sequence[Prompt], sampling: SamplingConfig, *, batch: int = 32,
               policy: ChunkPolicy | None = None, **settings) -> StaticEngine:
    """An engine whose buffers fit these prompts; `settings` are those of EngineConfig."""
    return StaticEngine(model, EngineConfig(batch, *room_for(prompts, sampling), **settings), policy)
