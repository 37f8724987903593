"""Speaker embeddings by Resemblyzer (GE2E): 256 numbers of unit norm that distinguish voices.

They serve as the speaker input of vocoder and decoder, and for the reported speaker similarity.
"""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.errors import AudioError
from dcar.sources.packages import resemblyzer_weights
from dcar.tokens.base import check_waveform, full_float32
from dcar.voices.features import LOUDNESS_DBFS
from dcar.voices.speech import without_silence

logger = logging.getLogger(__name__)

WINDOWS_HZ, LEAST_COVERAGE = 1.3, 0.75
"""Windows per second, and the share of the last one that must be audio: Resemblyzer's defaults."""
MOST_WINDOWS = 256
"""Largest number of windows that the network reads at once."""


class SpeakerEncoder:
    """Resemblyzer's LSTM encoder on the CPU (or `device`), its weights verified by digest.

    `windows` analyses a recording on the CPU, in any thread; `embed_windows` runs the network on
    the windows of many recordings at once. It computes in full float32 on any device.
    """

    name = "resemblyzer-0.1.4"

    def __init__(self, device: str = "cpu") -> None:
        weights = resemblyzer_weights()  # raises AssetError with the command to install it
        with warnings.catch_warnings():
            # resemblyzer imports names that scipy and pkg_resources deprecate
            warnings.simplefilter("ignore")
            import resemblyzer.audio
            from resemblyzer import VoiceEncoder
        self._audio: Any = resemblyzer.audio
        self.network: Any = VoiceEncoder(device=device, verbose=False, weights_fpath=weights)

    def embed(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return the embedding [256] float32, unit L2 norm, entries ≥ 0, of a float32 mono waveform
        [samples].

        Silence of more than a second is cut first, because Resemblyzer's voice detector takes room
        noise for speech. The level is raised to -30 dBFS and long pauses are cut as Resemblyzer
        does. If its voice detector finds no speech, the whole waveform is embedded and a warning is
        logged. Raises AudioError for an empty, silent, non-finite or non-mono waveform.
        """
        return self.embed_all([wave], [sample_rate])[0]

    def embed_all(self, waves: Sequence[np.ndarray], rates: Sequence[int]) -> np.ndarray:
        """Return the embeddings [B, 256] of waveforms with their rates in Hz; see `embed`."""
        return self.embed_windows(list(map(self.windows, waves, rates)))

    def windows(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return the network's input for a waveform, overlapping windows of its mel spectrum:
        float32 [N, 160, 40]. Raises AudioError as `embed` does."""
        wave = check_waveform(wave, "speaker encoder")
        if not np.abs(wave).max() > 1e-6:
            raise AudioError("speaker encoder: the waveform is silent; give a prompt with speech")
        wave = without_silence(
            resample(wave, sample_rate, ENCODER_SAMPLE_RATE), ENCODER_SAMPLE_RATE
        )
        wave = self._audio.normalize_volume(wave, LOUDNESS_DBFS, increase_only=True)
        wave = np.clip(wave, -1.0, 1.0)
        shortest = ENCODER_SAMPLE_RATE // 10
        voiced = wave[:0]
        if len(wave) >= shortest:
            voiced = self._audio.trim_long_silences(wave)
        if len(voiced) < shortest:
            seconds = len(wave) / ENCODER_SAMPLE_RATE
            logger.warning(
                "speaker encoder: no speech detected in %.2f s of audio; embedding all of it",
                seconds,
            )
            voiced = wave
        return self._mel_windows(voiced.astype(np.float32))

    def _mel_windows(self, wave: np.ndarray) -> np.ndarray:
        """Return the mel windows [N, 160, 40] of `VoiceEncoder.embed_utterance`."""
        parts, frames = self.network.compute_partial_slices(len(wave), WINDOWS_HZ, LEAST_COVERAGE)
        padded = np.pad(wave, (0, max(0, parts[-1].stop - len(wave))))
        mel = self._audio.wav_to_mel_spectrogram(padded)
        return np.stack([mel[window] for window in frames])

    def embed_windows(self, windows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the embeddings [B, 256] of the `windows` of B recordings: the mean over a
        recording's windows, scaled to unit norm; NaN for a recording without a usable spectrum."""
        parts = torch.from_numpy(np.concatenate(windows)).split(MOST_WINDOWS)
        with torch.inference_mode(), full_float32():
            embeddings = torch.cat([self.network(part.to(self.network.device)) for part in parts])
        ends = np.cumsum([len(part) for part in windows])[:-1]
        means = np.stack([part.mean(0) for part in np.split(embeddings.cpu().numpy(), ends)])
        return np.asarray(means / np.linalg.norm(means, axis=1, keepdims=True), dtype=np.float32)


def speaker_similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of two unit-norm embeddings [256], in 0..1."""
    return float(np.dot(a, b))
