"""Voices: from a recording, or shipped."""

import difflib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open

from dcar.audio import ENCODER_SAMPLE_RATE, load_audio
from dcar.errors import AudioError, ConfigError
from dcar.sources.shipped import shipped
from dcar.tokens.base import input_rate
from dcar.vocoder.base import Recorded
from dcar.voices.features import level_dbfs, speaker_features
from dcar.voices.speech import SpeechPart, find_speech, most_speech

logger = logging.getLogger(__name__)

MIN_PROMPT_SECONDS = 1.0
MAX_PROMPT_SECONDS = 20  # longer prompts are not better
SPEECH_DBFS, QUIET_DBFS = -24.0, -45.0
"""Mean levels: of ordinary speech (the shipped corpus has -27 to -17), and below which a note
names a prompt."""


@dataclass
class Voice:
    """Prompt for decoder and vocoder: speech tokens, voice features [F], and a function that
    loads the recording."""

    tokens: tuple[int, ...]
    features: np.ndarray
    recording: Callable[[], Recorded] | None = None


def read_voice(path: str | Path, tokenizer, prompt_tokens: int = 50) -> Voice:
    """Load a prompt recording (any format and rate) and compute its voice features.

    Silence before and after the speech is removed, and of a recording longer than
    MAX_PROMPT_SECONDS only the first part with speech is read. The prompt is the middle of it, or
    the nearest stretch that is not a pause. A note states which part was used. Raises AudioError if
    there is less than a second.
    """
    from dcar.voices.encoder import SpeakerEncoder

    resampled, _ = load_audio(path, ENCODER_SAMPLE_RATE)
    encoded, encoded_rate = resampled, input_rate(tokenizer)
    if encoded_rate != ENCODER_SAMPLE_RATE:
        encoded, _ = load_audio(path, encoded_rate)
    wave, rate = load_audio(path)
    part = find_speech(wave, rate, MAX_PROMPT_SECONDS)
    if part.end - part.start < MIN_PROMPT_SECONDS:
        raise AudioError(
            f"{path}: the prompt lasts {part.end - part.start:.2f} s; give at least "
            f"{MIN_PROMPT_SECONDS:g} s of speech"
        )
    samples = len(wave)
    wave = part.cut(wave, rate)
    # tokens and embeddings depend on the level: quiet speech is raised to that of ordinary speech
    spoken = part.speech_of(len(wave), rate)
    level = level_dbfs(wave[spoken] if spoken.any() else wave)
    gain = max(1.0, 10 ** ((SPEECH_DBFS - level) / 20)) if np.any(wave) else 1.0
    wave = gain * wave
    resampled = gain * part.cut(resampled, ENCODER_SAMPLE_RATE)
    tokens = tokenizer.encode([gain * part.cut(encoded, encoded_rate)], encoded_rate)[0]
    middle = max(0, (len(tokens) - prompt_tokens) // 2)
    start = most_speech(part.speech_of(len(tokens), tokenizer.rate_hz), prompt_tokens, middle)
    if len(wave) < samples or start != middle:
        first = part.start + start / tokenizer.rate_hz
        logger.warning(
            "note: voice %s lasts %.1f s; %.1f to %.1f s of it are read, and %.1f to %.1f s are "
            "the prompt",
            path,
            samples / rate,
            part.start,
            part.end,
            first,
            min(part.end, first + prompt_tokens / tokenizer.rate_hz),
        )
    if level < QUIET_DBFS:
        logger.warning(
            "note: voice %s is quiet (%.0f dB of full scale): noise and rounding are a larger part "
            "of it than usual; a louder recording gives a better voice",
            path,
            level,
        )
    try:  # at its own rate: a voice has higher frequencies than encoders read
        features = speaker_features(
            wave, rate, SpeakerEncoder().embed(resampled, ENCODER_SAMPLE_RATE)
        )
    except AudioError as error:
        raise AudioError(f"{path}: {error}") from error
    return Voice(
        tuple(int(t) for t in tokens[start : start + prompt_tokens]),
        features,
        partial(_load, path, part, gain),
    )


def _load(path: str | Path, part: SpeechPart, gain: float) -> Recorded:
    wave, rate = load_audio(path)
    return gain * part.cut(wave, rate), rate


class ShippedVoices(NamedTuple):
    """Voices that ship, by name. unseen: those that the models were never trained on;
    tokenizer: checksum of the one whose tokens the prompts are."""

    voices: dict[str, Voice]
    unseen: frozenset[str]
    tokenizer: str


@cache
def shipped_voices() -> ShippedVoices:
    """Return the voices that ship (launch/starter/make_voices.py), the unseen ones first."""
    with safe_open(shipped("voices"), "numpy") as file:
        about = file.metadata()
        arrays = zip(file.get_tensor("tokens"), file.get_tensor("features"), strict=True)
        splits = json.loads(about["names"])
        voices = {
            name: Voice(tuple(tokens.tolist()), features)
            for name, (tokens, features) in zip(splits, arrays, strict=True)
        }
    unseen = frozenset(name for name, split in splits.items() if split == "test")
    return ShippedVoices(voices, unseen, about["tokenizer"])


def voices_text() -> str:
    """Return the shipped voices, one per line. Their names give the accent (a, American; b,
    British) and f or m."""
    lines = []
    voices, unseen, _ = shipped_voices()
    for name in voices:
        what = "the models were never trained on it" if name in unseen else "trained on"
        accent = {"a": "American", "b": "British"}[name[0]]
        kind = {"f": "woman", "m": "man"}[name[1]]
        lines.append(f"  {name:14} {accent + ' ' + kind:16} {what}")
    return "\n".join(
        [
            "voices that ship, for --voice NAME (the first is the default):",
            *lines,
            "or --voice RECORDING",
        ]
    )


def find_voice(named: str | Path, tokenizer) -> Voice:
    """Return the voice of a recording, or a shipped voice by its name. Raises ConfigError or
    AudioError if there is none."""
    path = Path(named)
    if path.is_dir():
        raise ConfigError(
            f"voice {named}: a folder; give one recording, for example {path}/NAME.wav. A folder "
            "of recordings can tune a decoder: see docs/your_voice.md"
        )
    if path.exists() or path.suffix or len(path.parts) > 1:
        try:
            return read_voice(path, tokenizer)
        except AudioError as error:
            raise AudioError(f"voice {error}") from error
    return shipped_voice(str(named), tokenizer)


def shipped_voice(name: str, tokenizer) -> Voice:
    """Return a shipped voice, "" = the first. Raises ConfigError if there is none with that
    name, or its tokens are those of another tokenizer."""
    voices, _, of_tokenizer = shipped_voices()
    if tokenizer.checksum != of_tokenizer:
        raise ConfigError(
            "the shipped voices are tokens of the shipped tokenizer, but this model has another: "
            "give --voice RECORDING.wav (in Python voice=)"
        )
    name = name or next(iter(voices))
    if name not in voices:
        near = difflib.get_close_matches(name, voices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"voice {name}: neither a shipped voice nor a recording; {hint}`dcar speak --voices` "
            "lists those that ship"
        )
    return voices[name]
