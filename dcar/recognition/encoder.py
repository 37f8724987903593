"""Sound → words: a small CTC model of characters that reads the states of whisper-base's frozen
encoder.

A recogniser from nothing needs hundreds of hours of speech; on top of a trained encoder a few are
enough. Whisper's decoder takes no part: texts get likelihoods and alignments, and cost follows the
length of the audio. Trained by `launch/starter/train_recognizer.py`. CTC: Graves et al. (2006).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.config import check, setting
from dcar.errors import CheckpointError
from dcar.recognition.base import SHORTEST, to_recognizer_rate
from dcar.recognition.ctc import CTCRecognizer, WindowCTC, spelled
from dcar.sources.packages import WHISPER_BASE_SHA256
from dcar.tokens.whisper import MAX_SECONDS, SAMPLES_PER_TOKEN, WhisperEncoder

CHARACTERS = " abcdefghijklmnopqrstuvwxyz'"
"""Characters of the words of a text (`spoken_words`)."""
BLANK = 0
"""CTC's blank; the character at place c of the alphabet has the symbol c + 1."""
FRAME_SECONDS = SAMPLES_PER_TOKEN / ENCODER_SAMPLE_RATE
TAIL_SECONDS = 0.5
"""Silence behind every piece that the encoder reads, as for the shipped tokens."""
ENCODER = f"whisper-base {WHISPER_BASE_SHA256} tail={TAIL_SECONDS}"


@dataclass
class EncoderRecognizerConfig:
    """Shape of an encoder recogniser, and what it reads."""

    hidden_size: int = setting(256, "Width of the layers.", minimum=1)
    dilations: tuple[int, ...] = setting(
        (1, 2, 4, 8, 1, 2, 4, 8),
        "Of every layer, how far its window of three states reaches to either side.",
        minimum=1,
    )
    alphabet: str = setting(CHARACTERS, "Characters that it spells.")
    # so that states of another encoder are refused
    encoder: str = setting("", "Name and digest of the encoder; there is one, which empty means.")

    def __post_init__(self) -> None:
        check(self)
        self.encoder = self.encoder or ENCODER
        if self.encoder != ENCODER:
            raise CheckpointError(
                f"reads the states of {self.encoder}, but the encoder here is {ENCODER}; train a "
                "recogniser for it with `python -m launch.starter.train_recognizer`"
            )


class EncoderRecognizer(WindowCTC, CTCRecognizer):
    """See the module. The encoder runs on the CPU, waveform by waveform; what reads it, where
    its weights are."""

    config_class, model_type = EncoderRecognizerConfig, "dcar-encoder-recognizer"
    config: EncoderRecognizerConfig
    blank = BLANK

    def __init__(self, config: EncoderRecognizerConfig):
        super().__init__(config.hidden_size, config.dilations, len(config.alphabet) + 1)
        self.config, self.name = config, "encoder-ctc"
        self.encoder = WhisperEncoder(TAIL_SECONDS)
        self.states_norm = nn.LayerNorm(WhisperEncoder.state_size)
        self.states_in = nn.Linear(WhisperEncoder.state_size, config.hidden_size)

    def vectors(self, frames: Tensor) -> Tensor:
        """Of the encoder's states [B, T, 512]."""
        return self.states_in(self.states_norm(frames))

    def _log_probs(self, waves: list[np.ndarray], sample_rate: int) -> Iterator[tuple[int, Tensor]]:
        weight = self.output.weight
        for index, wave in enumerate(waves):
            states = torch.from_numpy(encoder_states(self.encoder, wave, sample_rate)).to(weight)
            with torch.inference_mode():
                yield (
                    index,
                    self.frames(states[None], torch.tensor([len(states)], device=weight.device))[
                        0
                    ].cpu(),
                )

    def spell(self, symbols: list[int]) -> str:
        return " ".join("".join(self.config.alphabet[s - 1] for s in symbols).split())

    def symbols(self, text: str) -> list[int]:
        return [place + 1 for place in spelled(text, self.config.alphabet, self.name)]


def state_count(samples: int) -> int:
    """States of a waveform of so many samples at 16 kHz."""
    return -(-max(samples, SHORTEST) // SAMPLES_PER_TOKEN)


def encoder_states(encoder: WhisperEncoder, wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """States [T, 512] float32 of a waveform of any length, T = ceil(seconds · 50): what is
    longer than the encoder's window is heard in pieces of 28 s. Raises AudioError for an empty
    or non-finite waveform."""
    wave = to_recognizer_rate(wave, sample_rate)
    piece = int(MAX_SECONDS - 1) * ENCODER_SAMPLE_RATE
    pieces = [wave[start : start + piece] for start in range(0, len(wave), piece)]
    return np.concatenate([encoder(one, ENCODER_SAMPLE_RATE) for one in pieces])


def load_encoder_recognizer(
    folder: str | Path, device: str = "cpu", name: str = ""
) -> EncoderRecognizer:
    """A recogniser that `launch/starter/train_recognizer.py` wrote, called by `name`, or its
    folder's, and its weights.

    Raises CheckpointError where the folder holds none.
    """
    recognizer = EncoderRecognizer.from_pretrained(folder, device)
    called = name or Path(folder).resolve().name
    recognizer.name = f"encoder-ctc:{called}@{recognizer.checksum()[:8]}"
    return recognizer
