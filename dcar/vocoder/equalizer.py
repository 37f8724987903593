"""The long-term spectrum of a voice as the prompt has it, whatever the acoustic model makes of
voices new to it.

An acoustic model that has heard few voices draws a new one towards those that it knows. How far it
does so can be measured without any recording: let it speak some calibration tokens in that voice,
and compare their mean envelope over voiced frames with the prompt's, which is part of the speaker
features. What is missing is added to every spectrum in this voice, smooth over frequency: an
equaliser that is set once for a voice, so speech is the same in one piece and streamed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dcar.vocoder.acoustic import AcousticModel, VocoderConfig
from dcar.voices.features import EMBEDDING_DIM, ENVELOPE_BANDS

CALIBRATION_SECONDS = 8
"""Of speech tokens that calibrate; with three times as many the voices of 80 held-out utterances
came out alike."""

MOST_VOICES = 4096
"""Equalisers that are remembered."""


class Equalizer(nn.Module):
    """Log gains [B, bands] for voices: speaker features [B, 298]."""

    narrow: Tensor
    widen: Tensor
    tokens: Tensor

    def __init__(self, config: VocoderConfig):
        super().__init__()
        place = torch.linspace(0, 1, config.mel_bands + 2)[1:-1]  # of the bands, on the mel scale
        few = torch.linspace(0, 1, ENVELOPE_BANDS + 2)[1:-1]
        gaps = min(config.mel_bands, ENVELOPE_BANDS) + 1
        near = (1 - (place[:, None] - few).abs() * gaps).clamp_min(0)  # [bands, 40]
        self.register_buffer("narrow", near / near.sum(0), persistent=False)
        # beyond the outer centres their gain goes on
        near[place < few[0], 0] = near[place > few[-1], -1] = 1.0
        self.register_buffer(
            "widen", (near / near.sum(1, keepdim=True)).T.contiguous(), persistent=False
        )
        self.register_buffer(
            "tokens", torch.tensor(config.calibration_tokens, dtype=torch.int64), persistent=False
        )
        self._known: dict[bytes, Tensor] = {}

    def envelope(self, log_mel: Tensor, voiced: Tensor) -> Tensor:
        """Mean log-mel over voiced frames in 40 bands, its own mean removed, as
        `speaker_features` has it of a recording: log_mel [B, F, bands], voiced [B, F] -> [B,
        40]."""
        bands = (log_mel.exp() @ self.narrow).log()
        mean = (bands * voiced[..., None]).sum(1) / voiced.sum(1, keepdim=True).clamp_min(1)
        return mean - mean.mean(1, keepdim=True)

    def forward(self, acoustic: AcousticModel, speaker: Tensor) -> Tensor:
        """Zero without calibration tokens. Voices are remembered: call `forget` when the acoustic
        model has changed. The gains are on the device of the weights, wherever the speakers are.

        A voice is measured by itself. The last bits of a batched product depend on the rows that
        share it, and what is remembered would carry them into all that is spoken afterwards.
        """
        if not len(self.tokens):
            return self.widen.new_zeros(len(speaker), self.widen.shape[1])
        if len(self._known) + len(speaker) > MOST_VOICES:
            self.forget()
        keys = [row.tobytes() for row in speaker.detach().cpu().numpy()]
        for key, row in zip(keys, speaker, strict=True):
            if key not in self._known:
                self._known[key] = self._measure(acoustic, row[None].to(self.widen.device))[0]
        return torch.stack([self._known[key] for key in keys])

    @torch.no_grad()
    def _measure(self, acoustic: AcousticModel, speaker: Tensor) -> Tensor:
        tokens = self.tokens.expand(len(speaker), -1)
        said = acoustic(tokens, torch.ones_like(tokens, dtype=torch.float32), speaker)
        wanted = speaker[:, EMBEDDING_DIM + 2 :]
        return (wanted - self.envelope(said.log_mel, (said.voicing > 0).float())) @ self.widen

    def forget(self) -> None:
        self._known.clear()
