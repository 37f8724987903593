"""Streaming: audio of utterances while they are decoded, synthesised on a second core if there
is one."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from dcar.decoding import DecodeResult, Engine, Prompt
from dcar.decoding.graphs import one_thread
from dcar.process import cores
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.streaming import reach

T = TypeVar("T")

FIRST = 8
"""Number of tokens of the first piece: 0.16 s, enough until the next one."""
EVERY = 25
"""Number of tokens between two calls of the vocoder: half a second."""


@dataclass(frozen=True)
class Piece:
    """Next samples [n] of a stream. The last piece of a phrase has its result, and from a
    Speaker ends with its pause."""

    samples: np.ndarray
    rate: int
    phrase: int  # index of its prompt
    result: DecodeResult | None = None


def in_one_thread(iterator: Iterator[T]) -> Iterator[T]:
    """Run an iterator with one torch thread: decoder and vocoder have one core each, and the
    steps of a small decoder are too short for several threads."""
    while True:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            torch.set_num_threads(before)
        yield item


def tokens_before_audio(vocoder: TokenVocoder, every: int = EVERY) -> int:
    """Return the number of tokens with which the vocoder is called first."""
    return max(reach(vocoder) + FIRST, every)


def speak_first_audio(
    engine: Engine, prompt: Prompt, seed: int, vocoder: TokenVocoder, speaker: np.ndarray
) -> np.ndarray:
    """Return the first samples of a stream and stop: prefill, passes until the vocoder has as many
    tokens as it needs, and its first window. speaker: voice features [F] of the prompt."""
    needed, tokens, ended = tokens_before_audio(vocoder), list[int](), False
    for _, new, result in engine.run([prompt], seed=seed, stream=True):
        tokens += new
        ended = result is not None
        if len(tokens) >= needed:
            break
    return vocoder.stream(speaker).push(tokens, last=ended)


def stream_audio(
    engine: Engine,
    prompts: Sequence[Prompt],
    seed: int,
    vocoder: TokenVocoder,
    speakers: Sequence[np.ndarray],
    every: int = EVERY,
) -> Iterator[Piece]:
    """Decode the prompts in order, as many at once as the engine has rows, and yield audio once it
    is final.

    speakers: voice features [F] of each prompt; every: tokens between two calls of the vocoder, at
    least 1 (25 = half a second); the first call has as many as are needed for some audio. The
    pieces of a prompt come in order; those of several prompts are interleaved. Raises the errors of
    `Engine.run`.
    """
    first = tokens_before_audio(vocoder, every)
    vocoders: dict[int, Any] = {}  # used by the second thread only
    buffered: dict[int, list[int]] = {}  # tokens of a prompt that the vocoder has not got
    needed: dict[int, int] = {}  # tokens of a prompt before the vocoder runs
    waiting: deque[tuple[int, Future[np.ndarray], DecodeResult | None]] = deque()

    def push(index: int, tokens: list[int], last: bool) -> np.ndarray:
        if index not in vocoders:
            vocoders[index] = vocoder.stream(speakers[index])
        return (vocoders.pop(index) if last else vocoders[index]).push(tokens, last)

    def ready(wait: bool) -> Iterator[Piece]:
        while waiting and (wait or waiting[0][1].done()):
            index, future, finished = waiting.popleft()
            samples = future.result()
            if len(samples) or finished is not None:
                yield Piece(samples, vocoder.sample_rate, index, finished)

    with one_thread(vocoder.device) as second:
        for index, tokens, result in engine.run(prompts, seed=seed, stream=True, in_order=True):
            done = result is not None
            if index not in buffered:
                buffered[index], needed[index] = [], first
                # a new voice takes some time
                waiting.append((index, second.submit(push, index, [], False), None))
            buffered[index] += tokens
            if done or len(buffered[index]) >= needed[index]:
                waiting.append(
                    (index, second.submit(push, index, buffered.pop(index), done), result)
                )
                if not done:
                    buffered[index], needed[index] = [], every
            yield from ready(wait=cores() == 1)
        yield from ready(wait=True)
