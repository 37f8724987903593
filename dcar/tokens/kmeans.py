"""k-means speech tokenizers: codes of the states of any encoder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.errors import ConfigError
from dcar.process import one_ahead
from dcar.storage import write_text, writing
from dcar.tokens.base import full_float32
from dcar.tokens.codebook import FORMAT_VERSION

logger = logging.getLogger(__name__)

States = Any
"""Encoder states and values computed from them: a NumPy array, or a tensor on the encoder's
device."""
PASSES = 10  # of k-means over the states
FIT_BATCH = 32
"""Number of waveforms that `KMeansTokenizer.fit` encodes at once."""


class StateEncoder(Protocol):
    """Encoder from audio to states, and its description for tokenizer.json."""

    kind: str  # kind of the tokenizer, "type" in its card
    name: str
    rate_hz: float
    state_size: int
    sha256: str
    max_seconds: float  # longest waveform that it reads

    @property
    def identity(self) -> str:
        """Everything about the encoder that decides the codes."""
        ...

    def card(self) -> dict[str, Any]:
        """Return the settings in tokenizer.json from which the encoder can be built again."""
        ...

    def __call__(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return the states [T, state_size] float32 of one waveform, T = ceil(seconds ·
        rate_hz)."""
        ...

    def batch(self, waves: Sequence[np.ndarray], sample_rate: int) -> Sequence[States]:
        """Return the states [T, state_size] float32 of every waveform, as arrays or as tensors
        on the encoder's device, equal to those of single waveforms up to rounding."""
        ...


class KMeansTokenizer:
    """Tokenizer whose codes are the k-means clusters of an encoder's standardised states.

    code = argmin_v || (state - mean) / scale - centroid_v ||², the first index on ties; a
    projection, if there is one, multiplies the standardised state first (`dcar.tokens.fit`). NumPy
    quantises arrays; tensors are quantised on their device, in full float32. The codes of both
    differ only if two centroids are equally near up to rounding, 1e-5 of the squared norms.
    """

    def __init__(
        self,
        encoder: StateEncoder,
        centroids: np.ndarray,
        mean: np.ndarray,
        scale: np.ndarray,
        *,
        name: str = "",
        provenance: dict[str, Any] | None = None,
        projection: np.ndarray | None = None,
    ) -> None:
        """Store the encoder and the fitted arrays: `mean` and `scale` [D] of the encoder's
        states; `centroids` [V, D] in the standardised space, or [V, P] after a `projection` [D,
        P]."""
        self.projection: np.ndarray | None = None
        if projection is not None:
            self.projection = np.ascontiguousarray(projection, dtype=np.float32)
        self.centroids, self.mean, self.scale = (
            np.ascontiguousarray(fitted, dtype=np.float32) for fitted in (centroids, mean, scale)
        )
        self.encoder, self.rate_hz = encoder, encoder.rate_hz
        self.max_seconds = encoder.max_seconds
        self.name = name or f"{encoder.name}-kmeans"
        self.vocab_size = int(self.centroids.shape[0])
        self.provenance = dict(provenance or {})
        half_norms = 0.5 * (self.centroids.astype(np.float64) ** 2).sum(1)
        self._arrays = self.mean, self.scale, self.projection, self.centroids, half_norms
        self._tensors: dict[torch.device, tuple[Tensor | None, ...]] = {}

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Fitted arrays by name, in the order of the checksum."""
        fitted = {"mean": self.mean, "scale": self.scale, "centroids": self.centroids}
        return fitted if self.projection is None else {**fitted, "projection": self.projection}

    @property
    def checksum(self) -> str:
        """SHA-256 over everything that decides the codes: encoder, mean, scale, centroids,
        projection if any."""
        digest = hashlib.sha256(self.encoder.identity.encode())
        for array in self.tensors.values():
            digest.update(array.astype("<f4").tobytes())
        return digest.hexdigest()

    def projected(self, projection: np.ndarray, centroids: np.ndarray) -> KMeansTokenizer:
        """Return this tokenizer with other codes: centroids [V, P] of standardised states times
        projection [D, P]."""
        return KMeansTokenizer(
            self.encoder,
            centroids,
            self.mean,
            self.scale,
            name=self.name,
            provenance=self.provenance,
            projection=projection,
        )

    def encode(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        """Return codes [T] int64 of every waveform [samples] float32 mono; T = ceil(seconds ·
        rate_hz).

        A waveform's codes do not depend on the other waveforms, except for rounding in an encoder
        that pads batches. Raises AudioError (see the encoder).
        """
        codes = [self.quantize(states) for states in self.encoder.batch(waves, sample_rate)]
        return [c.cpu().numpy() if isinstance(c, Tensor) else c for c in codes]

    def coordinates(self, states: States) -> States:
        """Return states [T, D] in the space of the centroids [T, P]: standardised and, if there
        is a projection, projected."""
        mean, scale, projection, _, _ = self._parameters(states)
        with full_float32():
            standardised = (states - mean) / scale
            return standardised if projection is None else standardised @ projection

    def quantize(self, states: States) -> States:
        """Return the code of every state: [T, D] → [T] int64."""
        return self.nearest(self.coordinates(states))

    def nearest(self, coordinates: States) -> States:
        """Return the code of every point in the space of the centroids: [T, P] → [T] int64."""
        _, _, _, centroids, half_norms = self._parameters(coordinates)
        # ||x - c||² = ||x||² - 2 (x·c - ||c||²/2); the first term does not depend on the code
        with full_float32():
            return (coordinates @ centroids.T - half_norms).argmax(1)

    def _parameters(self, states: States) -> tuple[Any, ...]:
        """Return mean, scale, projection, centroids and half of their squared norms (float64), as
        arrays for an array, or as tensors on the device of a tensor."""
        if not isinstance(states, Tensor):
            return self._arrays
        if states.device not in self._tensors:
            self._tensors[states.device] = tuple(
                None if array is None else torch.from_numpy(array).to(states.device)
                for array in self._arrays
            )
        return self._tensors[states.device]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `tokenizer.safetensors` and `tokenizer.json` (rate, sizes, encoder digest,
        checksum)."""
        folder = Path(folder)
        card = {
            "format_version": FORMAT_VERSION,
            "type": self.encoder.kind,
            "name": self.name,
            "vocab_size": self.vocab_size,
            "rate_hz": self.rate_hz,
            "sample_rate": ENCODER_SAMPLE_RATE,
            "tokens_per_waveform": "ceil(seconds * rate_hz)",
            **self.encoder.card(),
            "encoder_sha256": self.encoder.sha256,
            "checksum": self.checksum,
            "provenance": self.provenance,
        }
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self.tensors, folder / "tokenizer.safetensors")
            write_text(folder / "tokenizer.json", json.dumps(card, indent=2) + "\n")

    @classmethod
    def fit(
        cls,
        waves: Iterable[tuple[np.ndarray, int]],
        encoder: StateEncoder,
        *,
        vocab_size: int = 1024,
        max_frames: int = 200_000,
        seed: int = 0,
        standardize: bool = True,
        sample_hours: float | None = None,
    ) -> Self:
        """Return a tokenizer fitted on a stream of (waveform, sample rate in Hz).

        At most `max_frames` states are used. Without `sample_hours` they are the first of the
        stream. With it, that many hours of the stream are read, and the same share of the states of
        every waveform is kept, drawn by `seed`: many voices in little memory (the states of the
        papers' 73 hours of HuBERT-Large would take 54 GB).

        The fit is mini-batch k-means with k-means++ starts, PASSES times over the states, seeded.
        Raises ConfigError if the stream has fewer than 4 states per code.
        """
        draw = np.random.default_rng([seed, 1])
        share, longest = 1.0, float("inf")  # longest: seconds of the stream to read
        if sample_hours is not None:
            longest = sample_hours * 3600
            share = min(1.0, max_frames / (longest * encoder.rate_hz))
        collected: list[np.ndarray] = [np.zeros((0, encoder.state_size), np.float32)]
        frames, seconds = 0, 0.0
        for wave, sample_rate, states in states_of(waves, encoder):
            if share < 1:
                states = states[draw.random(len(states)) < share]
            collected.append(states)
            frames, seconds = frames + len(states), seconds + len(wave) / sample_rate
            if frames >= max_frames or seconds >= longest:
                break
        logger.info("tokenizer: %d encoder states of %.1f minutes", frames, seconds / 60)
        states = np.concatenate(collected)[:max_frames]
        return cls(
            encoder,
            *fit_centroids(states, vocab_size, seed, standardize),
            provenance={
                "frames": len(states),
                "seed": seed,
                "standardize": standardize,
                "passes": PASSES,
                "sample_hours": sample_hours,
            },
        )


