"""Tiny prepared corpora and a tiny vocoder, on disk in the real format."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import torch

from dcar.prepare.prepared import FORMAT_VERSION, features
from dcar.storage import digest, files_of
from dcar.text.english.inventory import PHONEME_VERSION, TEXT_VOCAB_SIZE
from dcar.tokens.kmeans import KMeansTokenizer
from dcar.tokens.whisper import WhisperEncoder
from dcar.vocoder.acoustic import VocoderConfig
from dcar.vocoder.model import TokenVocoder

CODES = 12


def noise(rng: np.random.Generator) -> list[int]:
    """Return speech without a pattern, 30 tokens."""
    return rng.integers(0, CODES, 30).tolist()


def counting(rng: np.random.Generator) -> list[int]:
    """Return speech that counts up from a random code, 12 to 32 tokens: everything but its end
    can be learned."""
    start, length = rng.integers(CODES), rng.integers(12, 33)
    return [int(start + t) % CODES for t in range(length)]


def one_text(tokens: list[int]) -> list[int]:
    """Return the same four phonemes for any tokens."""
    return [1, 2, 3, 4]


def tiny_split(
    split: str,
    count: int,
    speech: Callable[[np.random.Generator], list[int]] = noise,
    seed: int = 0,
    speakers: int = 2,
    text: Callable[[list[int]], list[int]] = one_text,
) -> datasets.Dataset:
    """Return made-up utterances of a few speakers with all columns of a prepared split."""
    rng = np.random.default_rng([seed, len(split), ord(split[0])])
    empty = {
        name: [] if isinstance(kind, datasets.List) else "" if kind.dtype == "string" else 1.0
        for name, kind in features(CODES).items()
    }
    rows = []
    for i in range(count):
        tokens = speech(rng)
        rows.append(
            {
                **empty,
                "id": f"{split}{i}",
                "text": "a red house",
                "speaker": f"s{i % speakers}",
                "text_ids": text(tokens),
                "speech": tokens,
                "voice": rng.normal(size=256 + 298)[256:].tolist(),
                "duration": len(tokens) / 50,
            }
        )
    return datasets.Dataset.from_list(rows, features=features(CODES))


def write_prepared(
    directory: Path,
    train: int = 8,
    dev: int = 4,
    tokenizer: str = "tiny",
    checksum: str = "abc",
    speech: Callable[[np.random.Generator], list[int]] = noise,
    spec: str = "none",
    speakers: int = 2,
    text: Callable[[list[int]], list[int]] = one_text,
) -> Path:
    """Write a prepared corpus of made-up utterances, in the layout of `dcar prepare`."""
    for split, count in (("train", train), ("dev", dev)):
        tiny_split(split, count, speech, speakers=speakers, text=text).save_to_disk(
            str(directory / split)
        )
    (directory / "prepared.json").write_text(
        json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "phonemes": {"version": PHONEME_VERSION, "size": TEXT_VOCAB_SIZE},
                "tokenizer": {
                    "name": tokenizer,
                    "checksum": checksum,
                    "vocab_size": CODES,
                    "rate_hz": 50.0,
                    "spec": spec,
                },
                "counts": {
                    "train": {"utterances": train, "seconds": 2.0 * train},
                    "dev": {"utterances": dev},
                },
                "corpus": {"kind": "none", "path": ""},
                "fingerprint": "none",
                "files": {name: digest(directory / name) for name in files_of(directory)},
            }
        )
    )
    return directory


def tiny_tokenizer(folder: Path) -> KMeansTokenizer:
    """Return a k-means tokenizer of random codes in four dimensions, saved in `folder`."""
    centroids = np.random.default_rng(3).standard_normal((CODES, 4)).astype(np.float32)
    tokenizer = KMeansTokenizer(
        WhisperEncoder(), centroids, np.zeros(512), np.ones(512), projection=np.eye(512, 4)
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_vocoder(calibration_tokens: tuple[int, ...] = ()) -> TokenVocoder:
    """Return a random vocoder that makes noise in milliseconds."""
    torch.manual_seed(0)
    return TokenVocoder(
        VocoderConfig(
            vocab_size=CODES,
            condition_size=8,
            mel_bands=20,
            acoustic_size=16,
            acoustic_ffn_size=16,
            acoustic_dilations=(1,),
            renderer_size=16,
            renderer_ffn_size=16,
            renderer_dilations=(1,),
            calibration_tokens=calibration_tokens,
        )
    )


def random_voice(seed: int = 0) -> np.ndarray:
    """Return the voice features [298] that a vocoder receives, with a human pitch."""
    voice = np.random.default_rng(seed).normal(size=298).astype(np.float32)
    voice[256:258] = 5.1, 0.2  # mean and spread of log F0
    return voice


class ToyTokenizer:
    """Tokenizer with one code per 20 ms: the number of sign changes, which depends on the pitch."""

    name, vocab_size, rate_hz, checksum = "toy", 64, 50.0, "sha-toy"

    def __init__(self, fail_after: int | None = None) -> None:
        self.batches: list[list[int]] = []
        self.fail_after = fail_after

    def encode(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        if self.fail_after is not None and len(self.batches) >= self.fail_after:
            raise KeyboardInterrupt
        self.batches.append([len(w) for w in waves])
        assert sample_rate == 16_000
        return [self._codes(w) for w in waves]

    def _codes(self, wave: np.ndarray) -> np.ndarray:
        frames = -(-len(wave) // 320)
        padded = np.pad(wave, (0, frames * 320 - len(wave))).reshape(frames, 320)
        return np.clip((np.diff(np.signbit(padded).astype(int), axis=1) != 0).sum(1), 0, 63).astype(
            np.int64
        )


class ToyLayers(ToyTokenizer):
    """Tokenizer with three layers at the rate of the recordings: the codes of `ToyTokenizer`,
    and these plus 1 and plus 2."""

    layers, sample_rate = 3, 16_000

    def encode_layers(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        steps = np.arange(self.layers)[:, None]
        return [(codes + steps) % self.vocab_size for codes in self.encode(waves, sample_rate)]


class ToyEncoder:
    name = "toy-voice"

    def windows(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        return np.abs(np.fft.rfft(wave, 1024))[:256]

    def embed_windows(self, windows: list[np.ndarray]) -> np.ndarray:
        return np.stack([w / np.linalg.norm(w) for w in windows]).astype(np.float32)
