"""Measures of a waveform besides its words: speaker similarity, noise quality and liveliness.

Speaker similarity: cosine of Resemblyzer embeddings of the waveform and of the prompt (SECS). Noise
quality: DNSMOS P.835 overall (Reddy et al. 2022) and P.808 (Reddy et al. 2021). They predict how
listeners rate *noise-suppressed recordings*; they are no measure of naturalness. Liveliness: spread
of the pitch, and pauses. Fewer word errors may come with monotony, which no recogniser detects.
Neither number is better when it is larger: compare them with those of the recordings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.errors import AssetError, AudioError
from dcar.sources.hub import identified
from dcar.sources.packages import package_dir
from dcar.voices.encoder import SpeakerEncoder, speaker_similarity

LOWEST, HIGHEST = 60.0, 500.0  # Hz, pitch of voices
FRAME, HOP = 1024, 256  # samples at 16 kHz: 64 ms, 16 ms
FEWEST_VOICED = 10  # frames below which a spread has no meaning
SILENT = 35.0  # dB below the loudest frame
SHORTEST_PAUSE = 0.2  # seconds; shorter silences are closures of consonants


def onnx_session(path: Path) -> Any:
    """Load an ONNX network to run on one CPU core."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = 1, 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class SpeakerSimilarity:
    """Cosine between the voices of a waveform and of its prompt."""

    def __init__(self) -> None:
        self.encoder = SpeakerEncoder()
        self.name = self.encoder.name

    def __call__(self, wave: np.ndarray, sample_rate: int, speaker: np.ndarray) -> float | None:
        """Score a waveform [samples]; None if it is silent. speaker: prompt features, which
        begin with the embedding of the prompt's voice (256 numbers)."""
        try:
            embedding = self.encoder.embed(wave, sample_rate)
        except AudioError:
            return None  # the row of the table counts how many outputs had a voice
        return speaker_similarity(embedding, speaker[: len(embedding)])


class _DNSMOS:
    """Mean score of a network of the package speechmos over windows of 9.01 s that start every
    second.

    The package itself evaluates both networks; window, hop and calibration are the package's own.
    """

    name: str
    file: str
    sample_rate, window_seconds = ENCODER_SAMPLE_RATE, 9.01

    def __init__(self) -> None:
        package = package_dir("speechmos", "pip install speechmos==0.0.1.1")
        path = Path(package) / "dnsmos_models" / self.file
        if not path.is_file():
            raise AssetError(
                f"{path}: the DNSMOS network is missing; run `pip install --force-reinstall "
                "speechmos`"
            )
        self.name = identified(self.name, path)
        self._session = onnx_session(path)

    def rate(self, audio: np.ndarray) -> float:
        """Return the rating of one window [samples] float32."""
        raise NotImplementedError

    def run(self, inputs: np.ndarray) -> np.ndarray:
        """Return the outputs of the network for one input, [outputs]."""
        return self._session.run(None, {"input_1": inputs[None].astype(np.float32)})[0][0]

    def __call__(self, wave: np.ndarray, sample_rate: int) -> float | None:
        """Rate a float32 mono waveform [samples], which must not be empty. Short waveforms are
        repeated."""
        audio = resample(wave, sample_rate, self.sample_rate)
        audio = np.clip(audio, -1.0, 1.0).astype(np.float32)
        window = int(self.window_seconds * self.sample_rate)
        while len(audio) < window:
            audio = np.concatenate([audio, audio])
        hops = int(len(audio) // self.sample_rate - self.window_seconds) + 1
        starts = [h * self.sample_rate for h in range(hops)]
        ends = [int((h + self.window_seconds) * self.sample_rate) for h in range(hops)]
        pieces = [audio[start:end] for start, end in zip(starts, ends, strict=True)]
        return float(np.mean([self.rate(piece) for piece in pieces if len(piece) >= window]))


class NoiseQuality(_DNSMOS):
    """DNSMOS P.835 overall score, 1 to 5 (Reddy et al. 2022)."""

    name = "dnsmos-p835-overall (speechmos)"
    file = "sig_bak_ovr.onnx"
    # P.835 overall raw score -> calibrated score (speechmos.dnsmos.DNSMOS.get_polyfit_val)
    calibration = Polynomial([0.04602535, 1.11546468, -0.06766283])

    def rate(self, audio: np.ndarray) -> float:
        return self.calibration(float(self.run(audio)[2]))


class ListeningQuality(_DNSMOS):
    """DNSMOS P.808 score, 1 to 5 (Reddy et al. 2021): a single rating of the overall impression."""

    name = "dnsmos-p808 (speechmos)"
    file = "model_v8.onnx"

    def rate(self, audio: np.ndarray) -> float:
        import librosa

        mel = librosa.feature.melspectrogram(
            y=audio[:-160], sr=self.sample_rate, n_fft=321, hop_length=160, n_mels=120
        )
        return float(self.run((librosa.power_to_db(mel, ref=np.max).T + 40) / 40)[0])


class PitchSpread:
    """Standard deviation of the pitch in semitones over voiced frames, by librosa's pYIN (Mauch
    and Dixon 2014)."""

    name = "pitch spread"

    def __call__(self, wave: np.ndarray, sample_rate: int) -> float | None:
        """Return the spread of a float32 mono waveform [samples]; None if too few frames are
        voiced."""
        import librosa

        audio = resample(wave, sample_rate, ENCODER_SAMPLE_RATE)
        if len(audio) < FRAME:
            return None
        pitch, voiced, _ = librosa.pyin(
            audio,
            fmin=LOWEST,
            fmax=HIGHEST,
            sr=ENCODER_SAMPLE_RATE,
            frame_length=FRAME,
            hop_length=HOP,
            resolution=0.25,
        )
        pitch = pitch[voiced]
        return None if len(pitch) < FEWEST_VOICED else float(12 * np.log2(pitch).std())


class Pauses:
    """Share of the time between the first and the last sound that is silent for 0.2 s or longer."""

    name = "pauses"

    def __call__(self, wave: np.ndarray, sample_rate: int) -> float | None:
        """Return the share of a float32 mono waveform [samples], 0 to 1; None if all samples are
        0."""
        import librosa

        if not np.abs(wave).max(initial=0.0) > 0:
            return None
        sounds = librosa.effects.split(wave, top_db=SILENT, frame_length=FRAME, hop_length=HOP)
        gaps = (sounds[1:, 0] - sounds[:-1, 1]) / sample_rate
        return float(
            gaps[gaps >= SHORTEST_PAUSE].sum() * sample_rate / (sounds[-1, 1] - sounds[0, 0])
        )
