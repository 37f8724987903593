"""Rollouts of DCPO: every prompt of a step is decoded G times, half of them with a forced chunk
size, and rewarded.

    decode part 1 │ decode part 2 │ …           the main thread
                  │ vocoder, ASR 1 │ vocoder, ASR 2 …   one worker thread of the run

On a GPU the rewards have a CUDA stream of their own, and no CUDA graph is captured while they are
computed, because a recogniser may capture graphs, too. The members of a group share one prefill.
One `Engine` makes all rollouts of a run, so its buffers and CUDA graphs are reused in every step.
Hidden states are kept, so that updates need no pass of the decoder. Chase-then-exceed (paper §4.4):
the forced half chases the best fixed chunk sizes, and the sampled half has to exceed them.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dcar.decoding import DecodeResult, Engine, PolicyChunk
from dcar.decoding.graphs import capture_lock, one_thread
from dcar.model.draft import AnyDecoder
from dcar.prompts.items import PromptItem
from dcar.recognition.base import Recognizer
from dcar.vocoder.base import Vocoder
from heads.policy import ChunkPolicy
from rl.config import DCPOConfig
from rl.rewards import Reward, needs_sound, score
from rl.transcription import RolloutRecord, synthesise


@dataclass
class RolloutBatch:
    """Rollouts of one step on one process, ready for updates; rows of a group are adjacent."""

    records: list[RolloutRecord]
    positions: Tensor  # [R, M] decision positions, padded with 0
    # [R, M] action indices (chunk size - 1, plus K times the candidate's index), padded with 0
    actions: Tensor
    mask: Tensor  # [R, M] float, 1 at a decision
    forced: Tensor  # [R] bool
    rewards: Tensor  # [R] float64, NaN if it could not be computed
    parts: np.ndarray  # [R, number of rewards]
    # seconds of rollout, vocoder and recogniser; the last two are spent in the worker
    seconds: dict[str, float]
    # what the policy reads, padded with 0: [R, S, D] hidden states of the speech positions (prompt
    # first), or, after the draw, [R, M, N, n, F] features of the candidates
    hidden: Tensor | None = None
    features: Tensor | None = None


def log_probs_of(policy: nn.Module, batch: RolloutBatch) -> Tensor:
    """Return the log-probabilities of a policy's actions at the decisions of rollouts: [R, M,
    K], or, after the draw, [R, M, N K]."""
    if batch.features is None:
        return policy(batch.hidden, batch.positions)
    return policy(batch.features)


def forced_sizes(
    prompt_index: int, group_size: int, chunk_range: Sequence[int], forced_rows: str
) -> list[int]:
    """Return the chunk size of every member of a group, 0 = ask the policy: round-robin over the
    range in the first half, offset by the prompt's index so that uneven splits average out."""
    half = 0 if forced_rows == "none" else group_size // 2
    return [
        chunk_range[(g + prompt_index) % len(chunk_range)] if g < half else 0
        for g in range(group_size)
    ]


