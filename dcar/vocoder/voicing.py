"""Many utterances through a vocoder: in batches of similar length, and without one failure
costing the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from dcar.vocoder.base import Vocoder

T = TypeVar("T")
U = TypeVar("U")


def synthesize(
    vocoder: Any,
    token_lists: Sequence[Sequence[int]],
    speaker: np.ndarray,
    texts: Sequence[str],
) -> list[np.ndarray]:
    """Return the waveforms of `Vocoder.synthesize`, which receives the texts if it `reads_text`."""
    more = (texts,) if getattr(vocoder, "reads_text", False) else ()
    return vocoder.synthesize(token_lists, speaker, *more)


def voice(
    vocoder: Vocoder,
    token_lists: Sequence[Sequence[int]],
    speakers: Sequence[np.ndarray],
    texts: Sequence[str],
    batch: int = 16,
    progress: str = "",
    call: Callable = lambda function, inputs: function(inputs),
) -> list:
    """Waveforms [samples] in the order of the token lists, empty for an empty list; raises what the
    vocoder raises.

    speakers: voice features [F] of each. texts: what each speaks. `batch` lists of similar length
    are spoken at a time. progress: name of a bar, which is drawn if one is given. call: makes a
    call of the vocoder for some indices.
    """

    def speak(rows: list[int]) -> list[np.ndarray]:
        return synthesize(
            vocoder,
            [token_lists[i] for i in rows],
            np.stack([speakers[i] for i in rows]),
            [texts[i] for i in rows],
        )

    waves: list = [np.zeros(0, np.float32)] * len(token_lists)
    order = sorted(
        (i for i, tokens in enumerate(token_lists) if len(tokens)),
        key=lambda i: (len(token_lists[i]), i),
    )
    for start in tqdm(
        range(0, len(order), batch), desc=progress, unit="batch", disable=not progress
    ):
        rows = order[start : start + batch]
        for i, wave in zip(rows, call(speak, rows), strict=True):
            waves[i] = wave
    return waves


def voice_each(
    vocoder: Vocoder,
    token_lists: Sequence[Sequence[int]],
    speakers: Sequence[np.ndarray],
    texts: Sequence[str],
) -> list[np.ndarray | Exception]:
    """As `voice`; where an utterance cannot be synthesised its exception stands in the place of
    its waveform."""
    return voice(vocoder, token_lists, speakers, texts, call=isolate)


def isolate(function: Callable[[list[T]], Sequence[U]], inputs: Sequence[T]) -> list[U | Exception]:
    """Apply a batch function; should it fail, apply it to each input alone, so that one bad
    input costs one result."""
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
