"""The static engine's configuration, and what it is asked to decode."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dcar.decoding.chunks import ChunkMethod, FixedChunk, PolicyChunk
from dcar.decoding.records import DecodeResult, Prompt
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and options of an engine."""

    batch: int = 1  # rows decoded at once
    capacity: int = 2048  # speech positions of a row, prompt and generated tokens
    text: int = 256  # phonemes of a row
    chunks: Literal["auto", "exact", "padded"] = "auto"  # auto: padded on CUDA, exact elsewhere
    graphs: bool | None = None  # CUDA graphs; None = on CUDA
    sync_every: int = 8  # steps between two synchronisations with the device (1 on the CPU, where they are free)
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
    """The method and options of one run."""

    method: ChunkMethod
    sampling: SamplingConfig
    seed: int = 0
    share_token_draws: bool = False
    record_hidden: bool = False

    @cached_property
    def schedule(self) -> FixedChunk | PolicyChunk:
        schedule = getattr(self.method, "schedule", None)
        if not isinstance(schedule, FixedChunk | PolicyChunk):
            raise ConfigError(f"the static engine serves FAR, CAR-k and DCAR, not '{self.method.name}'; use "
                              "dcar.decoding.decode")
        return schedule

    @cached_property
    def step(self) -> Hashable:
        """What identifies the computation of a step: part of the key of its graph."""
        schedule = self.schedule
        if isinstance(schedule, FixedChunk):
            options: Hashable = schedule.size
        else:
            options = schedule.mode, schedule.forced is not None, schedule.dial, schedule.num_candidates
        return type(schedule), options, self.sampling, self.record_hidden
