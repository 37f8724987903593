"""Synthesis of many utterances, in batches of similar length, in which one failure does not
affect the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from dcar.progress import Progress
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
    """Return waveforms [samples] in the order of the token lists, empty for an empty list. Raises
    what the vocoder raises.

    speakers: voice features [F] of each. texts: the text of each. batch: number of lists of similar
    length that are synthesised together. progress: name of a progress bar, which is shown if it is
    not empty. call: function that calls the vocoder for some indices.
    """

    def synthesize_rows(rows: list[int]) -> list[np.ndarray]:
        return synthesize(
            vocoder,
            [token_lists[i] for i in rows],
            np.stack([speakers[i] for i in rows]),
            [texts[i] for i in rows],
        )

    waves: list = [np.zeros(0, np.float32)] * len(token_lists)
    filled = [i for i, tokens in enumerate(token_lists) if len(tokens)]
    order = sorted(filled, key=lambda i: (len(token_lists[i]), i))
    starts = range(0, len(order), batch)
    for start in Progress(starts, desc=progress, unit="batch", disable=not progress):
        rows = order[start : start + batch]
        for i, wave in zip(rows, call(synthesize_rows, rows), strict=True):
            waves[i] = wave
    return waves


def voice_each(
    vocoder: Vocoder,
    token_lists: Sequence[Sequence[int]],
    speakers: Sequence[np.ndarray],
    texts: Sequence[str],
) -> list[np.ndarray | Exception]:
    """Return the waveforms of `voice`, but the exception in place of a waveform for each
    utterance that cannot be synthesised."""
    return voice(vocoder, token_lists, speakers, texts, call=isolate)


def isolate(function: Callable[[list[T]], Sequence[U]], inputs: Sequence[T]) -> list[U | Exception]:
    """Apply a batch function; if it fails, apply it to each input alone, so that one bad input
    costs one result. Return a result or an exception for each input."""
    if not inputs:
        return []
    try:
        results: list[U | Exception] = list(function(list(inputs)))
        if len(results) != len(inputs):
            raise ValueError(f"{len(results)} results for {len(inputs)} inputs")
        return results
    except TimeoutError as error:  # single inputs would time out too
        return [error] * len(inputs)
    except Exception as error:  # whatever a vocoder or recogniser raises becomes a counted failure
        if len(inputs) == 1:
            return [error]
        return [isolate(function, [one])[0] for one in inputs]
