"""Renderer of the vocoder: log-mel + pitch -> waveform.

It does not draw spectra from scratch. Two signals are given, a band-limited pulse train at F0 and
white noise (NSF, Wang et al. 2019), and the mel spectrum gives the level of each band. For every
bin of every frame, the network adds the shares of pulse and noise in the band, the fine shape, and
the phase of the pulses. So its output resembles speech from the first step, and it learns little
that depends on a voice.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.vocoder.acoustic import MEL_MEAN, MEL_SPREAD, VocoderConfig, blocks
from dcar.voices.features import LogMel, mel_filterbank, same_istft, same_stft

PITCH_OCTAVES = 6


class Pitch(NamedTuple):
    """Pitch at frame rate."""

    log_f0: Tensor  # [B, F] natural log of Hz, defined everywhere
    voiced: Tensor  # [B, F] 0 or 1 (float)


class Renderer(nn.Module):
    """Log-mel frames and pitch to waveform; see the module docstring."""

    window: Tensor
    noise: Tensor
    interpolation: Tensor

    def __init__(self, config: VocoderConfig):
        super().__init__()
        self.config = config
        size, bins = config.renderer_size, config.n_fft // 2 + 1
        self.input = nn.Linear(config.mel_bands + 2 + 2 * PITCH_OCTAVES, size)
        self.blocks = blocks(
            size, config.renderer_ffn_size, 0, config.kernel_size, config.renderer_dilations
        )
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, 3 * bins)
        pad = (config.n_fft - config.window) // 2
        with torch.device("cpu"):  # even if the model is on the meta device, to be loaded
            window = torch.hann_window(config.window)
            window = F.pad(window, (pad, config.n_fft - config.window - pad))
            # Synthesis is deterministic: sample n of every utterance has the same noise in any
            # batch.
            noise = torch.randn(1 << 17, generator=torch.Generator().manual_seed(24_000))
            interpolation = band_interpolation(config)
            energy = float(torch.hann_window(config.n_fft).square().sum())
        self.register_buffer("window", window, persistent=False)
        self.register_buffer("noise", noise, persistent=False)
        self.register_buffer("interpolation", interpolation, persistent=False)
        nn.init.normal_(self.head.weight, std=0.02)
        # log-mel of a signal of unit power, such as the excitations
        unit = math.log(math.sqrt(energy) * math.sqrt(math.pi) / 2)
        with torch.no_grad():  # start with most of the power in the pulses
            pulse, phase, hiss = self.head.bias.chunk(3)
            pulse.fill_(-unit)
            phase.zero_()
            hiss.fill_(-unit - 1.5)

    def forward(
        self,
        log_mel: Tensor,
        pitch: Pitch,
        mask: Tensor,
        noise: Tensor | None = None,
        cycles: Tensor | None = None,
    ) -> Tensor:
        """Return the waveform [B, F * hop] of log_mel [B, F, bands] and pitch [B, F].

        mask [B, F] float, 1 for real frames (there may be zeros on both sides). noise and cycles
        (see `cycles`), both [B, F * hop]: by default those of whole utterances.
        """
        config, keep = self.config, mask[..., None]
        level = (log_mel - MEL_MEAN) / MEL_SPREAD
        x = self.input(torch.cat([level, pitch_features(pitch)], dim=-1))
        for block in self.blocks:
            x = block(x, keep)
        out = self.head(self.norm(x))
        with torch.autocast(out.device.type, enabled=False):  # phases and spectra need fp32
            # [B, bins, F]
            pulse_gain, phase_shift, noise_gain = (
                (out.float() * keep).transpose(1, 2).chunk(3, dim=1)
            )
            envelope = (log_mel.float() @ self.interpolation).transpose(1, 2)
            samples = mask.repeat_interleave(config.hop, dim=1).float()
            if noise is None:
                repeats = -(-samples.shape[1] // len(self.noise))
                noise = self.noise.repeat(repeats)[: samples.shape[1]].expand_as(samples)
            if cycles is None:
                cycles = self.cycles(pitch.log_f0)
            harmonics = (0.46 * config.sample_rate / pitch.log_f0.float().exp()).floor()
            harmonics = harmonics.repeat_interleave(config.hop, dim=1)
            pulses = pulse_train(cycles, harmonics) * samples
            pulse_spectra = same_stft(pulses, self.window, config.hop)
            noise_spectra = same_stft(noise * samples, self.window, config.hop)
            pulse_filter = torch.polar((envelope + pulse_gain).clamp(-20.0, 3.0).exp(), phase_shift)
            noise_filter = (envelope + noise_gain).clamp(-20.0, 3.0).exp()
            spectra = pulse_spectra * pulse_filter + noise_spectra * noise_filter
            return same_istft(spectra * keep.transpose(1, 2), self.window, config.hop)

    def cycles(self, log_f0: Tensor) -> Tensor:
        """Return the phase of the pulses after each sample, in cycles since the first, float64 [B,
        F * hop], at F0 [B, F]."""
        # F0 is linear between the centres of frames; phases are summed in float64
        line = F.interpolate(
            log_f0.float().exp()[:, None],
            scale_factor=float(self.config.hop),
            mode="linear",
            align_corners=False,
        )[:, 0]
        return (line.double() / self.config.sample_rate).cumsum(1)


def pulse_train(cycles: Tensor, harmonics: Tensor) -> Tensor:
    """Return pulses of unit power, given their phase in cycles and their number of harmonics K
    at every sample; both have the same shape."""
    angle = (2 * math.pi * (cycles - cycles.floor())).float()
    # Σ_{k=1..K} cos kθ = sin((K + ½)θ) / (2 sin ½θ) − ½, with its limit K near θ = 0
    half = torch.sin(angle / 2)
    near = (half.abs() < 1e-4).float()  # torch.where takes thirty times as long as a sum
    total = torch.sin((harmonics + 0.5) * angle) / (2 * (half + near)) - 0.5
    return torch.lerp(total, harmonics, near) * (2 / harmonics).sqrt()


def mel_transform(config: VocoderConfig) -> LogMel:
    """Return the log-mel transform between acoustic model and renderer."""
    return LogMel(config.sample_rate, config.n_fft, config.hop, config.mel_bands)


def band_interpolation(config: VocoderConfig) -> Tensor:
    """Return weights [bands, bins] that read a log-mel spectrum at every bin, linear between the
    bands' centres."""
    filters = mel_filterbank(config.sample_rate, config.n_fft, config.mel_bands)
    bins = torch.arange(filters.shape[1], dtype=torch.float32)
    centres = filters @ bins  # mean frequency of each filter, in bins
    right = torch.searchsorted(centres, bins).clamp(1, len(centres) - 1)
    share = (
        (bins - centres[right - 1]) / (centres[right] - centres[right - 1]).clamp_min(1e-6)
    ).clamp(0, 1)
    weights = torch.zeros_like(filters)
    weights[right - 1, bins.long()] = 1 - share
    weights[right, bins.long()] += share
    return weights


def pitch_features(pitch: Pitch) -> Tensor:
    """Return features [B, F, 14]: level of log F0, voicing, and six octave-spaced sines and
    cosines of log F0."""
    level = (pitch.log_f0.float()[..., None] - 5.1) / 0.4
    turns = level * (math.pi / 4 * 2.0 ** torch.arange(PITCH_OCTAVES, device=level.device))
    return torch.cat([level, pitch.voiced.float()[..., None], turns.sin(), turns.cos()], dim=-1)
