"""What a synthesised waveform is measured by, besides the words: voice, noise, length.

Speaker similarity: cosine of Resemblyzer embeddings of the waveform and of the prompt (SECS).
Noise quality: DNSMOS P.835 overall (Reddy et al. 2022). It predicts how listeners rate *noise-suppressed recordings*;
it is no measure of naturalness.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.polynomial import Polynomial

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.errors import AssetError, AudioError
from dcar.sources.packages import package_dir
from dcar.voices.encoder import SpeakerEncoder, speaker_similarity


class SpeakerSimilarity:
    """Cosine between the voice of a waveform and the voice of its prompt."""

    def __init__(self, encoder: SpeakerEncoder | None = None) -> None:
        self.encoder = encoder or SpeakerEncoder()
        self.name = self.encoder.name

    def __call__(self, wave: np.ndarray, sample_rate: int, speaker: np.ndarray) -> float | None:
        """speaker: prompt features whose first 256 numbers are its embedding; None where the waveform is silent."""
        try:
            embedding = self.encoder.embed(wave, sample_rate)
        except AudioError:
            return None  # a silent output has no voice; the row counts how many had one
        return speaker_similarity(embedding, speaker[: len(embedding)])


class NoiseQuality:
    """DNSMOS P.835 overall score, 1 to 5, from the network that the package speechmos carries.

    The package itself evaluates a second network (P.808) that is not reported here, which doubles the cost; the
    window, the hop and the calibration are its own.
    """

    name = "dnsmos-p835-overall (speechmos)"
    sample_rate, window_seconds = ENCODER_SAMPLE_RATE, 9.01
    # P.835 overall raw score -> calibrated score (speechmos.dnsmos.DNSMOS.get_polyfit_val)
    calibration = Polynomial([0.04602535, 1.11546468, -0.06766283])

    def __init__(self, threads: int = 1) -> None:
        import onnxruntime

        path = Path(package_dir("speechmos", "pip install speechmos==0.0.1.1")) / "dnsmos_models" / "sig_bak_ovr.onnx"
        if not path.is_file():
            raise AssetError(f"{path}: the DNSMOS network is missing; run `pip install --force-reinstall speechmos`")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, wave: np.ndarray, sample_rate: int) -> float | None:
        """Score of a float32 mono waveform [samples]; None for an empty one. Short waveforms are repeated."""
        if len(wave) == 0:
            return None
        audio = np.clip(resample(wave, sample_rate, self.sample_rate), -1.0, 1.0).astype(np.float32)
        window = int(self.window_seconds * self.sample_rate)
        while len(audio) < window:
            audio = np.concatenate([audio, audio])
        hops = int(len(audio) // self.sample_rate - self.window_seconds) + 1
        starts = [h * self.sample_rate for h in range(hops)]
        pieces = [audio[s : int((s / self.sample_rate + self.window_seconds) * self.sample_rate)] for s in starts]
        raw = [self._session.run(None, {"input_1": p[None]})[0][0][2] for p in pieces if len(p) >= window]
        return float(np.mean([self.calibration(float(r)) for r in raw]))
