"""Retries and a time limit around a recogniser."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcar.recognition.base import Recognizer
from dcar.recognition.ctc import Alignment

logger = logging.getLogger(__name__)

ANSWERS: dict[str, tuple[type, ...]] = {
    "log_likelihood": (int, float, np.floating),
    "align": (Alignment,),
}
"""What is asked of some recognisers besides transcripts: method -> kinds of an answer."""


@dataclass(frozen=True)
class Retry:
    """Attempts, time limit and waits, in seconds, of one batch."""

    attempts: int = 5
    timeout: float = 60.0  # of one attempt
    backoff: float = 0.5  # before the second attempt; doubles
    longest_wait: float = 30.0


class RetryingRecognizer:
    """Another recogniser, tried again when it fails. Answers are checked: one text (number,
    alignment) a waveform.

    Raises what the last attempt raised. Raises TimeoutError where a batch takes too long, and at
    once while that batch still runs.
    """

    def __init__(self, recognizer: Recognizer, retry: Retry):
        self.recognizer, self.retry, self.name = recognizer, retry, recognizer.name
        self._busy: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "recognizer":  # while it is being copied or unpickled
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
                        f"{self.name} gave {len(answers)} answers for {count} waveforms"
                    )
                if wrong := [a for a in answers if not isinstance(a, kinds)]:
                    raise ValueError(
                        f"{self.name} answered {wrong[0]!r:.60}, which is no {kinds[0].__name__}"
                    )
                return answers
            except TimeoutError:
                raise
            except Exception as error:  # whatever a recogniser raises
                if attempt == self.retry.attempts:
                    raise
                wait = min(self.retry.backoff * 2 ** (attempt - 1), self.retry.longest_wait)
                logger.warning(
                    "%s failed (%s: %s); tried again in %g s",
                    self.name,
                    type(error).__name__,
                    error,
                    wait,
                )
                time.sleep(wait)
        raise AssertionError("unreachable: attempts are at least one")

    def _within(self, question: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """The answer, from a thread that may be left behind; TimeoutError where it does not
        come."""
        if self._busy is not None and self._busy.is_alive():
            raise TimeoutError(f"{self.name} has not answered an earlier batch yet")
        found: list[Sequence[Any]] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                found.append(question())
            except BaseException as error:  # raised again where the answer is waited for
                failed.append(error)

        self._busy = threading.Thread(target=work, daemon=True, name=f"recogniser {self.name}")
        self._busy.start()
        self._busy.join(self.retry.timeout)
        if failed:
            raise failed[0]
        if not found:
            raise TimeoutError(
                f"{self.name} did not answer within {self.retry.timeout:g} s (reward_timeout)"
            )
        return found[0]
