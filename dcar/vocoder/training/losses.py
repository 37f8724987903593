"""What a recogniser and a speaker encoder teach the vocoder's acoustic model. Training only:
nothing of it is exported.

Its spectra must sound like the words to whisper-base. The absolute difference of log-mels is least
at the median of all the ways to say a token, and that blurs what tells words apart. Whisper's
encoder, whose states the starter tokens are cut from, hears the difference: its states of the
predicted spectrum are compared with its states of the true one (a perceptual loss: Johnson et al.
2016, sec. 3.2). Moonshine, which judges, has no part in it.

And they must sound like the voice to Resemblyzer. A mean of absolute differences over frames hardly
counts what makes a voice, and the model drifts to the nearest voices that it knows. The loss is the
speaker consistency loss of YourTTS (Casanova et al. 2022, eq. 1) on spectrograms: one minus the
cosine of the embeddings of what is said and of what was recorded. The same encoder measures
similarity of voices, so that similarity is no independent figure for a vocoder trained so; `dcar
analyse what=vocoder` has a second one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.tokens.whisper_states import whisper_base_states
from dcar.voices.encoder import LOUDNESS_DBFS, SpeakerEncoder
from dcar.voices.features import SAMPLE_RATE

_LOUDNESS = 10 ** (LOUDNESS_DBFS / 20)  # Resemblyzer raises speech to this root mean square


class WordLoss(nn.Module):
    """How far whisper-base's states of a predicted log-mel are from those of the true one.

    The vocoder's log-mel is read as Whisper's features by a linear map of three frames (both have
    100 a second), fitted by least squares to recordings; the states of features mapped so give 83 %
    of the codes that the recordings give. Both spectra go through the map, so its error is no error
    of the prediction.
    """

    LAYERS = (3, 6)

    def __init__(self, waves: Tensor, log_mel: Tensor):
        """waves [N, samples] at 24 kHz and their log_mel [N, F, bands], some minutes of speech
        to fit the map to."""
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
        with torch.no_grad():  # so that no dimension counts for more than another
            self.spread = torch.stack(
                [s.float().flatten(0, 1).std(0) for s in self.states(self.features(log_mel))]
            )

    def features(self, log_mel: Tensor) -> Tensor:
        """Whisper's features [B, F, 80] of log_mel [B, F, bands]."""
        mapped = _with_one(log_mel) @ self.mapping
        # Whisper's floor: 80 dB below the loudest
        return mapped.maximum(mapped.amax((1, 2), keepdim=True) - 2.0)

    def forward(self, said: Tensor, true: Tensor, mask: Tensor) -> Tensor:
        """Mean squared distance of states in units of their variance, a scalar: log-mels said
        and true [B, F, bands] and mask [B, F], 0 outside the utterances (there the truth stands
        for what was said)."""
        even = 2 * (mask.shape[1] // 2)  # Whisper halves the rate of frames
        said, true, mask = said[:, :even], true[:, :even], mask[:, :even]
        said = torch.where(mask[..., None] > 0, said, true)
        with torch.no_grad():
            wanted = self.states(self.features(true))
        heard = self.states(self.features(said))
        keep = mask.unflatten(1, (-1, 2)).amin(2)[..., None]
        total = said.new_zeros(())
        for spread, got, want in zip(self.spread, heard, wanted, strict=True):
            error = ((got.float() - want.float()) / spread).square().mean(2, keepdim=True)
            total = total + (error * keep).sum() / keep.sum().clamp_min(1)
        return total / len(self.spread)


def linear_map(seen: Tensor, target: Tensor, ridge: float) -> Tensor:
    """Least squares: the map [A, B] float32 from seen [N, F, A] to target [N, F, B], both
    float64; ridge: share of the mean variance of what is seen that is added to each dimension's."""
    seen, target = seen.flatten(0, 1), target.flatten(0, 1)
    gram = seen.T @ seen
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    return torch.linalg.solve(gram, seen.T @ target).float()


def neighbours(frames: Tensor) -> Tensor:
    """The frame before, the frame, the one after: [B, F, bands] -> [B, F, 3 bands]."""
    padded = F.pad(frames.transpose(1, 2), (1, 1), mode="replicate").transpose(1, 2)
    return torch.cat([padded[:, i : i + frames.shape[1]] for i in range(3)], dim=2)


def _with_one(log_mel: Tensor) -> Tensor:
    """`neighbours` and a one, for the constant of the map: [B, F, bands] -> [B, F, 3 bands + 1]."""
    return F.pad(neighbours(log_mel.float()), (0, 1), value=1.0)


class VoiceLoss(nn.Module):
    """One minus the cosine of Resemblyzer's embeddings of a predicted log-mel and of the true one.

    Resemblyzer reads 40 bands of power of 100 frames a second; they are a linear map of the squared
    magnitudes of our bands in three frames, fitted by least squares to recordings (loud frames
    count less than by their power). Both spectra go through the map. Mapped so, two seconds of a
    recording have an embedding whose cosine to the recording's own is 0.91, to those of others
    0.59.
    """

    def __init__(self, waves: Tensor, log_mel: Tensor):
        """waves [N, samples] at 24 kHz and their log_mel [N, F, bands], some minutes of speech
        to fit the map to."""
        super().__init__()
        from resemblyzer.audio import wav_to_mel_spectrogram

        encoder = SpeakerEncoder().network
        # cuDNN has gradients in training mode only
        self.lstm, self.linear = encoder.lstm.train(), encoder.linear
        self.requires_grad_(False)
        frames = log_mel.shape[1]
        heard = [
            wav_to_mel_spectrogram(resample(wave, SAMPLE_RATE, ENCODER_SAMPLE_RATE))[:frames]
            for wave in waves.cpu().numpy()
        ]
        target = torch.from_numpy(np.stack(heard)).double()
        seen = _power(log_mel[:, : target.shape[1]]).cpu().double()
        level = target.sum(2, keepdim=True)
        # by 1 / level, the hiss of pauses would make the map
        weight = 1 / (level + 3 * level.mean())
        self.mapping = linear_map(seen * weight, target * weight, 1e-4).to(log_mel.device)
        self.to(log_mel.device)

    def embed(self, log_mel: Tensor, gain: Tensor) -> Tensor:
        """Unit-norm embeddings [B, 256] of log_mel [B, F, bands], its power multiplied by gain
        [B]."""
        bands = (_power(log_mel) @ self.mapping).clamp_min(0) * gain[:, None, None]
        _, (hidden, _) = self.lstm(bands)
        return F.normalize(F.relu(self.linear(hidden[-1])), dim=1)

    def forward(self, said: Tensor, true: Tensor, mask: Tensor, waves: Tensor) -> Tensor:
        """A scalar: log-mels said and true [B, F, bands], mask [B, F] (0 outside the utterances,
        where the truth stands for what was said), the recordings waves [B, samples]."""
        said = torch.where(mask[..., None] > 0, said, true)
        level = waves.square().mean(1).sqrt().clamp_min(1e-5)
        gain = (_LOUDNESS / level).clamp_min(1.0).square()  # up only, as Resemblyzer does
        with torch.no_grad():
            wanted = self.embed(true, gain)
        return 1 - (self.embed(said, gain) * wanted).sum(1).mean()


def _power(log_mel: Tensor) -> Tensor:
    """Squared magnitudes of every frame, the one before and the one after: [B, F, bands] -> [B,
    F, 3 bands]."""
    return neighbours((2 * log_mel.float()).exp())