class Roller:
    """Source of rollouts of a frozen decoder, with their rewards.

    config: size and forced sizes of groups, random numbers, candidates, sampling; recognizer: of
    rewards that take transcripts; parts: that a micro-batch is decoded in.
    """

    def __init__(
        self,
        config: DCPOConfig,
        base: AnyDecoder,
        vocoder: Vocoder,
        rewards: Sequence[Reward],
        weights: Sequence[float],
        recognizer: Recognizer | None = None,
        parts: int = 1,
    ):
        self.config = config
        self.base = base
        self.vocoder = vocoder
        self.rewards = list(rewards)
        self.weights = list(weights)
        self.recognizer = recognizer
        self.parts = parts
        self.device = base.norm.weight.device
        self._engine: Engine | None = None  # reused in every step
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._worker = one_thread(self.device, "reward")

    def collect(
        self,
        policy: ChunkPolicy,
        items: Sequence[PromptItem],
        indices: Sequence[int],
        seed: int,
        **columns: Any,
    ) -> RolloutBatch:
        """Return G rollouts of each prompt, drawn with `policy`; `indices` are the positions of the
        prompts in the training set.

        The result depends only on (policy, items, seed), not on the number of parts. `columns`:
        further keyword arguments of the reward functions.
        """
        parts = min(self.parts, len(items))
        bounds = [round(j * len(items) / parts) for j in range(parts + 1)]
        records: list[RolloutRecord] = []
        pending: list[Future] = []
        seconds = {"rollout": 0.0}
        try:
            for first, last in itertools.pairwise(bounds):
                # decode a part of the groups while another thread scores the part before
                started = time.perf_counter()
                part = self._roll(policy, items[first:last], indices[first:last], seed)
                seconds["rollout"] += time.perf_counter() - started
                records += part
                pending.append(self._worker.submit(self._score, part, columns, self._rolled()))
            scored = [p.result() for p in pending]
        finally:
            wait(pending)  # nothing is computed any more when a step has failed
        # everything together, in the order of the prompts
        for _, _, spent in scored:
            for name, value in spent.items():
                seconds[name] = seconds.get(name, 0.0) + value
        totals = torch.from_numpy(np.concatenate([s[0] for s in scored]))
        return self._pack(
            records,
            policy.config.num_actions,
            totals,
            np.concatenate([s[1] for s in scored]),
            seconds,
        )

    def _roll(
        self, policy: ChunkPolicy, items: Sequence[PromptItem], indices: Sequence[int], seed: int
    ) -> list[RolloutRecord]:
        """Decode every prompt of some groups, all together, with the present weights of the
        policy."""
        config, size = self.config, self.config.num_generations
        forced = {
            item.utterance_id: forced_sizes(index, size, config.chunk_range, config.forced_rows)
            for item, index in zip(items, indices, strict=True)
        }
        rows = len(items) * size
        # the engine keeps its buffers and graphs; only the method is a new one
        method = PolicyChunk(policy, "sample", forced=forced, num_candidates=config.num_candidates)
        if self._engine is None or self._engine.rows < rows:
            self._engine = Engine(self.base, method, config.sampling, rows, record_hidden=True)
        self._engine.method = method
        results = self._engine.decode(
            items, seed=seed, group_size=size, common_random_numbers=config.common_random_numbers
        )
        return [
            RolloutRecord(items[i // size], i % size, forced[r.utterance_id][i % size], r)
            for i, r in enumerate(results)
        ]

    def _rolled(self) -> torch.cuda.Event | None:
        """Return an event after everything that has been computed so far; None on a CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self._stream else None

    def _in_parallel(self, rolled: torch.cuda.Event | None) -> AbstractContextManager:
        """Return a context in which a GPU works in parallel with the rollouts, after the event
        `rolled`."""
        if self._stream is None or rolled is None:
            return nullcontext()
        self._stream.wait_event(rolled)
        return torch.cuda.stream(self._stream)

    def _score(
        self, records: list[RolloutRecord], columns: dict[str, Any], rolled: torch.cuda.Event | None
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        started = time.perf_counter()
        with self._in_parallel(rolled):
            if needs_sound(self.rewards):
                synthesise(records, self.vocoder)
            voiced = time.perf_counter()
            with nullcontext() if self._stream is None else capture_lock:
                totals, parts = score(
                    records, self.rewards, self.weights, self.recognizer, **columns
                )
        for record in records:
            record.wave = None  # audio is not needed after the rewards
        return (
            totals,
            parts,
            {"vocoder": voiced - started, "recognizer": time.perf_counter() - voiced},
        )

    def _pack(
        self,
        records: list[RolloutRecord],
        num_actions: int,
        totals: Tensor,
        parts: np.ndarray,
        seconds: dict[str, float],
    ) -> RolloutBatch:
        def padded(values_of: Callable[[DecodeResult], Any]) -> Tensor:
            return pad_sequence([values_of(r.result) for r in records], batch_first=True)

        def columns(result: DecodeResult) -> Tensor:
            """Return the columns of `heads.candidates.joint_log_probs`: the size alone if one
            candidate was drawn."""
            sizes = torch.tensor(result.sizes) - 1
            return sizes + num_actions * torch.tensor(result.chosen) if result.chosen else sizes

        device = self.device
        after_draw = records[0].result.features is not None
        read = padded(lambda r: r.features if after_draw else r.hidden.float())  # type: ignore[union-attr]
        for record in records:  # free them: they are large, and were copied
            record.result.hidden = record.result.features = None
        return RolloutBatch(
            records,
            padded(lambda r: torch.tensor(r.decision_positions)).to(device),
            padded(columns).to(device),
            padded(lambda r: torch.ones(len(r.sizes))).to(device),
            torch.tensor([r.forced > 0 for r in records], device=device),
            totals.to(device),
            parts,
            seconds,
            **{"features" if after_draw else "hidden": read},
        )
