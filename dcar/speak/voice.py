"""The voice to speak with: read from a recording, or one that ships."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, load_audio
from dcar.errors import AudioError
from dcar.sources.shipped import shipped
from dcar.vocoder.base import Recorded
from dcar.vocoder.model import speaker_features

MIN_PROMPT_SECONDS = 1.0


@dataclass
class Voice:
    """A prompt ready for decoder and vocoder: speech tokens, voice features [F], and what reads its recording."""

    tokens: tuple[int, ...]
    features: np.ndarray
    recording: Callable[[], Recorded] | None = None


def read_voice(path: str | Path, tokenizer, prompt_tokens: int = 50) -> Voice:
    """Load a prompt recording (any format and rate) and describe its voice. AudioError if it is under a second."""
    from dcar.voices.encoder import SpeakerEncoder

    heard, _ = load_audio(path, ENCODER_SAMPLE_RATE)
    wave, rate = load_audio(path)
    seconds = len(wave) / rate
    if seconds < MIN_PROMPT_SECONDS:
        raise AudioError(f"{path}: the prompt lasts {seconds:.2f} s; give at least {MIN_PROMPT_SECONDS:g} s of speech")
    wave, heard = wave[: 20 * rate], heard[: 20 * ENCODER_SAMPLE_RATE]
    tokens = tokenizer.encode([heard], ENCODER_SAMPLE_RATE)[0]
    start = max(0, (len(tokens) - prompt_tokens) // 2)
    # of the recording as it is: a voice has more than what encoders hear of it
    features = speaker_features(wave, rate, SpeakerEncoder().embed(heard, ENCODER_SAMPLE_RATE))
    return Voice(tuple(int(t) for t in tokens[start : start + prompt_tokens]), features, partial(load_audio, path))


def starter_voice() -> Voice:
    """The first unseen voice of the starter corpus."""
    return _voice_of(_unseen()[0])


def starter_voices() -> dict[str, Voice]:
    """The unseen voices of the starter corpus by the names of their speakers, each from its first utterance."""
    voices: dict[str, Voice] = {}
    for row in _unseen():
        if row["speaker"] not in voices:
            voices[row["speaker"]] = _voice_of(row)
    return voices


def _unseen() -> Any:
    """The rows of the starter corpus whose voices were never trained on."""
    from dcar.prepare.run import load_prepared

    return load_prepared(shipped("prepared"), "test")


def _voice_of(row: Mapping[str, Any]) -> Voice:
    return Voice(tuple(row["speech"][20:70]), np.asarray(row["voice"], np.float32))