def states_of(
    waves: Iterable[tuple[np.ndarray, int]], encoder: StateEncoder
) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """Yield each waveform with its rate and its encoder states [T, D], in the order of the stream.

    FIT_BATCH waveforms of one rate are encoded at once, while the next ones are read in a thread.
    """
    for batch, sample_rate in one_ahead(of_one_rate(waves)):
        for wave, states in zip(batch, encoder.batch(batch, sample_rate), strict=True):
            array = states.cpu().numpy() if isinstance(states, Tensor) else states
            yield wave, sample_rate, array


def of_one_rate(waves: Iterable[tuple[np.ndarray, int]]) -> Iterator[tuple[list[np.ndarray], int]]:
    """Yield batches of consecutive waveforms with their common rate."""
    for sample_rate, group in groupby(waves, key=lambda pair: pair[1]):
        while batch := [wave for wave, _ in islice(group, FIT_BATCH)]:
            yield batch, sample_rate


def fit_centroids(
    states: np.ndarray, vocab_size: int, seed: int, standardize: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit seeded mini-batch k-means to encoder states [N, D]: centroids [V, D], mean [D], scale
    [D].

    A few dimensions of the states are ten times larger than the rest; without standardisation they
    alone would decide. Raises ConfigError for fewer than 4 states per code.
    """
    from sklearn.cluster import MiniBatchKMeans

    if len(states) < 4 * vocab_size:
        raise ConfigError(
            f"fit-tokenizer: {len(states)} encoder states ({len(states) / 50:.0f} s at 50 Hz) are "
            f"too few for vocab_size={vocab_size}; give at least {4 * vocab_size // 50} s of "
            "audio, or a smaller vocab_size"
        )
    dimensions = states.shape[1]
    mean = states.mean(0) if standardize else np.zeros(dimensions, np.float32)
    scale = states.std(0) + 1e-6 if standardize else np.ones(dimensions, np.float32)
    kmeans = MiniBatchKMeans(
        n_clusters=vocab_size,
        batch_size=max(4096, 4 * vocab_size),
        max_iter=PASSES,
        max_no_improvement=None,
        init_size=min(len(states), max(20 * vocab_size, 4096)),
        n_init=1,
        random_state=seed,
    )
    kmeans.fit(((states - mean) / scale).astype(np.float32))
    return (
        kmeans.cluster_centers_.astype(np.float32),
        mean.astype(np.float32),
        scale.astype(np.float32),
    )
