"""Networks of the vocoder: speech tokens + a voice -> 24 kHz waveform, on one CPU thread far faster
than real time.

    tokens + voice ── acoustic model ──>        log-mel, F0, voicing     (acoustic.py)
    log-mel + voice ── equaliser ──>            log-mel, as bright as the prompt   (equalizer.py)
    log-mel + pitch ── renderer, 100 Hz ── inverse STFT ──> wave   (renderer.py)

There are two networks, because they learn different things from different amounts of data. Learning
the sound of a token in a voice takes hours of speech, but a spectrogram is a sufficient target:
without waves and phases, a training step is cheap. Converting a spectrogram to a wave is the same
for all voices and mostly signal processing. Blocks: Vocos (Siuzdak 2023).
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dcar.errors import DataError
from dcar.vocoder.acoustic import AcousticModel, VocoderConfig, absolute_pitch
from dcar.vocoder.equalizer import Equalizer
from dcar.vocoder.renderer import Pitch, Renderer
from heads.checkpoint import Checkpoint


class VocoderNetwork(Checkpoint):
    """Speech tokens and speaker features to waveform; see the module docstring."""

    config_class, model_type = VocoderConfig, "dcar-vocoder"
    config: VocoderConfig

    def __init__(self, config: VocoderConfig | None = None):
        super().__init__()
        self.config = config = config or VocoderConfig()
        self.sample_rate, self.token_rate = config.sample_rate, config.token_rate
        self.vocab_size = config.vocab_size
        self.acoustic = AcousticModel(config)
        self.renderer = Renderer(config)
        self.equalizer = Equalizer(config)

    @property
    def device(self) -> torch.device:
        return self.renderer.head.weight.device

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.equalizer.forget()
        return super().train(mode)

    def predict(
        self, tokens: Tensor, mask: Tensor, speaker: Tensor, gains: Tensor | None = None
    ) -> tuple[Tensor, Pitch]:
        """Return log-mel [B, F, bands] and pitch [B, F] of utterances.

        tokens [B, T], mask [B, T] (1 = real token), speaker [B, 298]. gains [B, bands]: those of
        the equaliser; if they are not given, they are computed, for which the host must read the
        speakers.
        """
        if gains is None:
            gains = self.equalizer(self.acoustic, speaker)
        acoustics = self.acoustic(tokens, mask, speaker)
        log_f0 = absolute_pitch(acoustics.deviation, speaker)
        # Padding repeats the last real value, so that a row's end does not depend on what follows.
        last = (mask.sum(1, keepdim=True).long() * self.config.frames_per_token - 1).clamp_min(0)
        frame = torch.arange(log_f0.shape[1], device=log_f0.device).expand_as(log_f0).minimum(last)
        log_mel = acoustics.log_mel + gains[:, None]
        return log_mel, Pitch(log_f0.gather(1, frame), (acoustics.voicing > 0).float())

    def forward(self, tokens: Tensor, lengths: Tensor, speaker: Tensor) -> Tensor:
        """Return the waveform [B, T * samples_per_token] of tokens [B, T] int64 (any id as
        padding), with lengths [B] and speaker [B, 298].

        Row b is silent after lengths[b] tokens, and does not depend on the other rows. Raises
        DataError for wrong shapes, ids outside the vocabulary, or speaker features that are not
        finite.
        """
        if tokens.dim() != 2 or lengths.shape != tokens.shape[:1]:
            raise DataError(
                f"vocoder: tokens {list(tokens.shape)} and lengths {list(lengths.shape)} do not "
                "agree; give tokens [B, T] and lengths [B]"
            )
        self.check_speaker(speaker, len(tokens))
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        self.check_ids(tokens[real])
        return self.speak(tokens, lengths, speaker)

    def speak(
        self, tokens: Tensor, lengths: Tensor, speaker: Tensor, gains: Tensor | None = None
    ) -> Tensor:
        """Return the waveform of checked input; see `forward` and `predict`."""
        return self.renderer(*self.frames(tokens, lengths, speaker, gains))

    def speak_windows(
        self,
        tokens: Tensor,
        lengths: Tensor,
        speaker: Tensor,
        gains: Tensor,
        places: Tensor,
        phase: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the waveform of windows of utterances, otherwise as `speak`, and the phase of the
        pulses [B, 1] in cycles after `end` samples.

        places [B, 3]: how many samples of the utterance are before the window, and two numbers of
        samples in the window, `begin` and `end`; phase [B, 1] float64: after `begin` samples.
        """
        log_mel, pitch, mask = self.frames(tokens, lengths, speaker, gains)
        first, begin, end = places.unsqueeze(-1).unbind(1)
        cycles = F.pad(self.renderer.cycles(pitch.log_f0), (1, 0))
        cycles = cycles + (phase - cycles.gather(1, begin))
        sample = first + torch.arange(cycles.shape[1] - 1, device=first.device)
        noise = self.renderer.noise[sample % len(self.renderer.noise)]
        wave = self.renderer(log_mel, pitch, mask, noise, cycles[:, 1:])
        return wave, cycles.gather(1, end)

    def frames(
        self, tokens: Tensor, lengths: Tensor, speaker: Tensor, gains: Tensor | None = None
    ) -> tuple[Tensor, Pitch, Tensor]:
        """Return log-mel, pitch and mask [B, F] of the frames of checked input; see `predict`."""
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        tokens, mask = tokens.masked_fill(~real, 0), real.float()
        log_mel, pitch = self.predict(tokens, mask, speaker, gains)
        return log_mel, pitch, mask.repeat_interleave(self.config.frames_per_token, dim=1)

    def check_speaker(self, speaker: Tensor, rows: int) -> None:
        """Raise DataError unless these are finite voice features of `rows` utterances."""
        fits = speaker.shape == (rows, self.config.speaker_dim)
        if not fits or not bool(torch.isfinite(speaker).all()):
            raise DataError(
                f"vocoder: expected finite speaker features [{rows}, {self.config.speaker_dim}], "
                f"got {list(speaker.shape)}; compute them with speaker_features(wave, "
                "sample_rate, embedding)"
            )

    def check_ids(self, tokens: Tensor) -> None:
        """Raise DataError for ids outside the vocabulary: tokens [N]."""
        wrong = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)]
        if len(wrong):
            raise DataError(
                f"vocoder: token {int(wrong[0])} is outside 0..{self.config.vocab_size - 1}; "
                "strip EOS and use the tokenizer that this vocoder was trained on"
            )
