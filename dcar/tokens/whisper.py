"""k-means over the encoder of whisper-base: the tokenizer that ships.

The encoder was trained to transcribe, so its states carry words more than voices: the same family
as supervised semantic (S3) tokens. Whisper therefore must not judge speech made from these codes;
moonshine does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from dcar.sources.packages import WHISPER_BASE_SHA256, whisper_base_dir
from dcar.tokens.base import fitted, heard_by

SAMPLES_PER_TOKEN = 320
MAX_SECONDS = 29.0
"""Longest waveform that the encoder's 30 s of positions hold, with its trailing silence."""


@lru_cache(maxsize=2)
def _model(threads: int) -> Any:
    """One per process and number of threads: it holds 290 MB."""
    from faster_whisper import WhisperModel

    return WhisperModel(
        str(whisper_base_dir()), device="cpu", compute_type="float32", cpu_threads=threads
    )


class WhisperEncoder:
    """Final encoder states of whisper-base at 50 Hz, through faster-whisper / CTranslate2; loaded
    when it first hears.

    Every waveform is encoded by itself, with the same trailing silence, at a cost proportional to
    its length (not padded to 30 s): batch composition can never change a state. float32 on the CPU.
    """

    kind, name, rate_hz, state_size, sha256 = (
        "whisper-kmeans",
        "whisper-base",
        50.0,
        512,
        WHISPER_BASE_SHA256,
    )

    def __init__(self, tail_seconds: float = 0.5, threads: int = 1) -> None:
        self.tail_seconds, self.threads = tail_seconds, threads

    @property
    def identity(self) -> str:
        return f"{WHISPER_BASE_SHA256} tail={self.tail_seconds}"

    def card(self) -> dict[str, Any]:
        return {
            "tail_seconds": self.tail_seconds,
            "encoder": "whisper-base, final encoder states (MIT)",
        }

    def __call__(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """States [T, 512] float32, T = ceil(seconds · 50).

        Raises AudioError for an empty, non-finite or non-mono waveform and for one longer than
        MAX_SECONDS.
        """
        wave, tokens = heard_by(
            "speech tokenizer", wave, sample_rate, MAX_SECONDS, SAMPLES_PER_TOKEN
        )
        wave = fitted(wave, (tokens + round(self.tail_seconds * self.rate_hz)) * SAMPLES_PER_TOKEN)
        model = _model(self.threads)
        features = model.feature_extractor(wave, padding=0)
        return np.asarray(model.encode(np.ascontiguousarray(features, dtype=np.float32)))[
            0, :tokens
        ]
