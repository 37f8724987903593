"""k-means over the encoder of whisper-base: the tokenizer that ships.

The encoder was trained to transcribe, so its states represent words more than voices, as supervised
semantic (S3) tokens do. Whisper must therefore not evaluate speech made from these codes; moonshine
does.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.sources.packages import WHISPER_BASE_SHA256, whisper_base_dir
from dcar.tokens.base import encoder_input, fitted, in_batches
from dcar.tokens.whisper_states import log_mel, shared_states

SAMPLES_PER_TOKEN = 320
MAX_SECONDS = 29.0
"""Longest waveform that fits, with its trailing silence, into the encoder's 30 s of positions."""
BATCH_SECONDS = 600.0
"""Padded audio that a GPU encodes at once, in seconds: a calculated 2 GB."""


@lru_cache(maxsize=1)
def _model() -> Any:
    """Return the model, one per process: it takes 290 MB."""
    from faster_whisper import WhisperModel

    return WhisperModel(
        str(whisper_base_dir()), device="cpu", compute_type="float32", cpu_threads=1
    )


class WhisperEncoder:
    """Encoder that returns the final states of whisper-base at 50 Hz; the model is loaded with the
    first waveform.

    Every waveform is encoded with the same trailing silence, at a cost proportional to its length
    (not padded to 30 s). A CPU runs CTranslate2, one waveform at a time, as for the shipped tokens.
    Other devices run `WhisperStates` in batches, whose states differ by rounding. On the shipped
    corpus, computed on a CPU, they differ by 6e-4 at most, and none of its 88,099 codes differs.
    """

    kind, name, sha256 = "whisper-kmeans", "whisper-base", WHISPER_BASE_SHA256
    rate_hz, state_size = 50.0, 512
    max_seconds = MAX_SECONDS

    def __init__(self, tail_seconds: float = 0.5, device: str | torch.device = "cpu") -> None:
        """Store the settings. tail_seconds: silence after every waveform."""
        self.tail_seconds = tail_seconds
        self.device = torch.device(device)

    @property
    def identity(self) -> str:
        return f"{WHISPER_BASE_SHA256} tail={self.tail_seconds}"

    def card(self) -> dict[str, Any]:
        return {
            "tail_seconds": self.tail_seconds,
            "encoder": "whisper-base, final encoder states (MIT)",
        }

    def __call__(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return the states [T, 512] of one waveform; see `batch`."""
        [states] = self.batch([wave], sample_rate)
        return states.cpu().numpy() if isinstance(states, Tensor) else states

    def batch(self, waves: Sequence[np.ndarray], sample_rate: int) -> list[Any]:
        """Return the states [T, 512] float32 of every waveform, T = ceil(seconds · 50).

        They are arrays on the CPU, tensors on another device. Raises AudioError for an empty,
        non-finite or non-mono waveform and for one longer than MAX_SECONDS.
        """
        ready, counts = [], []
        for wave in waves:
            resampled, tokens = encoder_input(
                "speech tokenizer", wave, sample_rate, MAX_SECONDS, SAMPLES_PER_TOKEN
            )
            with_tail = tokens + round(self.tail_seconds * self.rate_hz)
            ready.append(fitted(resampled, with_tail * SAMPLES_PER_TOKEN))
            counts.append(tokens)
        if self.device.type == "cpu":
            return [self._alone(wave)[:tokens] for wave, tokens in zip(ready, counts, strict=True)]
        states = in_batches(
            [len(wave) for wave in ready],
            BATCH_SECONDS * ENCODER_SAMPLE_RATE,
            lambda rows: self._together([ready[i] for i in rows]),
        )
        return [row[:tokens] for row, tokens in zip(states, counts, strict=True)]

    def _alone(self, wave: np.ndarray) -> np.ndarray:
        model = _model()
        features = model.feature_extractor(wave, padding=0)
        return np.asarray(model.encode(np.ascontiguousarray(features, dtype=np.float32)))[0]

    def _together(self, waves: list[np.ndarray]) -> Tensor:
        """Return the padded states of waveforms in one batch."""
        encoder = shared_states(self.device)  # outside: these weights stay ordinary tensors
        with torch.inference_mode():
            (states,) = encoder(*log_mel(waves, self.device))
        return states
