"""Networks, optimisers and losses of one vocoder training: what `dcar train-vocoder` steps
through."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.config import check, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError
from dcar.sources.shipped import resolve
from dcar.tokens.codebook import spread_out
from dcar.vocoder.acoustic import EMBEDDING_SPREAD, Acoustics, pitch_statistics
from dcar.vocoder.equalizer import CALIBRATION_SECONDS
from dcar.vocoder.model import TokenVocoder, VocoderConfig
from dcar.vocoder.renderer import Pitch, mel_transform
from dcar.vocoder.training.losses import VoiceLoss, WordLoss
from dcar.vocoder.training.pack import Crop, VocoderData
from dcar.voices.features import LogMel, bands_below

CONTEXT_TOKENS = 8  # that the renderer reads on both sides of a crop
LARGEST_NORM = 10.0  # of the gradients of a network
STATE_WEIGHT = 0.5  # of guessing the states behind the tokens (a pack made with states=true)
SPEAKER_NOISE = 0.15  # on speaker features, in units of their spread over the training rows
MEL_WEIGHT = 15.0  # of the renderer's mel distance
MEL_RESOLUTIONS = ((512, 40), (1024, 80), (2048, 100))  # window and bands


@dataclass
class TrainVocoderConfig:
    """Settings of `dcar train-vocoder`."""

    data: str = setting(
        "",
        "Training packs (safetensors) written by dcar.vocoder.training.pack, separated by commas.",
    )
    out: str = setting(
        "runs/vocoder", "Folder for export/, checkpoint.pt, log.jsonl.", place="folder"
    )
    device: str = setting("auto", "cuda, cpu, or auto.")
    init_from: str = setting(
        "", "Start from this exported vocoder, its weights and sizes: a folder, or starter."
    )
    renderer_from: str = setting(
        "",
        "Start from an exported vocoder's renderer only, which knows spectra, not tokens: "
        "a folder, or starter.",
    )
    seed: int = seed_setting(0, "Seed of weights, crops, noise.")
    max_steps: int = setting(1_000_000, "Stop after this many steps.", minimum=1)
    max_minutes: float = setting(
        0.0, "Stop after this much training time over all resumes; 0 = no limit.", minimum=0
    )
    acoustic_batch_size: int = setting(
        12, "Stretches of utterances a step for the acoustic model.", minimum=1
    )
    acoustic_tokens: int = setting(100, "Longest stretch of an utterance that it reads.", minimum=1)
    renderer_every: int = setting(
        1, "Steps between two steps of the renderer; 0 = it stays as it is.", minimum=0
    )
    renderer_batch_size: int = setting(16, "Crops a step of the renderer.", minimum=1)
    segment_tokens: int = setting(
        50, "Length of a crop that the renderer's losses see (50: 1 s).", minimum=1
    )
    learning_rate: float = setting(
        1e-3,
        "Peak, of all networks; linear rise over 100 steps, cosine fall to a fiftieth.",
        above=0,
    )
    voice_balance: float = setting(
        0.5, "0 = every second of speech is equally likely, 1 = every voice is.", minimum=0
    )
    weight_decay: float = setting(0.01, "Of AdamW.", minimum=0)
    words_weight: float = setting(
        0.0, "Weight of sounding like the words to whisper-base (losses.py).", minimum=0
    )
    voice_weight: float = setting(
        0.0, "Weight of sounding like the voice to Resemblyzer (losses.py).", minimum=0
    )
    ema_decay: float = setting(
        0.999, "Decay of the exported average of the generator's weights.", minimum=0, below=1
    )
    bf16: bool = setting(True, "bf16 autocast (spectra, phases and losses stay in fp32).")
    log_every: int = setting(25, "Steps between log lines.", minimum=1)
    eval_every: int = setting(
        1000, "Steps between validations, checkpoints and exports.", minimum=1
    )
    vocoder: dict[str, Any] = setting({}, "Fields of VocoderConfig, {acoustic_dropout: 0.1}.")

    def __post_init__(self) -> None:
        check(self)
        if not self.data:
            raise ConfigError(
                "data is not set: give the packs of python -m dcar.vocoder.training.pack "
                "prepared=runs/prepared out=pack.safetensors, separated by commas"
            )


class Trainer:
    """Networks, optimiser and random state of one run; `step()` is one update of everything."""

    def __init__(self, config: TrainVocoderConfig, data: VocoderData, device: torch.device):
        self.config, self.data, self.device = config, data, device
        torch.manual_seed(config.seed)
        made_by: dict[str, Any] = {
            "tokenizer_checksum": data.tokenizer_checksum,
            "token_rate": data.token_rate,
            "calibration_tokens": calibration_tokens(data),
        }
        start = started_from(config.init_from, data, device)
        if start is not None:
            made_by = asdict(start.config) | made_by
            if (
                start.config.calibration_tokens
                and start.config.tokenizer_checksum == data.tokenizer_checksum
            ):
                # of more voices than are added here
                made_by["calibration_tokens"] = start.config.calibration_tokens
        shape = VocoderConfig(**{**made_by, **config.vocoder})
        if (shape.token_rate, shape.frames_per_token) != (data.token_rate, data.frames_per_token):
            raise ConfigError(
                f"{config.data}: {data.token_rate} tokens a second of {data.frames_per_token} "
                "frames, "
                f"but the vocoder is to have {shape.token_rate} of {shape.frames_per_token}: leave "
                "token_rate, sample_rate and hop out of vocoder (the pack says them), or pack a "
                "corpus "
                "of that rate"
            )
        self.generator = self._generator(shape, start)
        # While training, the acoustic model also says what the tokens were before they were
        # quantised: much of the mel is the voice's business, and this is about the words. Nothing
        # of it is exported.
        self.listener: nn.Linear | None = None
        if data.states is not None:
            self.listener = nn.Linear(shape.acoustic_size, data.states.shape[1]).to(device)
            self.state_mean, self.state_spread = (
                data.states.float().mean(0),
                data.states.float().std(),
            )
        self.average = TokenVocoder(shape).to(device).eval().requires_grad_(False)
        self.average.load_state_dict(self.generator.state_dict())
        self.mels = nn.ModuleList(
            LogMel(shape.sample_rate, n_fft, n_fft // 4, bands) for n_fft, bands in MEL_RESOLUTIONS
        ).to(device)
        self.mel = mel_transform(shape).to(device)
        reach = torch.tensor(
            [bands_below(self.mel.filters, shape.sample_rate, top) for top in data.top.tolist()]
        )
        # [R, bands], 1 where the recording's rate reaches: what it does not hold is not taken for
        # silence
        self.heard = (torch.arange(shape.mel_bands) < reach[:, None]).float().to(device)
        learned = [
            *self.generator.parameters(),
            *(self.listener.parameters() if self.listener else ()),
        ]
        self.generator_optimizer = torch.optim.AdamW(
            learned,
            lr=config.learning_rate,
            betas=(0.8, 0.95),
            weight_decay=config.weight_decay,
            fused=device.type == "cuda",
        )
        if int(data.tokens.max()) >= shape.vocab_size:
            raise ConfigError(
                f"{config.data}: token {int(data.tokens.max())}, but vocab_size is "
                f"{shape.vocab_size}"
            )
        # to go on from
        self.parts: dict[str, Any] = {
            "generator": self.generator,
            "average": self.average,
            "generator_optimizer": self.generator_optimizer,
        }
        if self.listener:
            self.parts["listener"] = self.listener
        self.random = torch.Generator(device).manual_seed(config.seed)
        self.step_index, self.seconds = 0, 0.0
        self.run: dict[str, Any] = {}  # settings and data, which checkpoints record
        self._weigh_rows()
        self.words: WordLoss | None = None
        self.voices: VoiceLoss | None = None
        if config.words_weight > 0 or config.voice_weight > 0:
            speech = self._sample_speech()
            self.words = WordLoss(*speech) if config.words_weight > 0 else None
            self.voices = VoiceLoss(*speech) if config.voice_weight > 0 else None

    def _generator(self, shape: VocoderConfig, start: TokenVocoder | None) -> TokenVocoder:
        """A vocoder of this shape: new, from the tokenizer's codebook where the pack has one, or
        with the weights of `start`. ConfigError where these do not fit."""
        config, data = self.config, self.data
        generator = TokenVocoder(shape).to(self.device)
        if data.codebook is not None:
            if len(data.codebook) != shape.vocab_size:
                raise ConfigError(
                    f"{config.data}: tokens of {len(data.codebook)} codes, but vocab_size is "
                    f"{shape.vocab_size}"
                )
            embedding = generator.acoustic.embedding.weight
            embedding.data.copy_(spread_out(data.codebook, embedding.shape[1], EMBEDDING_SPREAD))
        renderer = (
            TokenVocoder.from_pretrained(resolve(config.renderer_from, "vocoder"), self.device)
            if (config.renderer_from)
            else None
        )
        for source, vocoder, name in (
            (config.init_from, start, ""),
            (config.renderer_from, renderer, "renderer"),
        ):
            if vocoder is None:
                continue
            try:
                generator.get_submodule(name).load_state_dict(
                    vocoder.get_submodule(name).state_dict()
                )
            except RuntimeError as error:
                raise ConfigError(
                    f"start from {source}: another size than the configured one: {error}"
                ) from error
        return generator

    def _weigh_rows(self) -> None:
        """Which rows train and validate, and how likely each is drawn."""
        config, data = self.config, self.data
        self.train_rows, self.validation_rows = (
            part.nonzero()[:, 0] for part in (~data.validation, data.validation)
        )
        if not len(self.train_rows):
            raise ConfigError(f"{config.data}: every row is a validation row")
        # Longer utterances are drawn more often, those of a voice with many less often.
        voice, lengths = data.voice[self.train_rows], data.lengths[self.train_rows].float()
        seconds = torch.zeros(int(data.voice.max()) + 1, device=self.device).index_add_(
            0, voice, lengths
        )
        self.row_weights = lengths * seconds[voice] ** -config.voice_balance
        self.by_voice = self.train_rows[torch.argsort(voice, stable=True)]
        self.voice_count = torch.bincount(voice, minlength=len(seconds))
        self.voice_start = self.voice_count.cumsum(0) - self.voice_count
        self.speaker_spread = data.speaker[self.train_rows].std(0, correction=0)

    def _sample_speech(self) -> tuple[Tensor, Tensor]:
        """Some minutes of training speech, the same whenever the run is resumed: waves [N,
        samples] and their log-mels, to which a perceptual loss fits how it reads our log-mels."""
        rows, length = (
            self.train_rows[:: max(1, len(self.train_rows) // 100)],
            self.config.acoustic_tokens,
        )
        crop = self.data.crop(rows, torch.zeros_like(rows), length)
        waves = self.data.wave(crop)[crop.mask.bool().all(1)]
        if not len(waves):
            raise ConfigError(
                f"{self.config.data}: no utterance has acoustic_tokens={length} tokens; lower it"
            )
        return waves, self.mel(waves).transpose(1, 2)

    def progress(self) -> float:
        """Share of the run that is done, 0..1, by steps or by time, whichever is ahead."""
        by_time = (
            self.seconds / (60 * self.config.max_minutes) if self.config.max_minutes > 0 else 0.0
        )
        return min(1.0, max(self.step_index / self.config.max_steps, by_time))

    def _learning_rate(self) -> float:
        fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress()))
        return self.config.learning_rate * fall * min(1.0, (self.step_index + 1) / 100)

    def _draw(self, count: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [B], first tokens [B], and features [B, 298] of another utterance of the same
        voice, with noise."""
        rows = self.train_rows[
            torch.multinomial(self.row_weights, count, replacement=True, generator=self.random)
        ]
        spare = (self.data.lengths[rows] - tokens).clamp_min(0)
        first = (
            (torch.rand(count, device=self.device, generator=self.random) * (spare + 1))
            .long()
            .minimum(spare)
        )
        voice = self.data.voice[rows]
        pick = (
            torch.rand(count, device=self.device, generator=self.random) * self.voice_count[voice]
        )
        other = self.by_voice[
            self.voice_start[voice] + pick.long().minimum(self.voice_count[voice] - 1)
        ]
        features = self.data.speaker[other]
        noise = torch.randn(features.shape, device=self.device, generator=self.random)
        return rows, first, features + SPEAKER_NOISE * self.speaker_spread * noise

    def step(self) -> dict[str, Tensor]:
        """One update; returns losses as tensors (no synchronisation with the device)."""
        # of dropout: a resumed run drops the same
        torch.manual_seed(self.config.seed + self.step_index)
        for group in self.generator_optimizer.param_groups:
            group["lr"] = self._learning_rate()
        total, logs = self._acoustic_loss()
        if self.config.renderer_every and self.step_index % self.config.renderer_every == 0:
            loss, more = self._renderer_loss()
            total, logs = total + loss, logs | more
        self.generator_optimizer.zero_grad(set_to_none=True)
        total.backward()
        for name in ("acoustic", "renderer"):  # apart, since either would shrink the other's step
            parameters = [
                p for p in getattr(self.generator, name).parameters() if p.grad is not None
            ]
            if parameters:
                logs[f"{name}_norm"] = nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
        self.generator_optimizer.step()
        # The average forgets its random start quickly, then slows down to its nominal decay.
        decay = min(self.config.ema_decay, (1 + self.step_index) / (10 + self.step_index))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.generator.parameters()), 1 - decay
            )
        self.step_index += 1
        return logs

    def _acoustic_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        rows, first, speaker = self._draw(config.acoustic_batch_size, config.acoustic_tokens)
        crop = self.data.crop(rows, first, config.acoustic_tokens)
        waves = self.data.wave(crop)
        with torch.no_grad():
            target = self.mel(waves).transpose(1, 2)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.bf16):
            said = self.generator.acoustic(crop.tokens, crop.mask, speaker)
            guess = None if self.listener is None else self.listener(said.inner)
        heard = self.heard[rows, None]
        total, logs = acoustic_loss(said, target, crop, speaker, heard)
        log_mel = torch.where(heard > 0, said.log_mel, target)
        if self.words is not None:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=config.bf16):
                words = self.words(log_mel, target, crop.frame_mask)
            total, logs = total + config.words_weight * words, logs | {"words": words.detach()}
        if self.voices is not None:
            voices = self.voices(log_mel, target, crop.frame_mask, waves)
            total, logs = total + config.voice_weight * voices, logs | {"voices": voices.detach()}
        if guess is None or self.data.states is None:
            return total, logs
        truth = (self.data.states[crop.positions].float() - self.state_mean) / self.state_spread
        error = ((guess.float() - truth).square().mean(-1) * crop.mask).sum() / crop.mask.sum()
        return total + STATE_WEIGHT * error, logs | {"states": error.detach()}

    def _renderer_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Mel distance of rendered true spectrograms."""
        config, margin = self.config, CONTEXT_TOKENS * self.data.samples_per_token
        rows, first, _ = self._draw(config.renderer_batch_size, config.segment_tokens)
        crop = self.data.crop(
            rows, first - CONTEXT_TOKENS, config.segment_tokens + 2 * CONTEXT_TOKENS
        )
        whole = self.data.wave(crop)
        real = whole[:, margin : whole.shape[1] - margin]
        noise = torch.randn(whole.shape, device=self.device, generator=self.random)
        phase = torch.rand(len(rows), 1, device=self.device, generator=self.random)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.bf16):
            log_mel = self.mel(whole).transpose(1, 2)
            fake = self.generator.renderer(
                log_mel, Pitch(crop.log_f0, crop.voiced), crop.frame_mask, noise, phase
            )
        mel = self.mel_distance(fake[:, margin : fake.shape[1] - margin], real)
        return MEL_WEIGHT * mel, {"mel": mel.detach()}

    def mel_distance(self, fake: Tensor, real: Tensor) -> Tensor:
        """Mean absolute difference of the log-mels of waves [B, samples] at MEL_RESOLUTIONS
        (natural log)."""
        return torch.stack([F.l1_loss(mel(fake), mel(real)) for mel in self.mels]).mean()

    @torch.no_grad()
    def validate(self, limit: int = 64) -> dict[str, float]:
        """Of the averaged weights: mel distance of the wave from tokens, and from the true
        spectrogram (copy); error of the predicted log-mel, F0 and voicing."""
        sums: dict[str, float] = {}
        self.average.equalizer.forget()  # its weights have changed
        rows = self.validation_rows[:limit]
        for row in rows:
            crop = self.data.crop(row[None], row.new_zeros(1), int(self.data.lengths[row]))
            real, speaker = self.data.wave(crop), self.data.speaker[row][None]
            target, true_pitch = self.mel(real).transpose(1, 2), Pitch(crop.log_f0, crop.voiced)
            log_mel, pitch = self.average.predict(crop.tokens, crop.mask, speaker)
            mask = crop.frame_mask
            both = (crop.log_f0 - pitch.log_f0).abs() * crop.voiced
            values = {
                "mel": self.mel_distance(self.average.renderer(log_mel, pitch, mask), real),
                "mel_copy": self.mel_distance(
                    self.average.renderer(target, true_pitch, mask), real
                ),
                "log_mel_error": ((log_mel - target).abs() * self.heard[row]).mean()
                / self.heard[row].mean(),
                "f0_error_semitones": both.sum()
                / crop.voiced.sum().clamp_min(1)
                * 12
                / math.log(2),
                "voicing_error": (crop.voiced - pitch.voiced).abs().mean(),
            }
            for key, value in values.items():
                sums[key] = sums.get(key, 0.0) + float(value) / len(rows)
        return sums

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: part.state_dict() for name, part in self.parts.items()}
        return state | {
            "random": self.random.get_state(),
            "step": self.step_index,
            "seconds": self.seconds,
            "run": self.run,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        for group in self.generator_optimizer.param_groups:
            # this run's; the rate is set at every step
            group["weight_decay"] = self.config.weight_decay
        self.random.set_state(state["random"].cpu())
        self.step_index, self.seconds = state["step"], state["seconds"]


def started_from(source: str, data: VocoderData, device: torch.device) -> TokenVocoder | None:
    """The vocoder of `init_from`; ConfigError where it speaks tokens at another rate than the
    pack has them."""
    if not source:
        return None
    start = TokenVocoder.from_pretrained(resolve(source, "vocoder"), device)
    if start.token_rate != data.token_rate:
        raise ConfigError(
            f"init_from {source}: speaks {start.token_rate} tokens a second, the pack has "
            f"{data.token_rate}; leave init_from out, or start from a vocoder of that rate"
        )
    return start


def calibration_tokens(data: VocoderData) -> tuple[int, ...]:
    """Tokens of training utterances from all over the pack, CALIBRATION_SECONDS of them (fewer
    in a smaller pack)."""
    rows, wanted, found = (
        (~data.validation).nonzero()[:, 0].tolist(),
        CALIBRATION_SECONDS * data.token_rate,
        [],
    )
    parts = min(16, len(rows))
    for i in range(parts):
        row = rows[i * len(rows) // parts]
        start = int(data.starts[row])
        found += data.tokens[start : start + int(data.lengths[row])].tolist()
        if len(found) >= wanted:
            break
    return tuple(found[:wanted])


def acoustic_loss(
    said: Acoustics,
    log_mel: Tensor,
    crop: Crop,
    speaker: Tensor,
    heard: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L1 of the log-mel [B, F, bands], smooth L1 of the pitch's deviation from the voice's mean
    (unvoiced frames at a tenth), cross-entropy of voicing; frames outside the rows and bands
    that are not `heard` [B, 1, bands] do not count."""
    keep, voiced = crop.frame_mask, crop.voiced
    error = ((said.log_mel - log_mel).abs() * heard).sum(-1) / heard.sum(-1)  # [B, F]
    spectrum = (error * keep).sum() / keep.sum()
    mean, spread = pitch_statistics(speaker)
    target = ((crop.log_f0 - mean) / spread).clamp(-4.0, 4.0)
    weight = keep * (0.1 + 0.9 * voiced)
    contour = (
        F.smooth_l1_loss(said.deviation, target, reduction="none", beta=0.5) * weight
    ).sum() / weight.sum()
    voicing = (
        F.binary_cross_entropy_with_logits(said.voicing, voiced, reduction="none") * keep
    ).sum() / keep.sum()
    logs = {"log_mel": spectrum.detach(), "pitch": contour.detach(), "voicing": voicing.detach()}
    return spectrum + 0.5 * contour + 0.5 * voicing, logs
