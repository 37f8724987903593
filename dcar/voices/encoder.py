"""Speaker embeddings by Resemblyzer (GE2E): 256 numbers of unit norm that tell voices apart.

Used twice: as the vocoder's and decoder's speaker input, and for the speaker similarity that is
reported.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.errors import AudioError
from dcar.sources.packages import resemblyzer_weights
from dcar.tokens.base import check_waveform
from dcar.voices.speech import without_silence

logger = logging.getLogger(__name__)

LOUDNESS_DBFS = -30


class SpeakerEncoder:
    """Resemblyzer's LSTM encoder on the CPU (or `device`), weights verified by digest."""

    name = "resemblyzer-0.1.4"

    def __init__(self, device: str = "cpu") -> None:
        weights = resemblyzer_weights()  # says how to get the package where it is missing
        with warnings.catch_warnings():
            # resemblyzer imports names that scipy and pkg_resources deprecate
            warnings.simplefilter("ignore")
            import resemblyzer.audio
            from resemblyzer import VoiceEncoder
        self._audio: Any = resemblyzer.audio
        self.network: Any = VoiceEncoder(device=device, verbose=False, weights_fpath=weights)

    def embed(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Embedding [256] float32, unit L2 norm, entries ≥ 0, of a float32 mono waveform [samples].

        Silence of more than a second is cut, because Resemblyzer's voice detector takes the noise
        of a room for speech. The level is raised to -30 dBFS and long pauses are cut as Resemblyzer
        does; where its voice detector finds no speech at all the whole waveform is embedded and a
        note is logged. Raises AudioError for an empty, silent, non-finite or non-mono waveform.
        """
        wave = check_waveform(wave, "speaker encoder")
        if not np.abs(wave).max() > 1e-6:
            raise AudioError("speaker encoder: the waveform is silent; give a prompt with speech")
        wave = without_silence(
            resample(wave, sample_rate, ENCODER_SAMPLE_RATE), ENCODER_SAMPLE_RATE
        )
        wave = self._audio.normalize_volume(wave, LOUDNESS_DBFS, increase_only=True)
        wave = np.clip(wave, -1.0, 1.0)
        voiced = (
            self._audio.trim_long_silences(wave)
            if len(wave) >= ENCODER_SAMPLE_RATE // 10
            else wave[:0]
        )
        if len(voiced) < ENCODER_SAMPLE_RATE // 10:
            seconds = len(wave) / ENCODER_SAMPLE_RATE
            logger.warning(
                "speaker encoder: no speech detected in %.2f s of audio; embedding all of it",
                seconds,
            )
            voiced = wave
        embedding = np.asarray(
            self.network.embed_utterance(voiced.astype(np.float32)), dtype=np.float32
        )
        if not np.isfinite(embedding).all():
            raise AudioError(
                "speaker encoder: the waveform has no usable spectrum; give a prompt with speech"
            )
        return embedding


def speaker_similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two unit-norm embeddings [256], in 0..1."""
    return float(np.dot(a, b))
