"""Small CTC model of characters on the states of whisper-base's frozen encoder.

A recogniser trained from scratch needs hundreds of hours of speech; on top of a trained encoder a
few are enough. Whisper's decoder is not used: texts get likelihoods and alignments, and the cost is
proportional to the length of the audio. Trained by `launch/starter/train_recognizer.py`. CTC:
Graves et al. (2006).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.config import check, setting
from dcar.errors import CheckpointError
from dcar.recognition.base import SHORTEST, batches, to_recognizer_rate
from dcar.recognition.ctc import CTCRecognizer, WindowCTC, spelled
from dcar.sources.packages import WHISPER_BASE_SHA256
from dcar.tokens.whisper import MAX_SECONDS, SAMPLES_PER_TOKEN, WhisperEncoder

CHARACTERS = " abcdefghijklmnopqrstuvwxyz'"
"""Characters of a text's words (`spoken_words`)."""
BLANK = 0
"""CTC's blank; the character at index c of the alphabet has the symbol c + 1."""
FRAME_SECONDS = SAMPLES_PER_TOKEN / ENCODER_SAMPLE_RATE
TAIL_SECONDS = 0.5
"""Silence after every piece that the encoder reads, in seconds, as for the shipped tokens."""
PIECE_SECONDS = int(MAX_SECONDS - 1)
"""Longest piece of a waveform that the encoder reads at once."""
ENCODER = f"whisper-base {WHISPER_BASE_SHA256} tail={TAIL_SECONDS}"


@dataclass
class EncoderRecognizerConfig:
    """Shape of an encoder recogniser, and the encoder whose states it reads."""

    hidden_size: int = setting(256, "Width of the layers.", minimum=1)
    dilations: tuple[int, ...] = setting(
        (1, 2, 4, 8, 1, 2, 4, 8),
        "Reach of each layer's window of three states to either side, in states.",
        minimum=1,
        recorded=True,
    )
    alphabet: str = setting(CHARACTERS, "Characters of its transcripts.", recorded=True)
    # recorded, so that states of another encoder are rejected
    encoder: str = setting(
        "", "Name and digest of the encoder; empty for the only supported one.", recorded=True
    )

    def __post_init__(self) -> None:
        check(self)
        self.encoder = self.encoder or ENCODER
        if self.encoder != ENCODER:
            raise CheckpointError(
                f"encoder: the recogniser reads the states of {self.encoder}, but this version "
                f"has {ENCODER}; train a recogniser for it with `python -m "
                "launch.starter.train_recognizer`"
            )


class EncoderRecognizer(WindowCTC, CTCRecognizer):
    """CTC recogniser on whisper-base's encoder; see the module. The encoder runs on the device
    of the weights: one waveform at a time on the CPU, in batches on a GPU."""

    config_class, model_type = EncoderRecognizerConfig, "dcar-encoder-recognizer"
    config: EncoderRecognizerConfig
    blank = BLANK
    window_seconds = PIECE_SECONDS

    def __init__(self, config: EncoderRecognizerConfig):
        super().__init__(config.hidden_size, config.dilations, len(config.alphabet) + 1)
        self.config, self.name = config, "encoder-ctc"
        self.states_norm = nn.LayerNorm(WhisperEncoder.state_size)
        self.states_in = nn.Linear(WhisperEncoder.state_size, config.hidden_size)

    def vectors(self, frames: Tensor) -> Tensor:
        """Return the vectors [B, T, size] of the encoder's states [B, T, 512]."""
        return self.states_in(self.states_norm(frames))

    def _log_probs(self, waves: list[np.ndarray], sample_rate: int) -> Iterator[tuple[int, Tensor]]:
        weight = self.output.weight
        encoder = WhisperEncoder(TAIL_SECONDS, device=weight.device)
        ready = [to_recognizer_rate(wave, sample_rate) for wave in waves]
        for rows in batches(ready, weight.device):
            states = encoder_states(encoder, [ready[i] for i in rows], ENCODER_SAMPLE_RATE)
            lengths = [len(one) for one in states]
            with torch.inference_mode():
                padded = pad_sequence(states, batch_first=True).to(weight.dtype)
                log_probs = self.frames(padded, torch.tensor(lengths, device=weight.device)).cpu()
            for row, i in enumerate(rows):
                yield i, log_probs[row, : lengths[row]]

    @property
    def alphabet(self) -> str:
        return self.config.alphabet

    def spell(self, symbols: list[int]) -> str:
        return " ".join("".join(self.config.alphabet[s - 1] for s in symbols).split())

    def symbols(self, text: str) -> list[int]:
        return [place + 1 for place in spelled(text, self.config.alphabet, self.name)]


def state_count(samples: int) -> int:
    """Return the number of states of a waveform of `samples` samples at 16 kHz."""
    return -(-max(samples, SHORTEST) // SAMPLES_PER_TOKEN)


def encoder_states(
    encoder: WhisperEncoder, waves: Sequence[np.ndarray], sample_rate: int
) -> list[Tensor]:
    """Return the states [T, 512] float32 of waveforms of any length, T = ceil(seconds · 50).

    They are on the encoder's device. Longer waveforms are read in pieces of PIECE_SECONDS. Raises
    AudioError for an empty or non-finite waveform.
    """
    ready = [to_recognizer_rate(wave, sample_rate) for wave in waves]
    size = PIECE_SECONDS * ENCODER_SAMPLE_RATE
    pieces = [wave[start : start + size] for wave in ready for start in range(0, len(wave), size)]
    states = (
        torch.from_numpy(one) if isinstance(one, np.ndarray) else one
        for one in encoder.batch(pieces, ENCODER_SAMPLE_RATE)
    )
    return [torch.cat([next(states) for _ in range(0, len(wave), size)]) for wave in ready]


def load_encoder_recognizer(
    folder: str | Path, device: str = "cpu", name: str = ""
) -> EncoderRecognizer:
    """Load a recogniser that `launch/starter/train_recognizer.py` wrote.

    Its name consists of `name`, or else the folder's name, and the checksum of its weights. Raises
    CheckpointError if the folder contains no such recogniser.
    """
    recognizer = EncoderRecognizer.from_pretrained(folder, device)
    called = name or Path(folder).resolve().name
    recognizer.name = f"encoder-ctc:{called}@{recognizer.checksum()[:8]}"
    return recognizer
