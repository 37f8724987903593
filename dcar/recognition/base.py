"""The interface of recognisers, and what they share.

All take float32 mono waveforms at any sample rate and return plain text, "" for silence. A waveform
that is empty or not finite raises AudioError.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.tokens.base import check_waveform

SHORTEST = ENCODER_SAMPLE_RATE // 10
"""Samples that a recogniser needs, one analysis window; shorter waveforms are padded with
silence."""


@runtime_checkable
class Recognizer(Protocol):
    """Speech → text."""

    name: str

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """One transcript per float32 mono waveform [samples]; may be "". Raises AudioError for
        empty or NaN audio."""
        ...


def to_recognizer_rate(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """The waveform [samples] float32 at 16 kHz, at least one analysis window long. Raises
    AudioError."""
    wave = resample(check_waveform(wave, "recognizer"), sample_rate, ENCODER_SAMPLE_RATE)
    return np.pad(wave, (0, SHORTEST - len(wave))) if len(wave) < SHORTEST else wave


def ctc_collapse(best: Sequence[int], dropped: Container[int]) -> list[int]:
    """CTC's rule: equal neighbours among the best symbols of every frame are one, then blanks
    and other marks go."""
    return [s for i, s in enumerate(best) if (i == 0 or s != best[i - 1]) and s not in dropped]
