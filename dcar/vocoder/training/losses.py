"""Perceptual losses of the vocoder's acoustic model, by a recogniser and a speaker encoder. Used in
training only; no part of them is exported.

Word loss: the predicted spectra must be recognisable to whisper-base. The absolute difference of
log-mels is minimal at the median of all pronunciations of a token, which blurs the differences
between words. Whisper's encoder, from whose states the starter tokens are made, is sensitive to
them: its states of the predicted spectrum are compared with its states of the true one (a
perceptual loss: Johnson et al. 2016, sec. 3.2). Moonshine, which evaluates, is not involved.

Voice loss: the predicted spectra must resemble the voice for Resemblyzer. In a mean of absolute
differences over frames, the features of a voice hardly count, and the model drifts to the nearest
voices of its training data. The loss is the speaker consistency loss of YourTTS (Casanova et al.
2022, eq. 1) on spectrograms: one minus the cosine of the embeddings of the prediction and of the
recording. The same encoder measures voice similarity, so that figure is not independent for a
vocoder trained with this loss; `dcar analyse what=vocoder` has a second one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.tokens.whisper_states import whisper_base_states
from dcar.voices.encoder import SpeakerEncoder
from dcar.voices.features import LOUDNESS_DBFS, SAMPLE_RATE

_LOUDNESS = 10 ** (LOUDNESS_DBFS / 20)  # root mean square to which Resemblyzer amplifies speech


class WordLoss(nn.Module):
    """Distance between whisper-base's states of a predicted log-mel and those of the true one.

    A linear map from three frames of the vocoder's log-mel to Whisper's features (both have 100
    frames per second) is fitted by least squares to recordings; the states of features mapped in
    this way give 83 % of the codes that the recordings give. Both spectra go through the map, so
    its error does not count as an error of the prediction.
    """

    LAYERS = (3, 6)

    def __init__(self, waves: Tensor, log_mel: Tensor):
        """Fit the map to waves [N, samples] at 24 kHz and their log_mel [N, F, bands], some
        minutes of speech."""
        super().__init__()
        from faster_whisper.feature_extractor import FeatureExtractor

        extract = FeatureExtractor()
        self.states = whisper_base_states(self.LAYERS)
        features = [
            extract(resample(wave, SAMPLE_RATE, ENCODER_SAMPLE_RATE), padding=0).T[
                : log_mel.shape[1]
            ]
            for wave in waves.cpu().numpy()
        ]
        target = torch.from_numpy(np.stack(features)).to(log_mel.device, torch.float64)
        seen = _with_one(log_mel).double()[:, : target.shape[1]]
        self.mapping = linear_map(seen, target, 1e-6)
        self.to(log_mel.device)
        with torch.no_grad():  # normalises the dimensions, so that they count alike
            self.spread = torch.stack(
                [s.float().flatten(0, 1).std(0) for s in self.states(self.features(log_mel))]
            )

    def features(self, log_mel: Tensor) -> Tensor:
        """Return Whisper's features [B, F, 80] of log_mel [B, F, bands]."""
        mapped = _with_one(log_mel) @ self.mapping
        # Whisper's floor: 80 dB below the maximum
        return mapped.maximum(mapped.amax((1, 2), keepdim=True) - 2.0)

    def forward(self, said: Tensor, true: Tensor, mask: Tensor) -> Tensor:
        """Return the mean squared distance of the states in units of their variance, a scalar.
        said and true: predicted and true log-mel [B, F, bands]; mask [B, F]: 0 outside the
        utterances, where the true log-mel replaces the predicted one."""
        even = 2 * (mask.shape[1] // 2)  # Whisper halves the rate of frames
        said, true, mask = said[:, :even], true[:, :even], mask[:, :even]
        said = torch.where(mask[..., None] > 0, said, true)
        with torch.no_grad():
            wanted = self.states(self.features(true))
        predicted = self.states(self.features(said))
        keep = mask.unflatten(1, (-1, 2)).amin(2)[..., None]
        total = said.new_zeros(())
        for spread, got, want in zip(self.spread, predicted, wanted, strict=True):
            error = ((got.float() - want.float()) / spread).square().mean(2, keepdim=True)
            total = total + (error * keep).sum() / keep.sum().clamp_min(1)
        return total / len(self.spread)


def linear_map(seen: Tensor, target: Tensor, ridge: float) -> Tensor:
    """Return the least-squares map [A, B], float32, from seen [N, F, A] to target [N, F, B],
    both float64. ridge: added to the variance of each input dimension, as a share of their mean
    variance."""
    seen, target = seen.flatten(0, 1), target.flatten(0, 1)
    gram = seen.T @ seen
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    return torch.linalg.solve(gram, seen.T @ target).float()


def neighbours(frames: Tensor) -> Tensor:
    """Return the previous frame, the frame, and the next one: [B, F, bands] -> [B, F, 3 bands]."""
    padded = F.pad(frames.transpose(1, 2), (1, 1), mode="replicate").transpose(1, 2)
    return torch.cat([padded[:, i : i + frames.shape[1]] for i in range(3)], dim=2)


def _with_one(log_mel: Tensor) -> Tensor:
    """Return `neighbours` and a one, for the constant of the map: [B, F, bands] -> [B, F, 3
    bands + 1]."""
    return F.pad(neighbours(log_mel.float()), (0, 1), value=1.0)


class VoiceLoss(nn.Module):
    """One minus the cosine of Resemblyzer's embeddings of a predicted log-mel and of the true one.

    Resemblyzer reads the power in 40 bands at 100 frames per second. This is computed by a linear
    map from the squared magnitudes of our bands in three frames, fitted by least squares to
    recordings, in which loud frames count less than by their power. Both spectra go through the
    map. Mapped in this way, two seconds of a recording have an embedding whose cosine with that of
    the recording itself is 0.91, and with those of other recordings 0.59.
    """

    def __init__(self, waves: Tensor, log_mel: Tensor):
        """Fit the map to waves [N, samples] at 24 kHz and their log_mel [N, F, bands], some
        minutes of speech."""
        super().__init__()
        from resemblyzer.audio import wav_to_mel_spectrogram

        encoder = SpeakerEncoder().network
        # cuDNN computes gradients only in training mode
        self.lstm, self.linear = encoder.lstm.train(), encoder.linear
        self.requires_grad_(False)
        frames = log_mel.shape[1]
        spectra = [
            wav_to_mel_spectrogram(resample(wave, SAMPLE_RATE, ENCODER_SAMPLE_RATE))[:frames]
            for wave in waves.cpu().numpy()
        ]
        target = torch.from_numpy(np.stack(spectra)).double()
        seen = _power(log_mel[:, : target.shape[1]]).cpu().double()
        level = target.sum(2, keepdim=True)
        # with 1 / level, the noise in pauses would dominate the fit
        weight = 1 / (level + 3 * level.mean())
        self.mapping = linear_map(seen * weight, target * weight, 1e-4).to(log_mel.device)
        self.to(log_mel.device)

    def embed(self, log_mel: Tensor, gain: Tensor) -> Tensor:
        """Return unit-norm embeddings [B, 256] of log_mel [B, F, bands], whose power is
        multiplied by gain [B]."""
        bands = (_power(log_mel) @ self.mapping).clamp_min(0) * gain[:, None, None]
        _, (hidden, _) = self.lstm(bands)
        return F.normalize(F.relu(self.linear(hidden[-1])), dim=1)

    def forward(self, said: Tensor, true: Tensor, mask: Tensor, waves: Tensor) -> Tensor:
        """Return the loss, a scalar. said and true: predicted and true log-mel [B, F, bands];
        mask [B, F]: 0 outside the utterances, where the true log-mel replaces the predicted one;
        waves [B, samples]: the recordings."""
        said = torch.where(mask[..., None] > 0, said, true)
        level = waves.square().mean(1).sqrt().clamp_min(1e-5)
        gain = (_LOUDNESS / level).clamp_min(1.0).square()  # only amplifies, as Resemblyzer does
        with torch.no_grad():
            wanted = self.embed(true, gain)
        return 1 - (self.embed(said, gain) * wanted).sum(1).mean()


def _power(log_mel: Tensor) -> Tensor:
    """Return the squared magnitudes of every frame, the previous and the next one: [B, F, bands]
    -> [B, F, 3 bands]."""
    return neighbours((2 * log_mel.float()).exp())
