"""Networks, optimiser and losses of one vocoder training; `dcar train-vocoder` runs its steps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.config import setting
from dcar.config.training import TrainingSettings
from dcar.errors import ConfigError
from dcar.sources.shipped import resolve
from dcar.tokens.codebook import spread_out
from dcar.vocoder.acoustic import (
    EMBEDDING_SPREAD,
    Acoustics,
    VocoderConfig,
    pitch_statistics,
)
from dcar.vocoder.equalizer import CALIBRATION_SECONDS
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.renderer import Pitch, mel_transform
from dcar.vocoder.training.losses import VoiceLoss, WordLoss
from dcar.vocoder.training.pack import Crop, VocoderData
from dcar.voices.features import LogMel, bands_below

CONTEXT_TOKENS = 8  # tokens that the renderer reads on both sides of a crop
LARGEST_NORM = 10.0  # norm to which the gradients of a network are clipped
STATE_WEIGHT = 0.5  # weight of predicting the encoder's states (packs made with states=true)
SPEAKER_NOISE = 0.15  # noise on speaker features, in units of their spread over the training rows
MEL_WEIGHT = 15.0  # weight of the renderer's mel distance
MEL_RESOLUTIONS = ((512, 40), (1024, 80), (2048, 100))  # window and bands


@dataclass
class TrainVocoderConfig(TrainingSettings):
    """Settings of `dcar train-vocoder`. After every evaluation it writes checkpoint and export."""

    data: str = setting(
        "",
        "Training packs (safetensors) written by dcar.vocoder.training.pack, separated by commas.",
    )
    out: str = "runs/vocoder"
    per_device_train_batch_size: int = 12  # segments of utterances for the acoustic model
    max_steps: int = 1_000_000
    bf16: bool = True  # spectra, phases and losses stay in float32
    eval_steps: int = 1000
    device: str = setting("auto", "Device: cuda, cpu, or auto = a GPU if there is one.")
    init_from: str = setting(
        "",
        "Exported vocoder whose weights and sizes training starts from: a folder, or starter; "
        "empty = from scratch.",
    )
    renderer_from: str = setting(
        "",
        "Exported vocoder whose renderer alone training starts from, which depends on spectra, "
        "not on tokens: a folder, or starter; empty = none.",
    )
    max_minutes: float = setting(
        0.0,
        "Maximum training time in minutes, summed over all resumed runs; 0 = no limit.",
        minimum=0,
    )
    acoustic_tokens: int = setting(
        100, "Longest segment of an utterance that the acoustic model reads, in tokens.", minimum=1
    )
    renderer_every: int = setting(
        1, "Steps between two steps of the renderer; 0 = the renderer is not trained.", minimum=0
    )
    renderer_batch_size: int = setting(16, "Crops per step of the renderer.", minimum=1)
    segment_tokens: int = setting(
        50,
        "Tokens of a crop on which the renderer's losses are computed; 50 = one second at 50 Hz.",
        minimum=1,
    )
    voice_balance: float = setting(
        0.5,
        "Balance of voices: 0 = every second of speech is equally likely to be drawn, 1 = every "
        "voice is.",
        minimum=0,
    )
    words_weight: float = setting(
        0.0, "Weight of the word loss by whisper-base (losses.py); 0 = none.", minimum=0
    )
    voice_weight: float = setting(
        0.0, "Weight of the voice loss by Resemblyzer (losses.py); 0 = none.", minimum=0
    )
    ema_decay: float = setting(
        0.999,
        "Decay of the exported moving average of the generator's weights.",
        minimum=0,
        below=1,
    )
    model: dict[str, Any] = setting(
        {}, "Fields of VocoderConfig, for example {acoustic_dropout: 0.1}."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ConfigError(
                "data is not set: give packs separated by commas; to make one, run python -m "
                "dcar.vocoder.training.pack prepared=runs/prepared out=pack.safetensors"
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
                # keep those of the vocoder that training starts from: they have more voices
                made_by["calibration_tokens"] = start.config.calibration_tokens
        shape = VocoderConfig(**{**made_by, **config.model})
        if (shape.token_rate, shape.frames_per_token) != (data.token_rate, data.frames_per_token):
            raise ConfigError(
                f"{config.data}: {data.token_rate} tokens a second of {data.frames_per_token} "
                f"frames each, but the vocoder is configured for {shape.token_rate} of "
                f"{shape.frames_per_token}: omit token_rate, sample_rate and hop from `model` "
                "(they are taken from the pack), or pack a corpus of that rate"
            )
        self.generator = self._generator(shape, start)
        # In training, the acoustic model also predicts the states that were quantised to the
        # tokens: the mel depends largely on the voice, the states on the words. This layer is not
        # exported.
        self.state_layer: nn.Linear | None = None
        if data.states is not None:
            self.state_layer = nn.Linear(shape.acoustic_size, data.states.shape[1]).to(device)
            self.state_mean = data.states.float().mean(0)
            self.state_spread = data.states.float().std()
        self.average = TokenVocoder(shape).to(device).eval().requires_grad_(False)
        self.average.load_state_dict(self.generator.state_dict())
        self.mels = nn.ModuleList(
            LogMel(shape.sample_rate, n_fft, n_fft // 4, bands) for n_fft, bands in MEL_RESOLUTIONS
        ).to(device)
        self.mel = mel_transform(shape).to(device)
        reach = torch.tensor(
            [bands_below(self.mel.filters, shape.sample_rate, top) for top in data.top.tolist()]
        )
        # [R, bands], 1 for bands below half the recording's rate: those above are not silence,
        # but unknown
        self.known = (torch.arange(shape.mel_bands) < reach[:, None]).float().to(device)
        learned = [
            *self.generator.parameters(),
            *(self.state_layer.parameters() if self.state_layer else ()),
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
                f"{config.data}: contains token {int(data.tokens.max())}, but vocab_size is "
                f"{shape.vocab_size}; raise it or omit it from `model`"
            )
        # saved in checkpoints
        self.parts: dict[str, Any] = {
            "generator": self.generator,
            "average": self.average,
            "generator_optimizer": self.generator_optimizer,
        }
        if self.state_layer:
            self.parts["listener"] = self.state_layer
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
        """Return a vocoder of this shape: new, with token embeddings from the tokenizer's
        codebook if the pack has one, or with the weights of `start`. Raises ConfigError if these
        do not fit."""
        config, data = self.config, self.data
        generator = TokenVocoder(shape).to(self.device)
        if data.codebook is not None:
            if len(data.codebook) != shape.vocab_size:
                raise ConfigError(
                    f"{config.data}: its codebook has {len(data.codebook)} codes, but vocab_size "
                    f"is {shape.vocab_size}; set it to the same number in `model`"
                )
            embedding = generator.acoustic.embedding.weight
            embedding.data.copy_(spread_out(data.codebook, embedding.shape[1], EMBEDDING_SPREAD))
        renderer = None
        if config.renderer_from:
            folder = resolve(config.renderer_from, "vocoder")
            renderer = TokenVocoder.from_pretrained(folder, self.device)
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
                    f"start from {source}: has another size than the configured one: {error}"
                ) from error
        return generator

    def _weigh_rows(self) -> None:
        """Split the rows into training and validation, and compute the probability with which
        each is drawn. Raises ConfigError if there is no training row."""
        config, data = self.config, self.data
        self.train_rows = (~data.validation).nonzero()[:, 0]
        self.validation_rows = data.validation.nonzero()[:, 0]
        if not len(self.train_rows):
            raise ConfigError(
                f"{config.data}: every row is a validation row; add a pack with training rows"
            )
        # Longer utterances are drawn more often, and those of a voice with much speech less often.
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
        """Return some minutes of training speech, the same whenever the run is resumed: waves
        [N, samples] and their log-mels. The perceptual losses fit their maps to them. Raises
        ConfigError if no utterance is long enough."""
        rows = self.train_rows[:: max(1, len(self.train_rows) // 100)]
        length = self.config.acoustic_tokens
        crop = self.data.crop(rows, torch.zeros_like(rows), length)
        waves = self.data.wave(crop)[crop.mask.bool().all(1)]
        if not len(waves):
            raise ConfigError(
                f"{self.config.data}: no utterance has acoustic_tokens={length} tokens; lower "
                "acoustic_tokens"
            )
        return waves, self.mel(waves).transpose(1, 2)

    def progress(self) -> float:
        """Return the share of the run that is done, 0..1, by steps or by time, whichever is
        larger."""
        by_time = 0.0
        if self.config.max_minutes > 0:
            by_time = self.seconds / (60 * self.config.max_minutes)
        return min(1.0, max(self.step_index / self.config.max_steps, by_time))

    def _learning_rate(self) -> float:
        fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress()))
        return self.config.learning_rate * fall * min(1.0, (self.step_index + 1) / 100)

    def _draw(self, count: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [B], first tokens [B], and features [B, 298] of another utterance of the
        same voice, with noise."""
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
        """Make one update, and return losses as tensors, without synchronisation with the
        device."""
        # seeds dropout, so that a resumed run repeats it
        torch.manual_seed(self.config.seed + self.step_index)
        for group in self.generator_optimizer.param_groups:
            group["lr"] = self._learning_rate()
        total, logs = self._acoustic_loss()
        if self.config.renderer_every and self.step_index % self.config.renderer_every == 0:
            loss, more = self._renderer_loss()
            total, logs = total + loss, logs | more
        self.generator_optimizer.zero_grad(set_to_none=True)
        total.backward()
        for name in ("acoustic", "renderer"):  # separately: else each would shrink the other's step
            parameters = [
                p for p in getattr(self.generator, name).parameters() if p.grad is not None
            ]
            if parameters:
                logs[f"{name}_norm"] = nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
        self.generator_optimizer.step()
        # The decay starts low, so that the random initialisation soon leaves the average.
        decay = min(self.config.ema_decay, (1 + self.step_index) / (10 + self.step_index))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.generator.parameters()), 1 - decay
            )
        self.step_index += 1
        return logs

    def _acoustic_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        rows, first, speaker = self._draw(
            config.per_device_train_batch_size, config.acoustic_tokens
        )
        crop = self.data.crop(rows, first, config.acoustic_tokens)
        waves = self.data.wave(crop)
        with torch.no_grad():
            target = self.mel(waves).transpose(1, 2)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.bf16):
            predicted = self.generator.acoustic(crop.tokens, crop.mask, speaker)
            states = None if self.state_layer is None else self.state_layer(predicted.inner)
        has_states = self.known[rows, None]
        total, logs = acoustic_loss(predicted, target, crop, speaker, has_states)
        log_mel = torch.where(has_states > 0, predicted.log_mel, target)
        if self.words is not None:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=config.bf16):
                words = self.words(log_mel, target, crop.frame_mask)
            total, logs = total + config.words_weight * words, logs | {"words": words.detach()}
        if self.voices is not None:
            voices = self.voices(log_mel, target, crop.frame_mask, waves)
            total, logs = total + config.voice_weight * voices, logs | {"voices": voices.detach()}
        if states is None or self.data.states is None:
            return total, logs
        truth = (self.data.states[crop.positions].float() - self.state_mean) / self.state_spread
        error = ((states.float() - truth).square().mean(-1) * crop.mask).sum() / crop.mask.sum()
        return total + STATE_WEIGHT * error, logs | {"states": error.detach()}

    def _renderer_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted mel distance of waves rendered from true spectrograms, and values
        to log."""
        config, margin = self.config, CONTEXT_TOKENS * self.data.samples_per_token
        rows, first, _ = self._draw(config.renderer_batch_size, config.segment_tokens)
        crop = self.data.crop(
            rows, first - CONTEXT_TOKENS, config.segment_tokens + 2 * CONTEXT_TOKENS
        )
        whole = self.data.wave(crop)
        real = whole[:, margin : whole.shape[1] - margin]
        noise = torch.randn(whole.shape, device=self.device, generator=self.random)
        phase = torch.rand(len(rows), 1, device=self.device, generator=self.random)
        renderer, pitch = self.generator.renderer, Pitch(crop.log_f0, crop.voiced)
        cycles = renderer.cycles(crop.log_f0) + phase
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.bf16):
            log_mel = self.mel(whole).transpose(1, 2)
            fake = renderer(log_mel, pitch, crop.frame_mask, noise, cycles)
        mel = self.mel_distance(fake[:, margin : fake.shape[1] - margin], real)
        return MEL_WEIGHT * mel, {"mel": mel.detach()}

    def mel_distance(self, fake: Tensor, real: Tensor) -> Tensor:
        """Return the mean absolute difference of the log-mels of waves [B, samples] at
        MEL_RESOLUTIONS (natural log)."""
        return torch.stack([F.l1_loss(mel(fake), mel(real)) for mel in self.mels]).mean()

    @torch.no_grad()
    def validate(self, limit: int = 64) -> dict[str, float]:
        """Return metrics of the averaged weights: mel distance of the wave made from tokens
        (mel) and from the true spectrogram (mel_copy); errors of the predicted log-mel, F0 and
        voicing. limit: maximum number of validation rows."""
        sums: dict[str, float] = {}
        self.average.equalizer.forget()  # its weights have changed
        rows = self.validation_rows[:limit]
        for row in rows:
            crop = self.data.crop(row[None], row.new_zeros(1), int(self.data.lengths[row]))
            real, speaker = self.data.wave(crop), self.data.speaker[row][None]
            target, true_pitch = self.mel(real).transpose(1, 2), Pitch(crop.log_f0, crop.voiced)
            log_mel, pitch = self.average.predict(crop.tokens, crop.mask, speaker)
            mask = crop.frame_mask
            wave = self.average.renderer(log_mel, pitch, mask)
            copy = self.average.renderer(target, true_pitch, mask)
            has_states = self.known[row]
            f0_error = ((crop.log_f0 - pitch.log_f0).abs() * crop.voiced).sum()
            f0_error = f0_error / crop.voiced.sum().clamp_min(1)
            values = {
                "mel": self.mel_distance(wave, real),
                "mel_copy": self.mel_distance(copy, real),
                "log_mel_error": ((log_mel - target).abs() * has_states).mean() / has_states.mean(),
                "f0_error_semitones": f0_error * 12 / math.log(2),
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
            # the value of this run instead of the checkpoint's; the rate is set at every step
            group["weight_decay"] = self.config.weight_decay
        self.random.set_state(state["random"].cpu())
        self.step_index, self.seconds = state["step"], state["seconds"]


def started_from(source: str, data: VocoderData, device: torch.device) -> TokenVocoder | None:
    """Return the vocoder of `init_from`, or None if it is empty. Raises ConfigError if its token
    rate is not that of the pack."""
    if not source:
        return None
    start = TokenVocoder.from_pretrained(resolve(source, "vocoder"), device)
    if start.token_rate != data.token_rate:
        raise ConfigError(
            f"init_from {source}: reads {start.token_rate} tokens a second, but the pack has "
            f"{data.token_rate}; omit init_from, or start from a vocoder of that rate"
        )
    return start


def calibration_tokens(data: VocoderData) -> tuple[int, ...]:
    """Return tokens of training utterances spread over the pack, CALIBRATION_SECONDS of them
    (fewer in a smaller pack)."""
    rows = (~data.validation).nonzero()[:, 0].tolist()
    wanted = CALIBRATION_SECONDS * data.token_rate
    drawn: list[int] = []
    parts = min(16, len(rows))
    for i in range(parts):
        row = rows[i * len(rows) // parts]
        start = int(data.starts[row])
        drawn += data.tokens[start : start + int(data.lengths[row])].tolist()
        if len(drawn) >= wanted:
            break
    return tuple(drawn[:wanted])


def acoustic_loss(
    said: Acoustics,
    log_mel: Tensor,
    crop: Crop,
    speaker: Tensor,
    known: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the acoustic model, and values to log: L1 of the log-mel [B, F, bands],
    smooth L1 of the pitch's deviation from the voice's mean (unvoiced frames at a tenth),
    cross-entropy of voicing. Frames outside the rows do not count, nor do bands whose `known`
    [B, 1, bands] is 0, because the recording's sampling rate does not reach them."""
    keep, voiced = crop.frame_mask, crop.voiced
    error = ((said.log_mel - log_mel).abs() * known).sum(-1) / known.sum(-1)  # [B, F]
    spectrum = (error * keep).sum() / keep.sum()
    mean, spread = pitch_statistics(speaker)
    target = ((crop.log_f0 - mean) / spread).clamp(-4.0, 4.0)
    weight = keep * (0.1 + 0.9 * voiced)
    contour = F.smooth_l1_loss(said.deviation, target, reduction="none", beta=0.5)
    contour = (contour * weight).sum() / weight.sum()
    voicing = F.binary_cross_entropy_with_logits(said.voicing, voiced, reduction="none")
    voicing = (voicing * keep).sum() / keep.sum()
    logs = {"log_mel": spectrum.detach(), "pitch": contour.detach(), "voicing": voicing.detach()}
    return spectrum + 0.5 * contour + 0.5 * voicing, logs
