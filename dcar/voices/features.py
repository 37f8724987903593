"""Signal features of the vocoder in plain torch: mel spectra, pitch tracks, speaker features.

Frames are "same"-padded: a wave of F·hop samples has exactly F frames, and frame f is centred on
sample hop·f + hop/2. Two 100 Hz frames therefore belong to one 50 Hz speech token, and four to one
25 Hz token, without a half-frame shift.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.audio import resample
from dcar.errors import AudioError

SAMPLE_RATE = 24_000
FRAME_HOP = 240  # 100 Hz
ENVELOPE_BANDS = 40
EMBEDDING_DIM = 256
SPEAKER_DIM = EMBEDDING_DIM + 2 + ENVELOPE_BANDS
MIN_F0_HZ, MAX_F0_HZ = 60.0, 500.0
MIN_VOICED_FRAMES = 10
LOUDNESS_DBFS = -30.0
"""Mean level to which quieter recordings are raised, by Resemblyzer's encoder too."""


@cache
def mel_filterbank(sample_rate: int, n_fft: int, n_mels: int) -> Tensor:
    """Return triangular filters on the HTK mel scale, of unit sum: [n_mels, n_fft // 2 + 1]."""
    bins = torch.linspace(0, sample_rate / 2, n_fft // 2 + 1, dtype=torch.float64)
    high = 2595 * math.log10(1 + sample_rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0.0, high, n_mels + 2, dtype=torch.float64) / 2595) - 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    filters = torch.minimum(rising, falling).clamp_min(0)
    # a narrow low filter may fall between two bins; it then reads the nearest one
    nearest = (edges[1:-1, None] - bins).abs().argmin(1)
    empty = filters.sum(1) == 0
    filters[empty, nearest[empty]] = 1.0
    return (filters / filters.sum(1, keepdim=True)).float()


class LogMel(nn.Module):
    """Natural-log mel magnitudes, [B, samples] -> [B, n_mels, frames], always in fp32."""

    filters: Tensor
    window: Tensor

    def __init__(self, sample_rate: int, n_fft: int, hop: int, n_mels: int) -> None:
        super().__init__()
        self.hop = hop
        self.register_buffer(
            "filters", mel_filterbank(sample_rate, n_fft, n_mels), persistent=False
        )
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)

    def forward(self, wave: Tensor) -> Tensor:
        with torch.autocast(wave.device.type, enabled=False):
            power = same_stft(wave.float(), self.window, self.hop).abs().square()
            magnitude = (power + 1e-10).sqrt()  # the square root has no gradient at zero
            return (self.filters @ magnitude).clamp_min(1e-5).log()


def same_stft(wave: Tensor, window: Tensor, hop: int) -> Tensor:
    """Return the complex spectra [B, n_fft // 2 + 1, samples // hop] of wave [B, samples], where
    n_fft = len(window)."""
    pad = (len(window) - hop) // 2
    wave = F.pad(wave, (pad, len(window) - hop - pad))
    return torch.stft(wave, len(window), hop, window=window, center=False, return_complex=True)


def same_istft(spectra: Tensor, window: Tensor, hop: int) -> Tensor:
    """Invert `same_stft` by overlap-add: [B, n_fft // 2 + 1, F] -> [B, F * hop].

    The squared window must overlap-add to a constant at this hop. That constant is the normaliser
    at every sample, including the ends, so a row's samples do not depend on frames padded after it.
    """
    n_fft, frames = len(window), spectra.shape[-1]
    pieces = torch.fft.irfft(spectra, n_fft, dim=1) * window[:, None]
    total = (frames - 1) * hop + n_fft
    wave = F.fold(pieces, (1, total), (1, n_fft), stride=(1, hop))[:, 0, 0]
    pad = (n_fft - hop) // 2
    return wave[:, pad : pad + frames * hop] * (hop / window.square().sum())


