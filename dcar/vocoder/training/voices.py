"""What a speaker encoder teaches the vocoder's acoustic model: its spectra must sound like the voice to Resemblyzer.

A mean of absolute differences over frames hardly counts what makes a voice, and the model drifts to the nearest voices
that it knows. The loss is the speaker consistency loss of YourTTS (Casanova et al. 2022, eq. 1) on spectrograms: one
minus the cosine of the embeddings of what is said and of what was recorded. The same encoder measures similarity of
voices, so that similarity is no independent figure for a vocoder trained so; `dcar analyse what=vocoder` has a second
one. Training only: nothing of it is exported.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.vocoder.training.words import linear_map, neighbours
from dcar.voices import encoder as speaker
from dcar.voices.features import SAMPLE_RATE

_LOUDNESS = 10 ** (speaker.LOUDNESS_DBFS / 20)  # Resemblyzer raises speech to this root mean square


class VoiceLoss(nn.Module):
    """One minus the cosine of Resemblyzer's embeddings of a predicted log-mel and of the true one.

    Resemblyzer reads 40 bands of power of 100 frames a second; they are a linear map of the squared magnitudes of our
    bands in three frames, fitted by least squares to recordings (loud frames count less than by their power). Both
    spectra go through the map. Mapped so, two seconds of a recording have an embedding whose cosine to the recording's
    own is 0.91, to those of others 0.59.
    """

    mapping: Tensor

    def __init__(self, waves: Tensor, log_mel: Tensor):
        """waves [N, samples] at 24 kHz and their log_mel [N, F, bands], some minutes of speech to fit the map to."""
        super().__init__()
        from resemblyzer.audio import wav_to_mel_spectrogram

        encoder = speaker.SpeakerEncoder().network
        self.lstm, self.linear = encoder.lstm.train(), encoder.linear  # cuDNN has gradients in training mode only
        self.requires_grad_(False)
        frames = log_mel.shape[1]
        heard = [
            wav_to_mel_spectrogram(resample(wave, SAMPLE_RATE, ENCODER_SAMPLE_RATE))[:frames]
            for wave in waves.cpu().numpy()
        ]
        target = torch.from_numpy(np.stack(heard)).double()
        seen = _power(log_mel[:, : target.shape[1]]).cpu().double()
        level = target.sum(2, keepdim=True)
        weight = 1 / (level + 3 * level.mean())  # by 1 / level, the hiss of pauses would make the map
        self.register_buffer("mapping", linear_map(seen * weight, target * weight, 1e-4), persistent=False)
        self.to(log_mel.device)

    def embed(self, log_mel: Tensor, gain: Tensor) -> Tensor:
        """Unit-norm embeddings [B, 256] of log_mel [B, F, bands], its power multiplied by gain [B]."""
        bands = (_power(log_mel) @ self.mapping).clamp_min(0) * gain[:, None, None]
        _, (hidden, _) = self.lstm(bands)
        return F.normalize(F.relu(self.linear(hidden[-1])), dim=1)

    def forward(self, said: Tensor, true: Tensor, mask: Tensor, waves: Tensor) -> Tensor:
        """A scalar: log-mels said and true [B, F, bands], mask [B, F] (0 outside the utterances, where the truth stands
        for what was said), the recordings waves [B, samples]."""
        said = torch.where(mask[..., None] > 0, said, true)
        level = waves.square().mean(1).sqrt().clamp_min(1e-5)
        gain = (_LOUDNESS / level).clamp_min(1.0).square()  # up only, as Resemblyzer does
        with torch.no_grad():
            wanted = self.embed(true, gain)
        return 1 - (self.embed(said, gain) * wanted).sum(1).mean()


def _power(log_mel: Tensor) -> Tensor:
    """Squared magnitudes of every frame, the one before and the one after: [B, F, bands] -> [B, F, 3 bands]."""
    return neighbours((2 * log_mel.float()).exp())
