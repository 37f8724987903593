"""Discriminators and losses that train the vocoder: HiFi-GAN's periods, Encodec/Vocos' resolutions, mel distance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from dcar.voices.features import LogMel, same_stft

Maps = list[Tensor]  # score map first, then the feature maps


class PeriodDiscriminator(nn.Module):
    """2-D convolutions over a wave folded at one period: [N, samples] -> maps. Kong et al. 2020, sec. 2.3."""

    def __init__(self, period: int, channels: Sequence[int]):
        super().__init__()
        self.period = period
        widths = [1, *channels]
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(a, b, (5, 1), (3 if i < len(channels) - 1 else 1, 1), (2, 0)))
            for i, (a, b) in enumerate(itertools.pairwise(widths))
        )
        self.score = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, wave: Tensor) -> Maps:
        x = F.pad(wave[:, None], (0, -wave.shape[-1] % self.period))
        x = x.unflatten(-1, (-1, self.period)).contiguous(memory_format=torch.channels_last)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return [self.score(x), *features]


class ResolutionDiscriminator(nn.Module):
    """2-D convolutions over complex STFTs of one window: [N, samples] -> maps. Défossez et al. 2022, sec. 3.4."""

    window: Tensor

    def __init__(self, n_fft: int, channels: int):
        super().__init__()
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(2 if i == 0 else channels, channels, (3, 9), (1, 1 if i == 0 else 2), (1, 4)))
            for i in range(4)
        )
        self.convs.append(weight_norm(nn.Conv2d(channels, channels, (3, 3), padding=1)))
        self.score = weight_norm(nn.Conv2d(channels, 1, (3, 3), padding=1))

    def forward(self, wave: Tensor) -> Maps:
        with torch.autocast(wave.device.type, enabled=False):
            n_fft = len(self.window)
            spectra = torch.view_as_real(same_stft(wave.float(), self.window, n_fft // 4))
            # compress: speech spectra span 60 dB, and the quiet part is where artefacts are heard
            scale = (spectra.square().sum(-1, keepdim=True) + 1e-6).pow(-0.25)
            x = (spectra * scale).permute(0, 3, 2, 1)  # [N, 2, frames, bins]
        x = x.contiguous(memory_format=torch.channels_last)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return [self.score(x), *features]


class Discriminators(nn.Module):
    """All of them on the same waves [N, samples] -> list of maps."""

    def __init__(self, periods: Sequence[int] = (2, 3, 5, 7, 11),
                 period_channels: Sequence[int] = (32, 64, 128, 256, 256),
                 resolutions: Sequence[int] = (2048, 1024, 512), resolution_channels: int = 32):
        super().__init__()
        self.members = nn.ModuleList(
            [PeriodDiscriminator(p, period_channels) for p in periods]
            + [ResolutionDiscriminator(n, resolution_channels) for n in resolutions]
        )
        for parameter in self.parameters():  # kernels in the layout of the inputs
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def forward(self, wave: Tensor) -> list[Maps]:
        return [member(wave) for member in self.members]


def discriminator_loss(maps: list[Maps]) -> Tensor:
    """Least squares, summed over discriminators; each map holds the real half of the batch, then the generated."""
    loss = torch.zeros((), device=maps[0][0].device)
    for score, *_ in maps:
        real, fake = score.float().chunk(2)
        loss = loss + (real - 1).square().mean() + fake.square().mean()
    return loss


def generator_losses(maps: list[Maps]) -> tuple[Tensor, Tensor]:
    """(adversarial, feature matching) of the generated half, summed over discriminators (mean over layers)."""
    adversarial = torch.zeros((), device=maps[0][0].device)
    matching = torch.zeros_like(adversarial)
    for score, *features in maps:
        adversarial = adversarial + (score.float().chunk(2)[1] - 1).square().mean()
        for feature in features:
            real, fake = feature.chunk(2)
            # relative to the real map's size, so that no layer dominates (Défossez et al. 2022, eq. 5)
            distance = (fake - real.detach()).abs().float().mean()
            matching = matching + distance / real.detach().abs().float().mean().clamp_min(1e-3) / len(features)
    return adversarial, matching


class MelDistance(nn.Module):
    """Mean absolute difference of log-mel spectra at three window lengths (natural log)."""

    def __init__(self, sample_rate: int, resolutions: Sequence[tuple[int, int]] = ((512, 40), (1024, 80), (2048, 100))):
        super().__init__()
        self.mels = nn.ModuleList(LogMel(sample_rate, n_fft, n_fft // 4, bands) for n_fft, bands in resolutions)

    def forward(self, fake: Tensor, real: Tensor) -> Tensor:
        return torch.stack([F.l1_loss(mel(fake), mel(real)) for mel in self.mels]).mean()
