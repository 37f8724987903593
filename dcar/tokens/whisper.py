"""k-means over the encoder of whisper-base: the tokenizer that ships.

The encoder was trained to transcribe, so its states carry words more than voices: the same family as supervised
semantic (S3) tokens. Whisper therefore must not judge speech made from these codes; moonshine does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dcar.errors import CheckpointError
from dcar.sources.packages import WHISPER_BASE_SHA256, whisper_base_dir
from dcar.tokens.base import fitted, heard_by
from dcar.tokens.kmeans import KMeansTokenizer, fit_states, read_kmeans

SAMPLES_PER_TOKEN = 320
MAX_SECONDS = 29.0
"""Longest waveform that the encoder's 30 s of positions hold, with its trailing silence."""


class WhisperEncoder:
    """Final encoder states of whisper-base at 50 Hz, through faster-whisper / CTranslate2.

    Every waveform is encoded by itself, with the same trailing silence, at a cost proportional to its length
    (not padded to 30 s): batch composition can never change a state. float32 on the CPU.
    """

    state_size = 512

    def __init__(self, tail_seconds: float = 0.5, threads: int = 1) -> None:
        from faster_whisper import WhisperModel

        self.tail_tokens = round(tail_seconds * 50)
        self.model = WhisperModel(str(whisper_base_dir()), device="cpu", compute_type="float32", cpu_threads=threads)

    def __call__(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """States [T, 512] float32, T = `token_count(samples, sample_rate)`.

        Raises AudioError for an empty, non-finite or non-mono waveform and for one longer than MAX_SECONDS.
        """
        wave, tokens = heard_by("speech tokenizer", wave, sample_rate, MAX_SECONDS, SAMPLES_PER_TOKEN)
        wave = fitted(wave, (tokens + self.tail_tokens) * SAMPLES_PER_TOKEN)
        features = self.model.feature_extractor(wave, padding=0)
        states = np.asarray(self.model.encode(np.ascontiguousarray(features, dtype=np.float32)))
        return states[0, :tokens]


@lru_cache(maxsize=2)
def shared_encoder(tail_seconds: float, threads: int) -> WhisperEncoder:
    """One encoder per process and setting: it holds 290 MB."""
    return WhisperEncoder(tail_seconds, threads)


class WhisperKMeansTokenizer(KMeansTokenizer):
    """k-means codes of standardised whisper-base encoder states, 50 per second."""

    kind = "whisper-kmeans"
    rate_hz = 50.0
    encoder_sha256 = WHISPER_BASE_SHA256

    def __init__(self, centroids: np.ndarray, mean: np.ndarray, scale: np.ndarray, *,
                 name: str = "whisper-base-kmeans", tail_seconds: float = 0.5, threads: int = 1, **made: Any) -> None:
        """`mean`, `scale` [512] of the encoder states; `centroids` [V, 512], or [V, P] behind a projection [512, P].
        made: projection and provenance, where there are any."""
        super().__init__(centroids, mean, scale, state_size=WhisperEncoder.state_size, name=name, **made)
        self.tail_seconds, self.threads = tail_seconds, threads

    @property
    def encoder_identity(self) -> str:
        return f"{WHISPER_BASE_SHA256} tail={self.tail_seconds}"

    def states(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        return shared_encoder(self.tail_seconds, self.threads)(wave, sample_rate)

    def card(self) -> dict[str, Any]:
        return {"tail_seconds": self.tail_seconds, "encoder": "whisper-base, final encoder states (MIT)"}

    @classmethod
    def fit(cls, waves: Iterable[tuple[np.ndarray, int]], *, tail_seconds: float = 0.5, threads: int = 1,
            **settings: Any) -> WhisperKMeansTokenizer:
        """Fit the codes on a stream of (waveform, sample rate in Hz); settings: of `fit_states`."""
        fitted = fit_states(waves, shared_encoder(tail_seconds, threads), cls.rate_hz, **settings)
        return cls(**fitted, tail_seconds=tail_seconds, threads=threads)

    @classmethod
    def from_pretrained(cls, folder: str | Path, threads: int = 1) -> WhisperKMeansTokenizer:
        """Load what `save_pretrained` wrote.

        Raises CheckpointError if it is incomplete, altered or for another encoder.
        """
        folder = Path(folder)
        card, tensors = read_kmeans(folder)
        if card["type"] != cls.kind or card["encoder_sha256"] != WHISPER_BASE_SHA256 or "tail_seconds" not in card:
            raise CheckpointError(f"{folder}: made for encoder {card['type']} {card['encoder_sha256'][:12]}…, not "
                                  "whisper-kmeans on whisper-base")
        return cls(**tensors, name=card["name"], tail_seconds=card["tail_seconds"], threads=threads,
                   provenance=card.get("provenance")).as_stored(folder, card)
