"""Waveforms for tests."""

import numpy as np


def noise(seconds: float, seed: int = 0, rate: int = 16_000) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(round(seconds * rate))).astype(
        np.float32
    )


def chirp(seconds: float, seed: int, rate: int = 24_000) -> np.ndarray:
    """Return a gliding buzz with syllable-like bursts: not speech, but it moves the encoder
    through many states."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate)) / rate
    pitch = 110 * 2 ** rng.uniform(0, 1) * (1 + 0.2 * np.sin(2 * np.pi * rng.uniform(0.5, 2) * t))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    wave = sum(np.sin(k * phase) * rng.uniform(0.1, 1) / k for k in range(1, 12))
    envelope = 0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(2, 5) * t + rng.uniform(0, 6))
    return (0.1 * wave * envelope + 0.003 * rng.standard_normal(len(t))).astype(np.float32)
