"""Read the manifests that `dcar prepare mode=resynthesize` writes: speech in one npz file, and its texts.

A manifest has one JSON object a line: {"audio": "train.npz", "key": "utt1", "text": "..."}. An npz file holds one mono
array per key, int16 or float32, and its `sample_rate`. Paths are relative to the manifest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.errors import AudioError, DataError
from dcar.recognition.ctc import frames_needed
from dcar.storage import json_lines
from dcar.text.readings import spoken_words
from dcar.tokens.base import check_waveform

logger = logging.getLogger(__name__)

MAX_TOO_SHORT = 0.05
"""Share of a manifest that may be too fast for CTC: quick speakers, not a wrong file."""


@dataclass(frozen=True)
class Recording:
    """One row of a manifest in memory: samples [n] int16 at 16 kHz and the words as they are spoken."""

    wave: np.ndarray
    text: str

    def samples(self) -> np.ndarray:
        """The wave as recognisers take it, [n] float32 in −1 … 1."""
        return self.wave.astype(np.float32) / 32768


def load_manifest(path: str | Path, frame_seconds: float) -> list[Recording]:
    """Read a manifest and its audio into memory (115 MB an hour).

    Rows whose audio is too short to align with their text, in frames of `frame_seconds`, are left out with a warning.
    Raises DataError, naming file and line, for a broken line, a text without words, missing audio, and where more than
    MAX_TOO_SHORT of the rows are too short.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: cannot be read (there is no such file); give a JSONL manifest")
    archives: dict[Path, Any] = {}
    recordings, too_short = [], []
    for where, row in json_lines(path, "a row of a manifest", "needs a JSON object with audio, key and text"):
        try:
            audio, key, text = path.parent / row["audio"], row["key"], spoken_words(row["text"])
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: needs a JSON object with audio, key and text ({error!r})") from error
        if not text:
            raise DataError(f"{where}: the text {row['text']!r} has no words; remove the line")
        try:
            if audio not in archives:
                archives[audio] = np.load(audio)
            samples, rate = archives[audio][key], int(archives[audio]["sample_rate"])
            wave = samples.astype(np.float32) / 32768 if samples.dtype == np.int16 else samples
            wave = resample(check_waveform(wave, where), rate, ENCODER_SAMPLE_RATE)
        except (OSError, KeyError, ValueError, AudioError) as error:
            raise DataError(f"{where}: audio cannot be used: {error}") from error
        if frames_needed(text) * frame_seconds > len(wave) / ENCODER_SAMPLE_RATE:
            too_short.append(f"{where}: {len(wave) / ENCODER_SAMPLE_RATE:.2f} s of audio are too short for {text!r}")
            continue
        recordings.append(Recording((np.clip(wave, -1, 1) * 32767).astype(np.int16), text))
    if len(too_short) > MAX_TOO_SHORT * (len(too_short) + len(recordings)):
        raise DataError(f"{len(too_short)} rows cannot be aligned; do audio and text belong together?\n"
                        + "\n".join(too_short[:20]))
    for message in too_short:
        logger.warning("%s; left out", message)
    if not recordings:
        raise DataError(f"{path}: the manifest has no rows")
    return recordings
