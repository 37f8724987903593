"""Speaking while decoding: audio of utterances as their tokens come, made on a second core where there is one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from dcar.decoding.engine.run import Job, Plan, StaticEngine
from dcar.decoding.records import DecodeResult
from dcar.errors import ConfigError
from dcar.process import cores
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.streaming import StreamingVocoder, reach

T = TypeVar("T")

FIRST = 8
"""Tokens whose sound comes first: 0.16 s, enough until there is more."""


@dataclass(frozen=True)
class AudioChunk:
    """Samples [n] that follow what was given before, and when they were there."""

    index: int  # of the job
    samples: np.ndarray
    seconds: float  # from the start of the stream
    result: DecodeResult | None = None  # with the last piece


def in_one_thread(made: Iterator[T]) -> Iterator[T]:
    """What an iterator makes, made with one thread of torch: decoder and vocoder have a core each, and the steps of a
    small decoder are too short to be shared."""
    while True:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            one = next(made)
        except StopIteration:
            return
        finally:
            torch.set_num_threads(before)
        yield one


def stream_audio(engine: StaticEngine, jobs: Iterable[Job], plan: Plan, vocoder: TokenVocoder,
                 speakers: dict[int, np.ndarray], every: int = 25) -> Iterator[AudioChunk]:
    """Speak the jobs, rows being replaced as they finish, and give out audio as it becomes certain.

    speakers: voice features [F] by job index; every: tokens gathered before the vocoder runs (25 = half a second), at
    first as many as it needs for some sound. The pieces of a job come in order; those of several jobs are interleaved.
    Errors: those of `StaticEngine.run`.
    """
    if every < 1:
        raise ConfigError(f"every counts tokens and must be at least 1, not {every}")
    started, first = time.perf_counter(), max(reach(vocoder) + FIRST, every)
    voices: dict[int, StreamingVocoder] = {}  # of the second thread
    held: dict[int, list[int]] = {}
    wanted: dict[int, int] = {}  # tokens of a job before the vocoder runs
    waiting: deque[tuple[int, Future[np.ndarray], DecodeResult | None]] = deque()

    def push(index: int, tokens: list[int], last: bool) -> np.ndarray:
        if index not in voices:
            voices[index] = StreamingVocoder(vocoder, speakers[index])
        return (voices.pop(index) if last else voices[index]).push(tokens, last)

    def ready(wait: bool) -> Iterator[AudioChunk]:
        while waiting and (wait or waiting[0][1].done()):
            index, future, result = waiting.popleft()
            samples = future.result()
            if len(samples) or result is not None:
                yield AudioChunk(index, samples, time.perf_counter() - started, result)

    with ThreadPoolExecutor(1) as second:
        for progress in engine.run(jobs, plan, stream=True):
            index, done = progress.job.index, progress.result is not None
            if index not in held:
                held[index], wanted[index] = [], first
                waiting.append((index, second.submit(push, index, [], False), None))  # a new voice takes some time
            held[index] += progress.tokens
            if done or len(held[index]) >= wanted[index]:
                waiting.append((index, second.submit(push, index, held.pop(index), done), progress.result))
                if not done:
                    held[index], wanted[index] = [], every
            yield from ready(wait=cores() == 1)
        yield from ready(wait=True)
