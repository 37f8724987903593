"""Speech tokenizers: waveform → discrete codes at a fixed rate.

`SpeechTokenizer` is the interface that every tokenizer implements (k-means over HuBERT, S3 …). The embedded
one, `WhisperKMeansTokenizer`, quantises the encoder states of whisper-base with k-means. The encoder was
trained to transcribe, so its states carry words more than voices: the same family as supervised semantic
(S3) tokens. Whisper therefore must not judge speech made from these codes; moonshine does.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dcar.audio import resample
from dcar.errors import AudioError, CheckpointError, ConfigError
from dcar.packages import WHISPER_BASE_SHA256, whisper_base_dir

logger = logging.getLogger(__name__)

ENCODER_SAMPLE_RATE = 16_000
SAMPLES_PER_TOKEN = 320
MAX_SECONDS = 29.0
"""Longest waveform that the encoder's 30 s of positions hold, with its trailing silence."""


@runtime_checkable
class SpeechTokenizer(Protocol):
    """What the rest of the project asks of a tokenizer."""

    name: str
    vocab_size: int
    rate_hz: float

    @property
    def checksum(self) -> str:
        """SHA-256 over everything that decides the codes; prepared data and checkpoints store it."""
        ...

    def encode(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        """Codes [T] int64 in 0..vocab_size-1 of every float32 mono waveform [samples]; T = ceil(seconds · rate_hz)."""
        ...


def token_count(samples: int, sample_rate: int, rate_hz: int = 50) -> int:
    """Number of tokens of a waveform: ceil(samples / sample_rate · rate_hz), in exact integer arithmetic."""
    return -(-samples * rate_hz // sample_rate)


def check_waveform(wave: np.ndarray, where: str) -> np.ndarray:
    """`wave` as contiguous float32 [samples]. Raises AudioError if it is not mono, is empty or not finite."""
    array = np.ascontiguousarray(wave, dtype=np.float32)
    if array.ndim != 1:
        raise AudioError(f"{where}: a mono waveform [samples] is needed, got shape {array.shape}; average the channels")
    if array.size == 0:
        raise AudioError(f"{where}: the waveform is empty; remove the utterance or check how it was cut")
    if not np.isfinite(array).all():
        raise AudioError(f"{where}: the waveform holds NaN or infinite samples; check how it was made")
    return array


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
        wave = check_waveform(wave, "speech tokenizer")
        seconds = len(wave) / sample_rate
        if seconds > MAX_SECONDS:
            raise AudioError(f"speech tokenizer: {seconds:.1f} s of audio; cut it to at most {MAX_SECONDS:.0f} s")
        tokens = token_count(len(wave), sample_rate)
        if sample_rate != ENCODER_SAMPLE_RATE:
            wave = resample(wave, sample_rate, ENCODER_SAMPLE_RATE)
        length = (tokens + self.tail_tokens) * SAMPLES_PER_TOKEN
        wave = np.pad(wave[:length], (0, max(0, length - len(wave))))
        features = self.model.feature_extractor(wave, padding=0)
        states = np.asarray(self.model.encode(np.ascontiguousarray(features, dtype=np.float32)))
        return states[0, :tokens]


@lru_cache(maxsize=2)
def shared_encoder(tail_seconds: float, threads: int) -> WhisperEncoder:
    """One encoder per process and setting: it holds 290 MB."""
    return WhisperEncoder(tail_seconds, threads)


class WhisperKMeansTokenizer:
    """k-means codes of standardised whisper-base encoder states, 50 per second.

    code = argmin_v || (state - mean) / scale - centroid_v ||², first index on ties.
    """

    rate_hz = 50.0

    def __init__(
        self,
        centroids: np.ndarray,
        mean: np.ndarray,
        scale: np.ndarray,
        *,
        name: str = "whisper-base-kmeans",
        tail_seconds: float = 0.5,
        threads: int = 1,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        """`centroids` [V, 512] in the standardised space; `mean`, `scale` [512] of the encoder states."""
        self.centroids = np.ascontiguousarray(centroids, dtype=np.float32)
        self.mean = np.ascontiguousarray(mean, dtype=np.float32)
        self.scale = np.ascontiguousarray(scale, dtype=np.float32)
        size = WhisperEncoder.state_size
        if self.centroids.ndim != 2 or self.centroids.shape[1] != size:
            raise CheckpointError(f"tokenizer centroids have shape {self.centroids.shape}, expected [codes, {size}]")
        if self.mean.shape != (size,) or self.scale.shape != (size,):
            raise CheckpointError(f"tokenizer mean and scale have shapes {self.mean.shape}, {self.scale.shape}")
        if not np.isfinite(self.centroids).all() or not (self.scale > 0).all() or not np.isfinite(self.mean).all():
            raise CheckpointError("tokenizer centroids, mean or scale hold NaN, infinite or non-positive values")
        self.name = name
        self.vocab_size = int(self.centroids.shape[0])
        self.tail_seconds = tail_seconds
        self.threads = threads
        self.provenance = dict(provenance or {})
        self._half_norms = 0.5 * (self.centroids.astype(np.float64) ** 2).sum(1)

    @property
    def checksum(self) -> str:
        """SHA-256 over everything that decides the codes: encoder, tail, mean, scale, centroids."""
        digest = hashlib.sha256(f"{WHISPER_BASE_SHA256} tail={self.tail_seconds}".encode())
        for array in (self.mean, self.scale, self.centroids):
            digest.update(array.astype("<f4").tobytes())
        return digest.hexdigest()

    def encode(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        """Codes [T] int64 of every waveform [samples] float32 mono; T = ceil(seconds · 50).

        A waveform's codes do not depend on the others. Raises AudioError (see `WhisperEncoder`).
        """
        encoder = shared_encoder(self.tail_seconds, self.threads)
        return [self.quantize(encoder(wave, sample_rate)) for wave in waves]

    def quantize(self, states: np.ndarray) -> np.ndarray:
        """Nearest centroid of every state: [T, 512] → [T] int64."""
        standardised = (states - self.mean) / self.scale
        # ||x - c||² = ||x||² - 2 (x·c - ||c||²/2); the first term does not depend on the code.
        return np.argmax(standardised @ self.centroids.T - self._half_norms, axis=1).astype(np.int64)

    @classmethod
    def fit(
        cls,
        waves: Iterable[tuple[np.ndarray, int]],
        *,
        vocab_size: int = 1024,
        max_frames: int = 200_000,
        seed: int = 0,
        standardize: bool = True,
        passes: int = 10,
        tail_seconds: float = 0.5,
        threads: int = 1,
        name: str = "whisper-base-kmeans",
    ) -> WhisperKMeansTokenizer:
        """Fit the codes on a stream of (waveform, sample rate in Hz) until `max_frames` states were read.

        Mini-batch k-means with k-means++ starts, `passes` times over the states, seeded. Raises ConfigError if
        the stream holds fewer than 4 states per code.
        """
        encoder = shared_encoder(tail_seconds, threads)
        collected: list[np.ndarray] = []
        frames = 0
        for wave, sample_rate in waves:
            collected.append(encoder(wave, sample_rate))
            frames += len(collected[-1])
            if frames >= max_frames:
                break
        states = np.concatenate(collected)[:max_frames] if collected else np.zeros((0, WhisperEncoder.state_size))
        logger.info("tokenizer: %d encoder states (%.1f minutes)", len(states), len(states) / 50 / 60)
        provenance = {"frames": len(states), "seed": seed, "standardize": standardize, "passes": passes}
        centroids, mean, scale = fit_centroids(states, vocab_size, seed, standardize, passes)
        return cls(centroids, mean, scale, name=name, tail_seconds=tail_seconds, threads=threads, provenance=provenance)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `tokenizer.safetensors` and `tokenizer.json` (rate, sizes, encoder digest, checksum).

        Raises CheckpointError if they cannot be written.
        """
        folder = Path(folder)
        tensors = {"centroids": self.centroids, "mean": self.mean, "scale": self.scale}
        card = {
            "type": "whisper-kmeans",
            "name": self.name,
            "vocab_size": self.vocab_size,
            "rate_hz": self.rate_hz,
            "sample_rate": ENCODER_SAMPLE_RATE,
            "tokens_per_waveform": "ceil(seconds * rate_hz)",
            "tail_seconds": self.tail_seconds,
            "encoder": "whisper-base, final encoder states (MIT)",
            "encoder_sha256": WHISPER_BASE_SHA256,
            "checksum": self.checksum,
            "provenance": self.provenance,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / "tokenizer.safetensors")
            (folder / "tokenizer.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: the tokenizer cannot be written ({error}); free some space") from error

    @classmethod
    def from_pretrained(cls, folder: str | Path, threads: int = 1) -> WhisperKMeansTokenizer:
        """Load what `save_pretrained` wrote.

        Raises CheckpointError if it is incomplete, altered or for another encoder.
        """
        folder = Path(folder)
        try:
            card = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "tokenizer.safetensors")
            centroids, mean, scale = tensors["centroids"], tensors["mean"], tensors["scale"]
            kind, name, tail, stored = card["type"], card["name"], card["tail_seconds"], card["checksum"]
            encoder = card["encoder_sha256"]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder}: not a complete speech tokenizer ({type(error).__name__}: {error}); "
                "make one with `dcar fit-tokenizer` or give the folder that it wrote"
            ) from error
        if kind != "whisper-kmeans" or encoder != WHISPER_BASE_SHA256:
            raise CheckpointError(
                f"{folder}: made for encoder {kind} {encoder[:12]}…, not whisper-kmeans on whisper-base"
            )
        tokenizer = cls(
            centroids,
            mean,
            scale,
            name=name,
            tail_seconds=tail,
            threads=threads,
            provenance=card.get("provenance"),
        )
        if tokenizer.checksum != stored:
            raise CheckpointError(
                f"{folder}: the centroids do not match the checksum in tokenizer.json; restore the folder"
            )
        return tokenizer


def fit_centroids(
    states: np.ndarray, vocab_size: int, seed: int, standardize: bool, passes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seeded mini-batch k-means over encoder states [N, D] → centroids [V, D], mean [D], scale [D].

    A few dimensions of the states are ten times larger than the rest; without standardisation they alone decide.
    """
    from sklearn.cluster import MiniBatchKMeans

    if len(states) < 4 * vocab_size:
        raise ConfigError(
            f"fit-tokenizer: {len(states)} encoder states ({len(states) / 50:.0f} s of speech) are too few for "
            f"{vocab_size} codes; give at least {4 * vocab_size // 50} s or fewer codes"
        )
    dimensions = states.shape[1]
    mean = states.mean(0) if standardize else np.zeros(dimensions, np.float32)
    scale = states.std(0) + 1e-6 if standardize else np.ones(dimensions, np.float32)
    kmeans = MiniBatchKMeans(
        n_clusters=vocab_size,
        batch_size=max(4096, 4 * vocab_size),
        max_iter=passes,
        max_no_improvement=None,
        init_size=min(len(states), max(20 * vocab_size, 4096)),
        n_init=1,
        random_state=seed,
    )
    kmeans.fit(((states - mean) / scale).astype(np.float32))
    return kmeans.cluster_centers_.astype(np.float32), mean.astype(np.float32), scale.astype(np.float32)


SHIPPED_TOKENIZER = Path(__file__).parent / "assets" / "tokenizer"


def load_tokenizer(name_or_dir: str | Path = "starter", threads: int = 1) -> WhisperKMeansTokenizer:
    """A tokenizer by name (`starter`, the one that ships with the project) or by the folder it was saved in."""
    folder = SHIPPED_TOKENIZER if str(name_or_dir) == "starter" else Path(name_or_dir)
    return WhisperKMeansTokenizer.from_pretrained(folder, threads=threads)
