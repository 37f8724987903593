"""Interface of speech tokenizers: waveform → discrete codes at a fixed rate."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.errors import AudioError

T = TypeVar("T")
BATCH_SECONDS, CPU_BATCH_SECONDS = 120.0, 0.0
"""Seconds of padded audio that an encoder reads at once. On a CPU it reads one waveform at a
time, because the activations of more do not fit into the caches (a HuBERT of 4 layers is half as
fast in batches of 40 s)."""


@runtime_checkable
class SpeechTokenizer(Protocol):
    """Attributes and methods that every tokenizer has."""

    name: str
    vocab_size: int
    rate_hz: float

    @property
    def checksum(self) -> str:
        """SHA-256 over everything that decides the codes; prepared data and checkpoints store
        it."""
        ...

    def encode(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        """Return codes [T] int64 in 0..vocab_size-1 for every float32 mono waveform [samples]; T
        = ceil(seconds · rate_hz)."""
        ...


@runtime_checkable
class LayeredTokenizer(SpeechTokenizer, Protocol):
    """Tokenizer that also encodes residual layers (`dcar.tokens.rvq.RVQCodec`).

    layers: number of codebooks of `vocab_size` codes each; the first one makes the speech tokens.
    sample_rate: rate in Hz of the waveforms that it encodes; others are resampled.
    """

    layers: int
    sample_rate: int

    def encode_layers(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        """Return codes [layers, T] int64 of every waveform; the first row is what `encode`
        returns."""
        ...


def input_rate(tokenizer: SpeechTokenizer) -> int:
    """Return the rate in Hz of the waveforms that a tokenizer reads: a codec's own rate,
    otherwise 16 kHz."""
    return tokenizer.sample_rate if isinstance(tokenizer, LayeredTokenizer) else ENCODER_SAMPLE_RATE


def check_waveform(wave: np.ndarray, where: str) -> np.ndarray:
    """Return `wave` as contiguous float32 [samples]. Raises AudioError, which begins with `where`,
    if it is not mono, empty or not finite."""
    array = np.ascontiguousarray(wave, dtype=np.float32)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise AudioError(f"{where}: a mono waveform [samples] of finite samples is required")
    return array


def encoder_input(
    where: str,
    wave: np.ndarray,
    sample_rate: int,
    max_seconds: float,
    hop: int,
    rate: int = ENCODER_SAMPLE_RATE,
) -> tuple[np.ndarray, int]:
    """Return a waveform [samples] at the `rate` that an encoder reads, and its number of tokens
    of `hop` samples, ceil(seconds · rate / hop). Raises AudioError as `check_waveform` does, and
    for more than max_seconds."""
    wave = check_waveform(wave, where)
    if (seconds := len(wave) / sample_rate) > max_seconds:
        raise AudioError(
            f"{where}: {seconds:.1f} s of audio are too long; cut the recording to at most "
            f"{max_seconds:g} s"
        )
    return resample(wave, sample_rate, rate), -(-len(wave) * rate // (sample_rate * hop))


def batch_samples(device: str, sample_rate: int) -> float:
    """Return the number of samples that an encoder on `device` reads at once; 0 means one
    waveform."""
    on_cpu = torch.device(device).type == "cpu"
    return (CPU_BATCH_SECONDS if on_cpu else BATCH_SECONDS) * sample_rate


def by_length(lengths: Sequence[int], most: float, equal: bool = False) -> Iterator[list[int]]:
    """Yield indices in order of length, in batches of at most `most` samples with their padding,
    or of a single waveform. With `equal`, only waveforms of the same length share a batch."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        full = (len(batch) + 1) * lengths[i] > most
        if batch and (full or (equal and lengths[i] != lengths[batch[0]])):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def in_batches(
    lengths: Sequence[int],
    most: float,
    read: Callable[[list[int]], Iterable[T]],
    equal: bool = False,
) -> list[T]:
    """Return the result for every index, in order. read: function that returns the results of the
    indices of one batch of `by_length`."""
    results: dict[int, T] = {}
    for rows in by_length(lengths, most, equal):
        results |= zip(rows, read(rows), strict=True)
    return [results[i] for i in range(len(lengths))]


def fitted(wave: np.ndarray, samples: int) -> np.ndarray:
    """Return `wave` cut, or padded with zeros, to `samples` samples."""
    return np.pad(wave[:samples], (0, max(0, samples - len(wave))))


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products, convolutions and recurrent layers on a GPU in full precision
    inside the block. In TF32, which cuDNN uses by default, codes would differ from those of a
    CPU."""
    cudnn: Any = torch.backends.cudnn
    parts: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    before = [part.fp32_precision for part in parts]
    try:
        for part in parts:
            part.fp32_precision = "ieee"
        yield
    finally:
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision
