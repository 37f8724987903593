"""Many utterances through a vocoder: in batches of similar length, and without one failure costing the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from dcar.vocoder.base import Vocoder

T = TypeVar("T")
U = TypeVar("U")


def voice(vocoder: Vocoder, token_lists: Sequence[Sequence[int]], speakers: Sequence[np.ndarray], batch: int = 16,
          progress: str = "") -> list[np.ndarray]:
    """Waveforms [samples] in the order of the token lists, empty for an empty list; raises what the vocoder raises.

    speakers: voice features [F] of each. progress: name of a bar, which is drawn where one is given.
    """
    return _in_batches(partial(_synthesize, vocoder, token_lists, speakers), token_lists, batch, progress)


def voice_each(vocoder: Vocoder, token_lists: Sequence[Sequence[int]], speakers: Sequence[np.ndarray],
               batch: int = 16) -> list[np.ndarray | Exception]:
    """As `voice`; where an utterance cannot be synthesised its exception stands in the place of its waveform."""
    speak = partial(isolate, partial(_synthesize, vocoder, token_lists, speakers))
    return _in_batches(speak, token_lists, batch, "")


def isolate(function: Callable[[list[T]], Sequence[U]], inputs: Sequence[T]) -> list[U | Exception]:
    """Apply a batch function; should it fail, apply it to each input alone, so that one bad input costs one result."""
    if not inputs:
        return []
    try:
        answers: list[U | Exception] = list(function(list(inputs)))
        if len(answers) != len(inputs):
            raise ValueError(f"{len(answers)} answers for {len(inputs)} inputs")
        return answers
    except TimeoutError as error:  # it would not answer the single ones either
        return [error] * len(inputs)
    except Exception as error:  # whatever a vocoder or recogniser raises becomes a counted failure
        if len(inputs) == 1:
            return [error]
        return [isolate(function, [one])[0] for one in inputs]


def _synthesize(vocoder: Vocoder, token_lists: Sequence[Sequence[int]], speakers: Sequence[np.ndarray],
                rows: list[int]) -> list[np.ndarray]:
    return vocoder.synthesize([token_lists[i] for i in rows], np.stack([speakers[i] for i in rows]))


def _in_batches(speak: Callable[[list[int]], Sequence[T]], token_lists: Sequence[Sequence[int]], batch: int,
                progress: str) -> list[T]:
    """speak(indices) of all lists that have tokens, `batch` of similar length at a time."""
    waves: list = [np.zeros(0, np.float32)] * len(token_lists)
    order = sorted((i for i, tokens in enumerate(token_lists) if len(tokens)), key=lambda i: (len(token_lists[i]), i))
    for start in tqdm(range(0, len(order), batch), desc=progress, unit="batch", disable=not progress):
        rows = order[start : start + batch]
        for i, wave in zip(rows, speak(rows), strict=True):
            waves[i] = wave
    return waves
