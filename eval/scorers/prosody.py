"""How lively speech is: spread of its pitch, and its pauses.

Fewer word errors may be bought with monotony, which no recogniser hears. Neither number is better when it is larger:
read them against those of the recordings.
"""

from __future__ import annotations

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, resample

LOWEST, HIGHEST = 60.0, 500.0  # Hz, of voices
FRAME, HOP = 1024, 256  # samples at 16 kHz: 64 ms, 16 ms
FEWEST_VOICED = 10  # frames without which a spread is none
SILENT = 35.0  # dB below the loudest frame
SHORTEST_PAUSE = 0.2  # seconds; shorter silences are closures of consonants


class PitchSpread:
    """Standard deviation of the pitch in semitones over voiced frames, by librosa's pYIN (Mauch and Dixon 2014)."""

    name = "pitch spread"

    def __call__(self, wave: np.ndarray, sample_rate: int) -> float | None:
        """Of a float32 mono waveform [samples]; None where next to nothing is voiced."""
        import librosa

        audio = resample(wave, sample_rate, ENCODER_SAMPLE_RATE)
        if len(audio) < FRAME:
            return None
        pitch, voiced, _ = librosa.pyin(audio, fmin=LOWEST, fmax=HIGHEST, sr=ENCODER_SAMPLE_RATE, frame_length=FRAME,
                                        hop_length=HOP, resolution=0.25)
        heard = pitch[voiced]
        return None if len(heard) < FEWEST_VOICED else float(12 * np.log2(heard).std())


class Pauses:
    """Share of the time between the first and the last sound that is silent for 0.2 s or longer."""

    name = "pauses"

    def __call__(self, wave: np.ndarray, sample_rate: int) -> float | None:
        """Of a float32 mono waveform [samples], 0 to 1; None where nothing sounds."""
        import librosa

        if not np.abs(wave).max(initial=0.0) > 0:
            return None
        sounds = librosa.effects.split(wave, top_db=SILENT, frame_length=FRAME, hop_length=HOP)
        gaps = (sounds[1:, 0] - sounds[:-1, 1]) / sample_rate
        return float(gaps[gaps >= SHORTEST_PAUSE].sum() * sample_rate / (sounds[-1, 1] - sounds[0, 0]))
