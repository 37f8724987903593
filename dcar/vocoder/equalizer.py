"""Equaliser: gives synthesised speech the long-term spectrum of the prompt, even for voices that
are new to the acoustic model.

An acoustic model trained on few voices draws a new voice towards those. The deviation can be
measured without any recording: synthesise some calibration tokens in that voice, and compare their
mean envelope over voiced frames with the prompt's, which is part of the speaker features. The
difference, smooth over frequency, is added to every spectrum in this voice. It is computed once per
voice, so streamed speech equals speech synthesised in one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dcar.vocoder.acoustic import AcousticModel, VocoderConfig
from dcar.voices.features import EMBEDDING_DIM, ENVELOPE_BANDS

CALIBRATION_SECONDS = 8
"""Seconds of speech tokens for calibration. Three times as many gave the same result for the
voices of 80 held-out utterances."""

MOST_VOICES = 4096
"""Maximum number of voices whose gains are cached."""


class Equalizer(nn.Module):
    """Log gains [B, bands] for voices: speaker features [B, 298]."""

    narrow: Tensor
    widen: Tensor
    tokens: Tensor

    def __init__(self, config: VocoderConfig):
        super().__init__()
        with torch.device("cpu"):  # even if the model is on the meta device, to be loaded
            # places of the bands on the mel scale
            place = torch.linspace(0, 1, config.mel_bands + 2)[1:-1]
            few = torch.linspace(0, 1, ENVELOPE_BANDS + 2)[1:-1]
            tokens = torch.tensor(config.calibration_tokens, dtype=torch.int64)
        gaps = min(config.mel_bands, ENVELOPE_BANDS) + 1
        near = (1 - (place[:, None] - few).abs() * gaps).clamp_min(0)  # [bands, 40]
        self.register_buffer("narrow", near / near.sum(0), persistent=False)
        # beyond the outermost centres, the gain stays constant
        near[place < few[0], 0] = near[place > few[-1], -1] = 1.0
        widen = (near / near.sum(1, keepdim=True)).T.contiguous()
        self.register_buffer("widen", widen, persistent=False)
        self.register_buffer("tokens", tokens, persistent=False)
        self._known: dict[bytes, Tensor] = {}

    def envelope(self, log_mel: Tensor, voiced: Tensor) -> Tensor:
        """Return the mean log-mel over voiced frames in 40 bands, with its own mean removed, as
        `speaker_features` computes it from a recording: log_mel [B, F, bands], voiced [B, F] ->
        [B, 40]."""
        bands = (log_mel.exp() @ self.narrow).log()
        mean = (bands * voiced[..., None]).sum(1) / voiced.sum(1, keepdim=True).clamp_min(1)
        return mean - mean.mean(1, keepdim=True)

    def forward(self, acoustic: AcousticModel, speaker: Tensor) -> Tensor:
        """Return log gains [B, bands] of the voices on the device of the weights, wherever the
        speaker features are; zeros without calibration tokens. Gains are cached per voice: call
        `forget` when the acoustic model has changed.

        Each voice is measured on its own. The last bits of a batched product depend on the rows
        that share it, and the cache would carry them into all later speech.
        """
        if not len(self.tokens):
            return self.widen.new_zeros(len(speaker), self.widen.shape[1])
        if len(self._known) + len(speaker) > MOST_VOICES:
            self.forget()
        keys = [row.tobytes() for row in speaker.detach().cpu().numpy()]
        for key, row in zip(keys, speaker, strict=True):
            if key not in self._known:
                self._known[key] = self._measure(acoustic, row[None].to(self.widen.device))[0]
        return torch.stack([self._known[key] for key in keys]).to(self.widen.device)

    @torch.no_grad()
    def _measure(self, acoustic: AcousticModel, speaker: Tensor) -> Tensor:
        tokens = self.tokens.expand(len(speaker), -1)
        mask = torch.ones_like(tokens, dtype=torch.float32)
        predicted = acoustic(tokens, mask, speaker)
        voiced = (predicted.voicing > 0).float()
        wanted = speaker[:, EMBEDDING_DIM + 2 :]
        return (wanted - self.envelope(predicted.log_mel, voiced)) @ self.widen

    def forget(self) -> None:
        self._known.clear()
