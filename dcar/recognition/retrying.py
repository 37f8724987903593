"""Retries and a time limit for a recogniser."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from dcar.recognition.base import Recognizer
from dcar.recognition.ctc import Alignment

logger = logging.getLogger(__name__)

ANSWERS: dict[str, tuple[type, ...]] = {
    "log_likelihood": (int, float, np.floating),
    "align": (Alignment,),
}
"""Methods that some recognisers have in addition to `transcribe` → types of their results."""


@dataclass(frozen=True)
class Retry:
    """Attempts, time limit and waits for one batch, in seconds."""

    attempts: int = 5
    timeout: float = 60.0  # time limit of one attempt
    backoff: float = 0.5  # wait before the second attempt; doubles with each further one
    longest_wait: float = 30.0


class RetryingRecognizer:
    """Wrapper that calls another recogniser again if it fails. Results are checked: one text
    (number, alignment) per waveform.

    All questions are asked in one thread of its own, on the CUDA stream of the thread that asks:
    the plans and caches of cuDNN belong to a thread.

    It raises the error of the last attempt, and TimeoutError if a batch takes too long, or at once
    while an earlier batch is still running.
    """

    def __init__(self, recognizer: Recognizer, retry: Retry):
        self.recognizer, self.retry, self.name = recognizer, retry, recognizer.name
        self._questions: SimpleQueue[tuple[Callable[[], Sequence[Any]], Future]] | None = None
        self._asked: Future | None = None  # of the last question

    def __getattr__(self, name: str) -> Any:
        if name == "recognizer":  # not yet set while it is being copied or unpickled
            raise AttributeError(name)
        value = getattr(self.recognizer, name)
        if name not in ANSWERS:
            return value
        return lambda waves, *rest: self._ask(
            lambda: value(waves, *rest), len(waves), ANSWERS[name]
        )

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        return self._ask(lambda: self.recognizer.transcribe(waves, sample_rate), len(waves), (str,))

    def _ask(
        self, question: Callable[[], Sequence[Any]], count: int, kinds: tuple[type, ...]
    ) -> list[Any]:
        for attempt in range(1, self.retry.attempts + 1):
            try:
                answers = list(self._within(question))
                if len(answers) != count:
                    raise ValueError(
                        f"{self.name} returned {len(answers)} answers for {count} waveforms"
                    )
                if wrong := [a for a in answers if not isinstance(a, kinds)]:
                    raise ValueError(
                        f"{self.name} returned {wrong[0]!r:.60}, not a {kinds[0].__name__}"
                    )
                return answers
            except TimeoutError:
                raise
            except Exception as error:  # a recogniser may raise any error
                if attempt == self.retry.attempts:
                    raise
                wait = min(self.retry.backoff * 2 ** (attempt - 1), self.retry.longest_wait)
                logger.warning(
                    "%s failed (%s: %s); trying again in %g s",
                    self.name,
                    type(error).__name__,
                    error,
                    wait,
                )
                time.sleep(wait)
        raise AssertionError("unreachable: attempts are at least one")

    def _within(self, question: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return the result of `question`, computed in the recogniser's thread. Raises
        TimeoutError after `Retry.timeout`; the question is then left running."""
        if self._asked is not None and not self._asked.done():
            raise TimeoutError(
                f"{self.name} is still working on an earlier batch, which exceeded "
                f"{self.retry.timeout:g} s"
            )
        if self._questions is None:
            self._questions = SimpleQueue()
            threading.Thread(
                target=_answer,
                args=(self._questions,),
                daemon=True,
                name=f"recogniser {self.name}",
            ).start()
        stream = _this_stream()

        def ask() -> Sequence[Any]:
            with stream:
                return question()

        self._asked = Future()
        self._questions.put((ask, self._asked))
        if not wait([self._asked], self.retry.timeout).done:
            raise TimeoutError(f"{self.name} did not return within {self.retry.timeout:g} s")
        return self._asked.result()


def _answer(questions: SimpleQueue[tuple[Callable[[], Sequence[Any]], Future]]) -> None:
    """Answer questions as long as the process lives. Errors are raised where the answer is
    awaited."""
    while True:
        question, answer = questions.get()
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)


def _this_stream() -> AbstractContextManager[Any]:
    """Return a context in which another thread uses the current CUDA stream, and its device, of
    this thread."""
    if not torch.cuda.is_initialized():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream())