def track_f0(wave: Tensor) -> tuple[Tensor, Tensor]:
    """Track the pitch of one 24 kHz wave [samples] with YIN: (log_f0 [F], voiced bool [F]) at 100
    Hz, F = samples // 240.

    log_f0 is the natural logarithm of Hz, median-smoothed and interpolated through unvoiced
    stretches; log(150) if no frame is voiced. de Cheveigné & Kawahara 2002, eqs. 6 and 8, steps 4
    and 5, at 12 kHz.
    """
    frames, rate, hop, integration = len(wave) // FRAME_HOP, SAMPLE_RATE // 2, FRAME_HOP // 2, 384
    low_lag, high_lag = int(rate / MAX_F0_HZ), int(rate / MIN_F0_HZ)
    if frames == 0:
        return wave.new_zeros(0), torch.zeros(0, dtype=torch.bool, device=wave.device)
    halved = F.avg_pool1d(wave.float()[None, None], 2)[0, 0]
    size = integration + high_lag + 1
    left = (size - hop) // 2
    view = F.pad(halved, (left, size)).unfold(0, size, hop)[:frames]  # [F, size]
    view = view - view.mean(1, keepdim=True)
    # difference d(τ) = e(0) + e(τ) − 2 r(τ) over the integration window
    n_fft = 1 << (size + integration - 1).bit_length()
    spectrum = torch.fft.rfft(view, n_fft)
    correlation = torch.fft.irfft(
        spectrum * torch.fft.rfft(view[:, :integration], n_fft).conj(), n_fft
    )
    energy = F.pad(view.double().square().cumsum(1), (1, 0))
    lags = torch.arange(high_lag + 2, device=wave.device).clamp_max(size - integration)
    energy = (energy[:, lags + integration] - energy[:, lags]).float()
    difference = (energy[:, :1] + energy - 2 * correlation[:, lags]).clamp_min(0)
    mean = difference[:, 1:].cumsum(1) / torch.arange(1, high_lag + 2, device=wave.device)
    # [F, high_lag + 2]
    normalised = F.pad(difference[:, 1:] / mean.clamp_min(1e-9), (1, 0), value=1.0)
    inner = normalised[:, low_lag : high_lag + 1]
    dip = (inner <= normalised[:, low_lag - 1 : high_lag]) & (
        inner <= normalised[:, low_lag + 1 : high_lag + 2]
    )
    candidate = dip & (inner < 0.15)
    lag = torch.where(candidate.any(1), candidate.float().argmax(1), inner.argmin(1)) + low_lag
    before, at, after = (normalised.gather(1, (lag + s)[:, None])[:, 0] for s in (-1, 0, 1))
    curve = before + after - 2 * at
    shift = torch.where(curve > 1e-6, (before - after) / (2 * curve.clamp_min(1e-6)), 0).clamp(
        -0.5, 0.5
    )
    log_f0 = (rate / (lag + shift)).log()
    loudness = view.square().mean(1).sqrt()
    voiced = (at < 0.3) & (loudness > 0.03 * loudness.max()) & (loudness > 1e-4)
    return _smooth(log_f0.cpu().numpy(), voiced.cpu().numpy(), wave.device)


