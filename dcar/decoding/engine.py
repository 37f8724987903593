"""Decoding of utterances: admit them into the rows of a `BatchState`, call the step, look which
rows have finished.

An `Engine` decodes lists of prompts with the same buffers (and CUDA graphs), and yields tokens
while they are decoded; `decode` of pool.py is a function for one list. Rows that finish are
replaced by waiting utterances, whatever the method. A GPU never waits for the host: while it runs a
step, the host looks at what the step before it reported, and queues the next one.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dcar.decoding.columns import power_of_two, round_up
from dcar.decoding.graphs import StepGraphs, save_state
from dcar.decoding.prompts import AHEAD, PromptBlocks, ReadPrompts, read_prompts
from dcar.decoding.reader import Reader
from dcar.decoding.readers import reader_of
from dcar.decoding.records import (
    DecodeResult,
    Prompt,
    check_prompt,
    distribution_error,
    length_limit,
)
from dcar.decoding.state import LOGGED, BatchState, RowLog
from dcar.decoding.step import Admitted, Method, Prefilled, step
from dcar.decoding.storage import CacheStorage
from dcar.decoding.transfers import HostCopy
from dcar.errors import ConfigError, DistributionError, EngineError
from dcar.model.draft import AnyDecoder
from dcar.sampling import SamplingConfig, group_keys

QUEUED = 1
"""Number of steps that are queued after the one that the host looks at, so that a GPU always has
one to run. A finished row runs as many in vain. On a CPU there are none."""
COLUMN_BLOCK = 128
"""Block of columns: with fixed shapes a row has a multiple of it, attention reads a multiple of
it, and there is one graph for each multiple."""


class Progress(NamedTuple):
    """New tokens of an utterance, by its index (member g of prompt i is i × group_size + g);
    `result` once it is complete."""

    index: int  # type: ignore[assignment]
    tokens: list[int]
    result: DecodeResult | None = None


@dataclass
class Slot:
    """Utterance in a row, as known to the host since it last looked."""

    row: int
    index: int
    prompt: Prompt
    member: int
    limit: int  # most tokens
    prompt_length: int
    longest: int  # upper bound on its speech positions in the cache
    generated: int = 0
    returned: int = 0  # tokens handed out


class Look(NamedTuple):
    """Report of a step on its way to the host, and the utterances that were in its rows."""

    slots: list[Slot | None]
    reported: HostCopy  # [rows, 6] of `BatchState.report`


class NewTokens(NamedTuple):
    """New tokens of an utterance on their way to the host."""

    slot: Slot
    first: int  # the new tokens begin here
    generated: int
    passes: int
    draft_passes: int
    complete: bool
    hidden: Tensor | None  # [S, D] of all consumed positions, if it is complete
    features: Tensor | None  # [decisions, N, n, F]


class Reading(NamedTuple):
    """Rows that are being read back."""

    parts: list[NewTokens]
    logs: Callable[[], list[RowLog]]  # waits for them
    failed: Slot | None  # the first utterance without a distribution


class Engine:
    """Decoder, method and sampling, with buffers for `rows` utterances at once. Not thread-safe.

    The weights of the decoder must not change. Those of a policy may: the present ones are used in
    every run, and `method` may be replaced between runs by one of the same class and shapes
    (another policy, other forced sizes). Buffers grow to the needs of a run. Raises ConfigError if
    method, decoder and sampling do not fit together.
    """

    def __init__(
        self,
        model: AnyDecoder | Reader,
        method: Method,
        sampling: SamplingConfig,
        rows: int = 1,
        *,
        record_hidden: bool = False,
        graphs: bool | None = None,
        compile: bool | None = None,
        storage: CacheStorage | None = None,
        blocks: PromptBlocks | None = None,
    ):
        """Prepare the engine. record_hidden: results include the hidden states of all consumed
        positions; storage, blocks: of keys and values, and of prompts, shared with engines that
        never run at the same time; graphs: CUDA graphs (None = on a GPU); compile: compile the
        operations of a step (None = on a GPU; of no effect on a given reader)."""
        self.reader = reader_of(model, compile)
        self.method = method
        self.sampling = sampling
        self.rows = rows
        self.width = method.width(self.reader.config.num_prediction_heads)
        self.record_hidden, self.device = record_hidden, self.reader.device
        if record_hidden and method.tree is not None:
            raise ConfigError(
                f"{method.name}: record_hidden is not supported for methods that draft trees"
            )
        if graphs is None and not self.reader.backend.captured:
            graphs = False
        self.graphs = StepGraphs(graphs, self.device)
        self.eager = self.device.type == "cpu" and not self.reader.backend.compiled
        self._step: Callable[[BatchState, Method], None] = step
        self._storage = storage
        if storage is not None:
            storage.users.add(self)
        self._blocks = blocks
        self._read: ReadPrompts | None = None  # prompts that were read ahead
        self._state: BatchState | None = None
        self._room = 0, 0  # speech positions and text units of a row

    # --- running ----------------------------------------------------------------------------------

    def decode(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int = 0,
        group_size: int = 1,
        common_random_numbers: bool = False,
    ) -> list[DecodeResult]:
        """Decode every prompt `group_size` times; see `decode`."""
        results = {}
        for index, _, result in self.run(
            prompts, seed=seed, group_size=group_size, common_random_numbers=common_random_numbers
        ):
            if result is not None:
                results[index] = result
        return [results[i] for i in range(len(results))]

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int = 0,
        group_size: int = 1,
        common_random_numbers: bool = False,
        stream: bool = False,
        in_order: bool = False,
    ) -> Iterator[Progress]:
        """Decode the prompts. Yield each result when it is complete, and with `stream` also the new
        tokens of unfinished utterances after every step. The longest texts are
        admitted first, or with `in_order` the first prompts.

        Raises TextError or DataError for a prompt that the model cannot read (nothing has been
        decoded then), EngineError if there is no memory, or DistributionError if the model returns
        no distribution for some token; the results finished before are in its `finished`.
        """
        for prompt in prompts:
            check_prompt(prompt, self.reader.config)
        finished: list[DecodeResult] = []
        readings: deque[Reading] = deque()
        queued = 0 if self.eager else QUEUED
        try:
            # 1. buffers with room for the longest of these prompts, and the order of admission
            state = self._prepare(prompts)
            order = sorted(
                range(len(prompts)), key=lambda i: 0 if in_order else -len(prompts[i].text_ids)
            )
            waiting = [
                (i * group_size + g, prompts[i], g) for i in order for g in range(group_size)
            ][::-1]
            slots: list[Slot | None] = [None] * self.rows
            looks: deque[Look] = deque()
            used, steps = 0, 0  # rows in use, steps since an utterance was admitted
            while waiting or any(slots):
                # 2. fill free rows; when nothing waits, move the last rows into the gaps, so that a
                # step has as few rows as there are utterances
                if waiting and None in slots:
                    self._admit(state, waiting, slots, seed, common_random_numbers)
                    steps = 0
                    used = max(i for i, slot in enumerate(slots) if slot is not None) + 1
                elif not waiting:
                    used = self._compact(state, slots, used)
                # 3. one step of the rows in use; on a GPU it is only queued here
                self._advance(state, slots, used, steps < self.sampling.min_tokens)
                steps += 1
                # 4. look at its report, on a GPU at that of the step before: nothing waits for the
                # step that was just queued
                looks.append(Look(slots[:used], HostCopy(state.reported[:used])))
                if len(looks) > queued:
                    readings.append(self._look(state, slots, looks, stream))
                # 5. hand out what has arrived on the host
                yield from self._deliver(readings, seed, finished, queued)
            yield from self._deliver(readings, seed, finished)
        except DistributionError as error:
            error.finished = finished
            raise
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(
                error
            ):
                raise
            for _ in self._deliver(readings, seed, finished):
                pass
            raise EngineError(
                f"out of memory with {self.rows} rows of {self._room[0]} speech positions "
                f"({error}); lower the batch size first, then max_tokens, or set graphs=false; "
                f"{len(finished)} utterances are finished and kept",
                finished,
            ) from error

    def _prepare(self, prompts: Sequence[Prompt]) -> BatchState:
        """Return the state, with room for these prompts."""
        bos = int(self.reader.config.bos)
        need = max(
            (len(p.prompt_ids) + bos + length_limit(p, self.sampling) for p in prompts), default=1
        )
        text = max((len(p.text_ids) for p in prompts), default=1)
        self._read = None  # every run reads its own prompts
        if not self.eager:
            if self._blocks is None:
                self._blocks = PromptBlocks(self.reader, self.graphs.enabled)
            self._blocks.users.add(self)
            longest = max((len(p.prompt_ids) for p in prompts), default=0) + bos
            self._blocks.reserve(self.rows, text, longest)
        text = self.reader.text_room(text)
        if self._state is None or need > self._room[0] or text > self._room[1]:
            need, text = max(need, self._room[0]), max(text, self._room[1])
            if self._state is not None or not self.eager:  # in blocks, so that it happens seldom
                text = round_up(text, 32)
                others = text + self.width + self.method.draft_length
                need = round_up(need + others, COLUMN_BLOCK) - others
            self._room = need, text
            self.release()  # the old and the new buffers need not fit side by side
            try:
                self._state = BatchState(
                    self.reader,
                    self.sampling,
                    self.rows,
                    *self._room,
                    width=self.width,
                    draft_length=self.method.draft_length,
                    keeps_probs=self.method.keeps_probs,
                    streams=self.method.streams,
                    record_hidden=self.record_hidden,
                    features=self.method.recorded(self.width),
                    eager=self.eager,
                    storage=self._storage,
                )
            except ValueError as error:
                raise EngineError(
                    f"{error}; shorten text or prompt, or lower max_tokens"
                ) from error
            self._numbers = torch.zeros(5 * self.rows, dtype=torch.long, device=self.device)
            self.method.start(self._state)
        self._state.remaining.zero_()
        self._state.alive.zero_()
        self.method.refresh(self._state)
        return self._state

    def release(self) -> None:
        """Give the buffers and graphs back until the next run."""
        self._state = None
        self.graphs.reset()

    def _admit(
        self,
        state: BatchState,
        waiting: list[tuple[int, Prompt, int]],
        slots: list[Slot | None],
        seed: int,
        common_random_numbers: bool,
    ) -> None:
        """Start waiting utterances in free rows. A prompt is read once for its whole group."""
        free = [i for i, slot in enumerate(slots) if slot is None]
        while free and waiting:
            read = self._read
            if read is None or id(waiting[-1][1]) not in read.places:
                read = self._read_next(state, waiting, len(free))
            taken: list[tuple[int, Prompt, int]] = []
            while waiting and len(taken) < len(free) and id(waiting[-1][1]) in read.places:
                taken.append(waiting.pop())
            rows, free = free[: len(taken)], free[len(taken) :]
            for (index, prompt, member), row in zip(taken, rows, strict=True):
                length = len(prompt.prompt_ids) + int(self.reader.config.bos)
                limit = length_limit(prompt, self.sampling)
                slots[row] = Slot(row, index, prompt, member, limit, length, length)
            prompts, members = [p for _, p, _ in taken], [member for *_, member in taken]
            names = [p.utterance_id for p in prompts]
            keys = group_keys(seed, names, members, common_random_numbers)
            places = [read.places[id(p)] for p in prompts]
            limits = [length_limit(p, self.sampling) for p in prompts]
            numbers = self._given(torch.stack((*map(torch.tensor, (rows, places, limits)), *keys)))
            start = partial(self._start, state, numbers, read)
            if self.graphs.enabled:
                key = "start", numbers.shape, read.batch[0].shape, read.hidden.shape
                self.graphs.run(key, start)  # starting twice is starting once
            else:
                start()
            self.method.admit(state, numbers[0, : len(rows)], Admitted(prompts, members, seed))
            self._read = None if self.eager else read

    def _read_next(
        self, state: BatchState, waiting: Sequence[tuple[int, Prompt, int]], free: int
    ) -> ReadPrompts:
        """Read the prompts of the next utterances: of as many as there are free rows, or, with
        fixed shapes, as many as are read at once."""
        prompts: dict[int, Prompt] = {}
        for count, (_, prompt, _) in enumerate(reversed(waiting)):
            if count == free if self.eager else len(prompts) == min(AHEAD, self.rows):
                break
            prompts[id(prompt)] = prompt
        if self._blocks is None:
            return read_prompts(self.reader, list(prompts.values()))
        return self._blocks.read(list(prompts.values()), state.cache.capacity)

    def _given(self, numbers: Tensor) -> Tensor:
        """Return numbers [5, R] of admitted rows on the device; with fixed shapes at a fixed
        address, padded by repetitions of the last row."""
        if self.eager:
            return numbers
        count = numbers.shape[1]
        numbers = numbers[:, torch.arange(self._bucket(count)).clamp(max=count - 1)]
        buffer = self._numbers[: numbers.numel()].view(numbers.shape)
        return buffer.copy_(numbers, non_blocking=True)

    def _start(self, state: BatchState, given: Tensor, read: ReadPrompts) -> None:
        """Start utterances: given [5, R], by row its number, the place of its prompt, its limit and
        the keys of its random numbers."""
        rows, origins, limits, *keys = given
        lengths, hidden = read.batch.prompt_lengths[origins], read.hidden
        state.cache.copy_rows(rows, read.cache, origins)
        state.admit(rows, limits, lengths, hidden[origins, lengths - 1], keys)
        if state.hidden is not None:
            # what is padding is overwritten
            state.hidden[rows, : hidden.shape[1]] = hidden[origins]
        self.method.prefill(state, rows, Prefilled(read.batch, hidden, origins))

    def _advance(
        self, state: BatchState, slots: Sequence[Slot | None], used: int, forbids: bool
    ) -> None:
        """Queue the next step of the rows in use, or run it."""
        view = self._next(state, slots, used, forbids)
        if self.graphs.enabled:
            self.graphs.run(
                ("step", view.rows, view.longest, view.forbids),
                partial(self._reported_step, view),
                partial(save_state, view, self.method.tree is not None),
            )
        else:
            self._reported_step(view)

    def _reported_step(self, view: BatchState) -> None:
        self._step(view, self.method)
        view.report()

    def _next(
        self, state: BatchState, slots: Sequence[Slot | None], used: int, forbids: bool
    ) -> BatchState:
        """Return the view of the rows in use for the next step."""
        busy = [slot for slot in slots if slot is not None]
        longest = max(slot.longest for slot in busy)
        if not self.eager:  # one graph for a multiple of so many columns
            used = self._bucket(used)
            # text, and what this step adds
            others = state.cache.prefix + self.width + state.draft_length
            longest = min(round_up(longest + others, COLUMN_BLOCK) - others, self._room[0])
            if self.reader.backend.compiled:  # one variant
                forbids = self.sampling.min_tokens > 0
        for slot in busy:
            slot.longest = min(slot.longest + self.width, self._room[0])
        return state.view(used, longest, forbids)

    def _bucket(self, used: int) -> int:
        """Return the number of rows of a step with fixed shapes: the next power of two."""
        return min(self.rows, power_of_two(used))

    # --- results ----------------------------------------------------------------------------------

    def _look(
        self, state: BatchState, slots: list[Slot | None], looks: deque[Look], stream: bool
    ) -> Reading:
        """Look at the first of these reports, free the rows that have finished, and start to read
        them back, with `stream` also new tokens of the others: in one transfer."""
        look, parts = looks.popleft(), []
        failed: Slot | None = None
        for slot, facts in zip(look.slots, look.reported.get().tolist(), strict=True):
            if slot is None or slots[slot.row] is not slot:  # an earlier look has freed it
                continue
            highest, generated, remaining, length, passes, draft_passes = facts
            if highest > state.eos:
                failed = failed or slot
                continue
            slot.longest = min(length + len(looks) * self.width, self._room[0])
            slot.generated = generated
            if remaining and not (stream and generated > slot.returned):
                continue
            hidden = features = None
            if not remaining:
                slots[slot.row] = None
                with torch.inference_mode(False):  # a policy is trained on these
                    if state.hidden is not None:
                        hidden = _ordinary(state.hidden[slot.row, :length])
                    if state.features is not None:
                        features = _ordinary(state.features[slot.row, :passes])
            parts.append(
                NewTokens(
                    slot,
                    slot.returned,
                    generated,
                    passes,
                    draft_passes,
                    not remaining,
                    hidden,
                    features,
                )
            )
            slot.returned = generated
        rows = [part.slot.row for part in parts]
        counts = [part.generated for part in parts], [part.passes for part in parts]
        return Reading(parts, state.read(rows, *counts) if parts else list, failed)

    def _deliver(
        self, readings: deque[Reading], seed: int, finished: list[DecodeResult], keep: int = 0
    ) -> Iterator[Progress]:
        """Yield what has been read back, but for the last `keep` readings, and add results to
        `finished`."""
        while len(readings) > keep:
            reading = readings.popleft()
            for part, logged in zip(reading.parts, reading.logs(), strict=True):
                result = self._result(part, seed, logged) if part.complete else None
                if result is not None:
                    finished.append(result)
                yield Progress(part.slot.index, logged.tokens[part.first :].tolist(), result)
            if reading.failed is not None:
                slot = reading.failed
                raise distribution_error(slot.prompt.utterance_id, slot.generated)

    def _result(self, part: NewTokens, seed: int, logged: RowLog) -> DecodeResult:
        slot, log = part.slot, dict(zip(LOGGED, logged.log.T.tolist(), strict=True))
        positions = list(accumulate(log["emitted"][:-1], initial=slot.prompt_length - 1))
        verified = [i for i, proposed in enumerate(log["proposed"]) if proposed]
        names = self.method.logged
        result = DecodeResult(
            slot.prompt.utterance_id,
            self.method.name,
            seed,
            logged.tokens.tolist(),
            truncated=part.generated == slot.limit,
            passes=part.passes,
            draft_passes=part.draft_passes,
            proposed=[log["proposed"][i] for i in verified],
            accepted=[log["accepted"][i] for i in verified],
            emitted=log["emitted"],
            sizes=log["sizes"] if "sizes" in names else [],
            decision_positions=positions,
            log_probs=logged.log_probs.tolist() if "log_probs" in names else [],
            hidden=part.hidden,
            prompt_length=slot.prompt_length,
            chosen=log["chosen"] if "chosen" in names else [],
            features=part.features,
        )
        for log_prob, position in zip(result.log_probs, positions, strict=False):
            if math.isnan(log_prob):  # one NaN score makes the whole distribution NaN
                raise distribution_error(slot.prompt.utterance_id, position - positions[0])
        return result

    def _compact(self, state: BatchState, slots: list[Slot | None], used: int) -> int:
        """Move rows together when no utterance waits and half of the rows are empty. Return the
        number of rows in use."""
        busy = [i for i, slot in enumerate(slots) if slot is not None]
        if len(busy) > used // 2:
            return used
        holes = [i for i in range(len(busy)) if slots[i] is None]
        for target, source in zip(holes, reversed(busy), strict=False):
            state.move(source, target)
            slot = slots[target] = slots[source]
            slots[source], slot.row = None, target  # type: ignore[union-attr]
        return len(busy)


def _ordinary(tensor: Tensor) -> Tensor:
    """Return a copy that is not an inference tensor."""
    return torch.empty_like(tensor).copy_(tensor)
