"""Measures of a waveform besides its words: speaker similarity and noise quality.

Speaker similarity: cosine of Resemblyzer embeddings of the waveform and of the prompt (SECS). Noise
quality: DNSMOS P.835 overall (Reddy et al. 2022) and P.808 (Reddy et al. 2021). They predict how
listeners rate *noise-suppressed recordings*; they are no measure of naturalness.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.errors import AssetError, AudioError
from dcar.sources.hub import identified
from dcar.sources.packages import package_dir
from dcar.voices.encoder import SpeakerEncoder, speaker_similarity


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