def _smooth(log_f0: np.ndarray, voiced: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Smooth a pitch track: median of five over voiced frames, octave slips and lone frames
    dropped, gaps interpolated."""
    frames = np.flatnonzero(voiced)
    if len(frames) >= 3:
        values = log_f0[frames]
        padded = np.pad(values, 2, mode="edge")
        values = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
        keep = np.abs(values - np.median(values)) < math.log(2.2)
        neighbours = np.convolve(voiced.astype(np.int64), np.ones(5, np.int64), "same")[frames]
        keep &= neighbours >= 3
        frames, values = frames[keep], values[keep]
    else:
        frames, values = frames[:0], log_f0[:0]
    voiced = np.zeros_like(voiced)
    voiced[frames] = True
    if len(frames):
        full = np.interp(np.arange(len(voiced)), frames, values)
    else:
        full = np.full(len(voiced), math.log(150.0))
    return torch.from_numpy(full.astype(np.float32)).to(device), torch.from_numpy(voiced).to(device)


def speaker_features(wave: np.ndarray, sample_rate: int, embedding: np.ndarray) -> np.ndarray:
    """Return the vocoder's features of a voice, from a prompt: float32 [298].

    `[0:256]` is the unit-norm speaker embedding, `[256:298]` the `prompt_statistics`. wave: float32
    [samples] at `sample_rate` Hz, at least about a second. Raises AudioError if the prompt has less
    than 0.1 s of voiced speech.
    """
    return with_embedding(embedding, prompt_statistics(wave, sample_rate))


def with_embedding(embedding: np.ndarray, statistics: np.ndarray) -> np.ndarray:
    """Return the features [298] of a voice from its speaker embedding [256] and its
    `prompt_statistics` [42]."""
    return np.concatenate([np.asarray(embedding, dtype=np.float32), statistics])


def level_dbfs(wave: np.ndarray) -> float:
    """Return the mean level of a waveform in dB of full scale; -inf for digital silence."""
    power = float(np.square(wave, dtype=np.float64).mean())
    return 10 * math.log10(power) if power else -math.inf


def raised(wave: np.ndarray) -> np.ndarray:
    """Return a waveform, raised to `LOUDNESS_DBFS` if it is quieter: what measures voices has
    absolute thresholds, below which quiet speech would be silence."""
    level = level_dbfs(wave)
    if not -math.inf < level < LOUDNESS_DBFS:
        return wave
    return np.asarray(wave * 10 ** ((LOUDNESS_DBFS - level) / 20), dtype=np.float32)


def prompt_statistics(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return pitch and spectral envelope of a voice, from a prompt [samples]: float32 [42].

    `[0]` is the mean and `[1]` the standard deviation of log F0 (Hz) over voiced frames; `[2:42]`
    is the mean log-mel envelope of voiced frames (40 bands, minus its own mean, so the prompt's
    level does not matter). Bands above what `sample_rate` can represent are set to the highest one
    below: their absence from a prompt of 16 kHz does not mean that they are silent. Raises
    AudioError if the prompt has less than 0.1 s of voiced speech.
    """
    wave = raised(resample(wave, sample_rate, SAMPLE_RATE))
    signal = torch.from_numpy(np.ascontiguousarray(wave))
    log_f0, voiced = track_f0(signal)
    if int(voiced.sum()) < MIN_VOICED_FRAMES:
        raise AudioError(
            f"prompt of {len(wave) / SAMPLE_RATE:.1f} s: has only {int(voiced.sum()) * 10} ms of "
            "voiced speech; use a prompt with at least a second of clear speech"
        )
    statistics = voice_statistics(signal, log_f0, voiced, sample_rate / 2)
    return np.asarray(statistics.numpy(), dtype=np.float32)


def voice_statistics(
    wave: Tensor, log_f0: Tensor, voiced: Tensor, top: float = SAMPLE_RATE / 2
) -> Tensor:
    """Return mean and standard deviation of log F0, then the mean log-mel envelope, over voiced
    frames: [42] (see `prompt_statistics`).

    wave [samples] at 24 kHz with its `track_f0`: log_f0 [F], voiced [F] with at least two true
    frames. top: highest frequency in Hz that the recording can contain.
    """
    mel = envelope_mel(wave.device)(wave[None])[0].T[: len(voiced)]  # [F, 40]
    envelope = mel[voiced].mean(0)
    first = bands_below(envelope_mel(wave.device).filters, SAMPLE_RATE, top)
    envelope = torch.cat([envelope[:first], envelope[first - 1].expand(ENVELOPE_BANDS - first)])
    pitch = torch.stack([log_f0[voiced].mean(), log_f0[voiced].std()])
    return torch.cat([pitch, envelope - envelope.mean()])


def bands_below(filters: Tensor, sample_rate: int, top: float) -> int:
    """Return the number of filters [bands, bins] of `mel_filterbank`, counted from the lowest,
    that lie below `top` Hz, the highest frequency in a signal at `sample_rate` Hz; all of them
    if `top` is at least half the rate."""
    if top >= sample_rate / 2:
        return len(filters)
    # in bins, just below the roll-off of the resampler
    edge = 0.95 * top * 2 * (filters.shape[1] - 1) / sample_rate
    return int((filters[:, math.ceil(edge) :].sum(1) > 0).float().argmax())


@cache
def envelope_mel(device: torch.device) -> LogMel:
    """Return the transform of spectral envelopes, one per device: waves at 24 kHz to 40 bands at
    100 frames per second."""
    return LogMel(SAMPLE_RATE, 1024, FRAME_HOP, ENVELOPE_BANDS).to(device)
