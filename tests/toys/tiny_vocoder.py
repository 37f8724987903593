"""Tiny vocoder and the pack that it learns from: two voices that buzz."""

import math
from pathlib import Path

import numpy as np
import torch

from dcar.audio import resample
from dcar.vocoder.training.pack import PackRow, VocoderData, write_pack
from dcar.vocoder.training.train import TrainVocoderConfig
from dcar.voices.features import speaker_features

TINY = {
    "vocab_size": 16,
    "mel_bands": 40,
    "condition_size": 16,
    "acoustic_size": 32,
    "acoustic_ffn_size": 48,
    "acoustic_dilations": (1, 2),
    "renderer_size": 32,
    "renderer_ffn_size": 48,
    "renderer_dilations": (1, 2),
}
RATE = 24_000


def harmonic(f0: np.ndarray | float, seconds: float, seed: int = 0) -> np.ndarray:
    """Return a buzz: harmonics of f0 (Hz, scalar or [samples]) of falling amplitude, with a
    little noise."""
    count = int(seconds * RATE)
    phase = 2 * np.pi * np.cumsum(np.broadcast_to(f0, count)) / RATE
    wave = sum(np.sin(k * phase) / k for k in range(1, 12))
    noise = np.random.default_rng(seed).normal(size=count)
    return (0.1 * wave + 0.002 * noise).astype(np.float32)


def embedding(seed: int) -> np.ndarray:
    vector = np.abs(np.random.default_rng(seed).normal(size=256)).astype(np.float32)
    return vector / np.linalg.norm(vector)


def voice(seed: int = 0, f0: float = 150.0) -> torch.Tensor:
    return torch.from_numpy(speaker_features(harmonic(f0, 1.0), RATE, embedding(seed)))


def toy_data(
    folder: Path, speeds: tuple[float, ...] = (1.0,), token_rate: int = 50, states: bool = False
) -> VocoderData:
    """Write and load a pack of six recordings of two voices, at the path that `toy_config` names.
    The token determines the pitch, one of two; one token in eight is silence.

    states: with a codebook in three dimensions, and with states around its entries.
    """
    codebook = np.random.default_rng(2).standard_normal((16, 3)) if states else None
    random, recordings, rows, size = np.random.default_rng(1), [], [], RATE // token_rate
    for i in range(6):
        tokens = np.repeat(random.integers(0, 8, size=10), 3 * token_rate // 25)  # 1.2 s
        f0 = np.repeat(np.where(tokens < 4, 120.0, 180.0), size) * (1.0 if i % 2 else 1.3)
        wave = harmonic(f0, 1.2, seed=i) * np.repeat(tokens != 0, size)
        recordings.append(wave.astype(np.float32))
        for speed in speeds:
            played = resample(recordings[-1], RATE * speed, RATE)
            count = math.ceil(len(played) / size)
            codes = tokens[np.minimum((np.arange(count) * speed).astype(int), len(tokens) - 1)]
            vectors = None
            if codebook is not None:
                vectors = codebook[codes] + 0.1 * random.standard_normal((count, 3))
            rows.append(
                PackRow(
                    i, speed, codes, embedding(i % 2), f"v{i % 2}", i == 5 and speed == 1.0, vectors
                )
            )
    write_pack(folder / "pack.safetensors", recordings, rows, "toy-checksum", token_rate, codebook)
    return VocoderData.load(folder / "pack.safetensors", "cpu")


def toy_config(tmp_path: Path, **changes) -> TrainVocoderConfig:
    values = dict(
        data=str(tmp_path / "pack.safetensors"),
        out=str(tmp_path / "run"),
        device="cpu",
        per_device_train_batch_size=4,
        acoustic_tokens=40,
        renderer_batch_size=4,
        segment_tokens=20,
        logging_steps=1,
        eval_steps=1000,
        model=TINY,
    )
    return TrainVocoderConfig(**{**values, **changes})
