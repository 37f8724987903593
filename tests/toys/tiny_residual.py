"""Codec whose further layers are functions of its first one, the voice and the phoneme, and a
corpus of it."""

import json
from pathlib import Path

import datasets
import numpy as np
import torch
from tiny_data import write_prepared
from tones import chirp

from dcar.prepare.prepared import load_prepared
from dcar.storage import digest, files_of

LAYERS, CODES, VOICES, PHONEMES, SPAN = 4, 8, 3, 5, 3
"""Layers and codes of the codec; voices; phonemes 1 … PHONEMES of SPAN tokens each."""
_RNG = np.random.default_rng(5)
BY_VOICE = np.stack([_RNG.permutation(CODES) for _ in range(VOICES)])
BY_PHONEME = np.stack([_RNG.permutation(CODES) for _ in range(PHONEMES + 1)])
BOTH = np.stack([_RNG.permutation(CODES) for _ in range(CODES)])


def layered(first: np.ndarray, voice: int, phonemes: np.ndarray) -> np.ndarray:
    """Return all layers [LAYERS, T]: the second is a function of first layer and voice, the
    third of first layer and phoneme, the fourth of those two."""
    second = BY_VOICE[voice, first]
    third = BY_PHONEME[np.repeat(phonemes, SPAN)[: len(first)], first]
    return np.stack([first, second, third, BOTH[second, third]])


def utterance(rng: np.random.Generator, voice: int) -> tuple[list[int], np.ndarray]:
    """Return phonemes and all layers of an utterance."""
    phonemes = rng.integers(1, PHONEMES + 1, rng.integers(4, 9))
    return phonemes.tolist(), layered(rng.integers(0, CODES, SPAN * len(phonemes)), voice, phonemes)


class GeneratedCodec:
    """Codec whose voice is the loudness of a recording; a token becomes one sample per layer,
    code / 100."""

    name = "generated"
    vocab_size = CODES
    layers = LAYERS
    rate_hz = 50.0
    sample_rate = 50 * LAYERS
    checksum = "abc"

    def encode_layers(self, waves, rate: int) -> list[np.ndarray]:
        return [self._encode(wave, rate) for wave in waves]

    def _encode(self, wave: np.ndarray, rate: int) -> np.ndarray:
        rng = np.random.default_rng(len(wave))
        tokens = int(np.ceil(len(wave) / rate * self.rate_hz))
        phonemes = rng.integers(1, PHONEMES + 1, -(-tokens // SPAN))
        return layered(rng.integers(0, CODES, tokens), round(10 * np.abs(wave).max()) - 1, phonemes)

    def decode_layers(self, codes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return codes.transpose(1, 2).flatten(1) / 100


def recording(voice: int) -> tuple[np.ndarray, int]:
    wave = chirp(2.0, 3)
    return (voice + 1) / 10 * wave / np.abs(wave).max(), 24_000


def write_residual(folder: Path, train: int, dev: int, spec: str = "generated", **info) -> Path:
    """Write a prepared corpus of the codec; `info` changes what it records about its tokenizer."""
    write_prepared(folder, train=train, dev=dev, speakers=VOICES, spec=spec)
    for split in ("train", "dev"):
        rng = np.random.default_rng(len(split))
        rows = []
        for row in load_prepared(folder, split):
            text_ids, codes = utterance(rng, int(row["speaker"][1:]))
            rows.append(
                {
                    **row,
                    "text_ids": text_ids,
                    "speech": codes[0].tolist(),
                    "prompt_residual": [],
                    "residual": codes[1:].flatten().tolist(),
                }
            )
        (folder / split).rename(folder / f"{split}.old")
        codes_of = datasets.List(datasets.Value("uint16"))
        made = datasets.Dataset.from_list(
            rows,
            features=datasets.Features(
                {
                    **load_features(folder / f"{split}.old"),
                    "residual": codes_of,
                    "prompt_residual": codes_of,
                }
            ),
        )
        made.save_to_disk(str(folder / split))
        for file in (folder / f"{split}.old").iterdir():
            file.unlink()
        (folder / f"{split}.old").rmdir()
    written = json.loads((folder / "prepared.json").read_text())
    written["tokenizer"] |= {"name": "generated", "vocab_size": CODES, "layers": LAYERS, **info}
    (folder / "prepared.json").unlink()
    written["files"] = {name: digest(folder / name) for name in files_of(folder)}
    (folder / "prepared.json").write_text(json.dumps(written))
    return folder


def load_features(folder: Path) -> dict:
    return dict(datasets.Dataset.load_from_disk(str(folder)).features)
