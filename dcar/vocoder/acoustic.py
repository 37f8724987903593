"""The acoustic model of the vocoder: speech tokens of an utterance + a voice -> log-mel, F0 and voicing.

Speech tokens carry words but hardly any pitch or voice, so both come from the prompt: every block is modulated by the
voice (`speaker_features`), smoothly, so that unseen voices interpolate, and F0 is predicted relative to the prompt's
own mean and spread.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, nn

from dcar.vocoder.blocks import VocoderConfig, VoiceCondition, blocks

MEL_MEAN, MEL_SPREAD = -6.0, 2.0
"""Speech at its usual level lies around here (natural log of a magnitude)."""

EMBEDDING_SPREAD = 0.5
"""Standard deviation of the token embeddings at the start, whether drawn or taken from a codebook."""


class Acoustics(NamedTuple):
    """What the acoustic model says of B utterances of F frames."""

    log_mel: Tensor  # [B, F, bands] natural log of mel magnitudes, as `LogMel` gives
    deviation: Tensor  # [B, F] of log F0 from the voice's mean, in units of its spread
    voicing: Tensor  # [B, F] logits
    inner: Tensor  # [B, T, acoustic_size] after the middle block, from which training asks for the encoder's states


class AcousticModel(nn.Module):
    """ConvNeXt at token rate; every output position gives the frames of one token."""

    def __init__(self, config: VocoderConfig):
        super().__init__()
        self.frames_per_token, self.bands = config.frames_per_token, config.mel_bands
        size = config.acoustic_size
        self.condition = VoiceCondition(config)
        self.embedding = nn.Embedding(config.vocab_size, size)
        self.token_dropout = nn.Dropout1d(config.token_dropout)
        self.blocks = blocks(size, config.acoustic_ffn_size, config.condition_size, config.kernel_size,
                             config.acoustic_dilations, config.acoustic_dropout)
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, config.frames_per_token * (config.mel_bands + 2))
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_SPREAD)

    def forward(self, tokens: Tensor, mask: Tensor, speaker: Tensor) -> Acoustics:
        """tokens [B, T] int64, mask [B, T] (1 = real token), speaker [B, 298]; the results are float32."""
        condition, keep = self.condition(speaker), mask[..., None]
        x = self.token_dropout(self.embedding(tokens))  # a token's whole embedding, or nothing of it
        inner = x
        for i, block in enumerate(self.blocks):
            x = block(x, keep, condition)
            if i == len(self.blocks) // 2:
                inner = x
        out = self.output(self.norm(x)).float().unflatten(2, (self.frames_per_token, self.bands + 2)).flatten(1, 2)
        return Acoustics(out[..., : self.bands] * MEL_SPREAD + MEL_MEAN, out[..., -2], out[..., -1], inner)


def pitch_statistics(speaker: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [B, 1] and spread [B, 1] of log F0 from speaker features; the spread is kept in a usable range."""
    return speaker[:, 256:257].float(), speaker[:, 257:258].float().clamp(0.05, 0.5)


def absolute_pitch(deviation: Tensor, speaker: Tensor) -> Tensor:
    """Natural log of F0 in Hz [B, F] from its deviation [B, F] and the voice, kept within 50…600 Hz."""
    mean, spread = pitch_statistics(speaker)
    return (mean + spread * deviation.clamp(-3.0, 3.0)).clamp(math.log(50.0), math.log(600.0))
