"""Acoustic model of the vocoder: speech tokens of an utterance + a voice -> log-mel, F0 and
voicing. Also the parts that both networks of the vocoder share: its config, ConvNeXt blocks, and
the condition on the voice.

Speech tokens carry words but hardly any pitch or voice, so both come from the prompt. Every block
is modulated by the voice (`speaker_features`), smoothly, so that unseen voices interpolate, and F0
is predicted relative to the prompt's own mean and spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.errors import CheckpointError
from dcar.voices.features import EMBEDDING_DIM, SPEAKER_DIM

MEL_MEAN, MEL_SPREAD = -6.0, 2.0
"""Mean and spread of the log-mel of speech at its usual level (natural log of a magnitude)."""

EMBEDDING_SPREAD = 0.5
"""Standard deviation of the token embeddings at the start, whether drawn or taken from a
codebook."""


@dataclass(frozen=True)
class VocoderConfig:
    """Shape of a `TokenVocoder`; saved next to its weights."""

    vocab_size: int = 1024  # speech token ids 0 .. vocab_size - 1
    sample_rate: int = 24_000
    token_rate: int = 50
    hop: int = 240  # samples per frame; frames run at sample_rate / hop, a multiple of token_rate
    n_fft: int = 1024
    # Hann window, a multiple of hop, at least 3 hops so that its square overlap-adds to a constant
    window: int = 720
    mel_bands: int = 100
    speaker_dim: int = SPEAKER_DIM
    condition_size: int = 128
    acoustic_size: int = 256
    acoustic_ffn_size: int = 768
    # one ConvNeXt block each, at token rate
    acoustic_dilations: tuple[int, ...] = (1, 2, 4, 1, 2, 4, 1, 1)
    acoustic_dropout: float = 0.0  # of the blocks' inner layer, in training
    # share of tokens that are hidden from the acoustic model in training
    token_dropout: float = 0.0
    renderer_size: int = 256
    renderer_ffn_size: int = 768
    renderer_dilations: tuple[int, ...] = (1, 2, 1, 2)  # one ConvNeXt block each, at frame rate
    kernel_size: int = 7
    # tokens that calibrate the equaliser of a voice (dcar/vocoder/equalizer.py); () = no equaliser
    calibration_tokens: tuple[int, ...] = ()
    # checksum of the tokenizer whose ids the weights were trained on; "" = not recorded
    tokenizer_checksum: str = ""

    def __post_init__(self) -> None:
        for name in ("acoustic_dilations", "renderer_dilations", "calibration_tokens"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.sample_rate % (self.token_rate * self.hop):
            raise CheckpointError(
                f"vocoder config: hop {self.hop} does not divide the "
                f"{self.sample_rate}/{self.token_rate} samples of one token"
            )
        if self.window % self.hop or self.window < 3 * self.hop or self.window > self.n_fft:
            raise CheckpointError(
                f"vocoder config: window {self.window} must be a multiple of hop {self.hop}, at "
                f"least 3 hops, and at most n_fft {self.n_fft}"
            )

    @property
    def frames_per_token(self) -> int:
        return self.sample_rate // (self.token_rate * self.hop)

    @property
    def samples_per_token(self) -> int:
        return self.sample_rate // self.token_rate


class ConvNeXtBlock(nn.Module):
    """Depth-wise convolution, norm, two-layer MLP, scaled residual: [B, T, C] -> [B, T, C].

    A condition [B, condition_size], if given, scales and shifts the output of the norm. The
    activation is ReLU, because on a CPU GELU costs as much as the matrix products next to it.
    """

    def __init__(
        self,
        size: int,
        ffn_size: int,
        condition_size: int,
        kernel_size: int,
        dilation: int,
        layers: int,
        dropout: float = 0.0,
    ):
        super().__init__()
        padding = (kernel_size - 1) // 2 * dilation
        self.conv = nn.Conv1d(
            size, size, kernel_size, padding=padding, dilation=dilation, groups=size
        )
        self.norm = nn.LayerNorm(size, elementwise_affine=condition_size == 0, eps=1e-5)
        self.modulation = nn.Linear(condition_size, 2 * size) if condition_size else None
        self.up, self.down = nn.Linear(size, ffn_size), nn.Linear(ffn_size, size)
        self.dropout = nn.Dropout(dropout)
        self.residual_scale = nn.Parameter(torch.full((size,), 1.0 / layers))
        if self.modulation is not None:
            nn.init.normal_(self.modulation.weight, std=0.02)
            nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, mask: Tensor, condition: Tensor | None = None) -> Tensor:
        h = self.norm(self.conv((x * mask).transpose(1, 2)).transpose(1, 2))
        if self.modulation is not None:
            scale, shift = self.modulation(condition)[:, None].chunk(2, dim=-1)  # [B, 1, C] each
            h = torch.addcmul(shift, h, 1 + scale)
        y = self.down(self.dropout(F.relu(self.up(h))))
        return torch.addcmul(x, self.residual_scale, y)


def blocks(
    size: int,
    ffn_size: int,
    condition_size: int,
    kernel_size: int,
    dilations: Sequence[int],
    dropout: float = 0.0,
) -> nn.ModuleList:
    """Return one block per dilation."""
    layers = len(dilations)
    return nn.ModuleList(
        ConvNeXtBlock(size, ffn_size, condition_size, kernel_size, d, layers, dropout)
        for d in dilations
    )


class VoiceCondition(nn.Module):
    """Speaker features [B, 298] -> condition [B, condition_size], bounded, so that the effect of
    an unusual prompt is limited."""

    def __init__(self, config: VocoderConfig):
        super().__init__()
        size = config.condition_size
        self.layers = nn.Sequential(
            nn.Linear(config.speaker_dim, size), nn.SiLU(), nn.Linear(size, size), nn.Tanh()
        )

    def forward(self, speaker: Tensor) -> Tensor:
        embedding = speaker[:, :EMBEDDING_DIM] * 16.0  # unit norm over 256 values -> unit variance
        mean, spread = (speaker[:, 256:257] - 5.1) / 0.4, (speaker[:, 257:258] - 0.2) / 0.1
        envelope = speaker[:, 258:] / 2.0
        return self.layers(torch.cat([embedding, mean, spread, envelope], dim=1).clamp(-5.0, 5.0))


class Acoustics(NamedTuple):
    """Output of the acoustic model for B utterances of F frames."""

    log_mel: Tensor  # [B, F, bands] natural log of mel magnitudes, as from `LogMel`
    deviation: Tensor  # [B, F] of log F0 from the voice's mean, in units of its spread
    voicing: Tensor  # [B, F] logits
    # [B, T, acoustic_size] after the middle block; training predicts the encoder's states from it
    inner: Tensor


class AcousticModel(nn.Module):
    """ConvNeXt at token rate; every output position yields the frames of one token."""

    def __init__(self, config: VocoderConfig):
        super().__init__()
        self.frames_per_token, self.bands = config.frames_per_token, config.mel_bands
        size = config.acoustic_size
        self.condition = VoiceCondition(config)
        self.embedding = nn.Embedding(config.vocab_size, size)
        self.token_dropout = nn.Dropout1d(config.token_dropout)
        self.blocks = blocks(
            size,
            config.acoustic_ffn_size,
            config.condition_size,
            config.kernel_size,
            config.acoustic_dilations,
            config.acoustic_dropout,
        )
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, config.frames_per_token * (config.mel_bands + 2))
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_SPREAD)

    def forward(self, tokens: Tensor, mask: Tensor, speaker: Tensor) -> Acoustics:
        """Return the acoustics, in float32, of tokens [B, T] int64, mask [B, T] (1 = real token)
        and speaker [B, 298]."""
        condition, keep = self.condition(speaker), mask[..., None]
        # drops whole embeddings of tokens
        x = self.token_dropout(self.embedding(tokens))
        inner = x
        for i, block in enumerate(self.blocks):
            x = block(x, keep, condition)
            if i == len(self.blocks) // 2:
                inner = x
        out = (
            self.output(self.norm(x))
            .float()
            .unflatten(2, (self.frames_per_token, self.bands + 2))
            .flatten(1, 2)
        )
        return Acoustics(
            out[..., : self.bands] * MEL_SPREAD + MEL_MEAN, out[..., -2], out[..., -1], inner
        )


def pitch_statistics(speaker: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean [B, 1] and spread [B, 1] of log F0 from speaker features; the spread is
    clamped to a usable range."""
    return speaker[:, 256:257].float(), speaker[:, 257:258].float().clamp(0.05, 0.5)


def absolute_pitch(deviation: Tensor, speaker: Tensor) -> Tensor:
    """Return the natural log of F0 in Hz [B, F] from its deviation [B, F] and the voice, clamped
    to 50…600 Hz."""
    mean, spread = pitch_statistics(speaker)
    return (mean + spread * deviation.clamp(-3.0, 3.0)).clamp(math.log(50.0), math.log(600.0))
