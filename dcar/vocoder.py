"""The vocoder: speech tokens (50 Hz) + a voice -> 24 kHz waveform, on one CPU thread far faster than real time.

    tokens ── pitch predictor (whole utterance) ──> F0, voicing at 100 Hz
    tokens ── ConvNeXt at 50 Hz ── ×2 ── + pitch ── ConvNeXt at 100 Hz ──> spectral head ── inverse STFT ──> wave

Speech tokens carry words but hardly any pitch or voice. So pitch is predicted explicitly, relative to the
prompt's own mean and spread, and it drives the excitation: the head does not draw spectra from nothing, it
shapes two signals that are there already, a band-limited pulse train at F0 (complex gain per bin) and white
noise (real gain per bin). Blocks and head: Vocos (Siuzdak 2023); excitation: NSF (Wang et al. 2019).
Every layer is modulated by the voice (`speaker_features`), smoothly, so that unseen voices interpolate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.errors import CheckpointError, DataError
from dcar.vocoder_features import EMBEDDING_DIM, SPEAKER_DIM, same_istft, same_stft, speaker_features

__all__ = ["TokenVocoder", "VocoderConfig", "speaker_features"]

FORMAT = "dcar-vocoder-1"


@dataclass(frozen=True)
class VocoderConfig:
    """Shape of a `TokenVocoder`; saved beside its weights."""

    vocab_size: int = 1024  # speech token ids 0 .. vocab_size - 1
    sample_rate: int = 24_000
    token_rate: int = 50
    hop: int = 240  # samples per frame; frames run at sample_rate / hop, a multiple of token_rate
    n_fft: int = 1024
    window: int = 720  # Hann window, a multiple of hop, at least 3 hops so that its square overlap-adds to a constant
    speaker_dim: int = SPEAKER_DIM
    condition_size: int = 128
    hidden_size: int = 320
    ffn_size: int = 864
    token_dilations: tuple[int, ...] = (1, 3, 1)  # one ConvNeXt block each, at token rate
    frame_dilations: tuple[int, ...] = (1, 2, 1, 2, 1)  # one ConvNeXt block each, at frame rate
    pitch_hidden_size: int = 128
    pitch_ffn_size: int = 384
    pitch_dilations: tuple[int, ...] = (1, 2, 4, 8, 2, 1)
    kernel_size: int = 7
    tokenizer_checksum: str = ""  # of the tokenizer whose ids the weights were trained on; "" = not recorded

    def __post_init__(self) -> None:
        for name in ("token_dilations", "frame_dilations", "pitch_dilations"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.sample_rate % (self.token_rate * self.hop):
            raise CheckpointError(f"vocoder config: hop {self.hop} does not divide the samples of one token")
        if self.window % self.hop or self.window < 3 * self.hop or self.window > self.n_fft:
            raise CheckpointError(f"vocoder config: window {self.window} must be ≥ 3 hops, a multiple of it, ≤ n_fft")

    @property
    def frames_per_token(self) -> int:
        return self.sample_rate // (self.token_rate * self.hop)

    @property
    def samples_per_token(self) -> int:
        return self.sample_rate // self.token_rate


class Pitch(NamedTuple):
    """Pitch at frame rate."""

    log_f0: Tensor  # [B, F] natural log of Hz, defined everywhere
    voiced: Tensor  # [B, F] 0 or 1 (float)


class ConvNeXtBlock(nn.Module):
    """Depth-wise convolution, norm modulated by the voice, two-layer MLP, scaled residual: [B, T, C] -> [B, T, C]."""

    def __init__(self, size: int, ffn_size: int, condition_size: int, kernel_size: int, dilation: int, layers: int):
        super().__init__()
        padding = (kernel_size - 1) // 2 * dilation
        self.conv = nn.Conv1d(size, size, kernel_size, padding=padding, dilation=dilation, groups=size)
        self.norm = nn.LayerNorm(size, elementwise_affine=False, eps=1e-5)
        self.modulation = nn.Linear(condition_size, 2 * size)
        self.up, self.down = nn.Linear(size, ffn_size), nn.Linear(ffn_size, size)
        self.residual_scale = nn.Parameter(torch.full((size,), 1.0 / layers))
        nn.init.normal_(self.modulation.weight, std=0.02)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, mask: Tensor, condition: Tensor) -> Tensor:
        h = self.conv((x * mask).transpose(1, 2)).transpose(1, 2)
        scale, shift = self.modulation(condition)[:, None].chunk(2, dim=-1)  # [B, 1, C] each
        h = self.norm(h) * (1 + scale) + shift
        return x + self.residual_scale * self.down(F.gelu(self.up(h)))


def _blocks(size: int, ffn_size: int, dilations: Sequence[int], config: VocoderConfig) -> nn.ModuleList:
    return nn.ModuleList(
        ConvNeXtBlock(size, ffn_size, config.condition_size, config.kernel_size, d, len(dilations)) for d in dilations
    )


class VoiceCondition(nn.Module):
    """Speaker features [B, 298] -> condition [B, condition_size] (bounded, so an odd prompt cannot derail it)."""

    def __init__(self, config: VocoderConfig):
        super().__init__()
        size = config.condition_size
        self.layers = nn.Sequential(nn.Linear(config.speaker_dim, size), nn.SiLU(), nn.Linear(size, size), nn.Tanh())

    def forward(self, speaker: Tensor) -> Tensor:
        embedding = speaker[:, :EMBEDDING_DIM] * 16.0  # unit norm over 256 values -> unit variance
        mean, spread = (speaker[:, 256:257] - 5.1) / 0.4, (speaker[:, 257:258] - 0.2) / 0.1
        envelope = speaker[:, 258:] / 2.0
        return self.layers(torch.cat([embedding, mean, spread, envelope], dim=1).clamp(-5.0, 5.0))


class PitchPredictor(nn.Module):
    """Tokens of a whole utterance + voice -> F0 relative to the voice's mean and spread, and voicing."""

    def __init__(self, config: VocoderConfig):
        super().__init__()
        self.frames_per_token = config.frames_per_token
        self.condition = VoiceCondition(config)
        self.embedding = nn.Embedding(config.vocab_size, config.pitch_hidden_size)
        self.blocks = _blocks(config.pitch_hidden_size, config.pitch_ffn_size, config.pitch_dilations, config)
        self.norm = nn.LayerNorm(config.pitch_hidden_size)
        self.output = nn.Linear(config.pitch_hidden_size, 2 * config.frames_per_token)

    def forward(self, tokens: Tensor, mask: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor]:
        """Deviation from the mean in units of the spread [B, F], and voicing logits [B, F]."""
        condition, keep = self.condition(speaker), mask[..., None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, keep, condition)
        out = self.output(self.norm(x)).float().unflatten(2, (self.frames_per_token, 2)).flatten(1, 2)  # [B, F, 2]
        return out[..., 0], out[..., 1]


def pitch_statistics(speaker: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [B, 1] and spread [B, 1] of log F0 from speaker features; the spread is kept in a usable range."""
    return speaker[:, 256:257].float(), speaker[:, 257:258].float().clamp(0.05, 0.5)


class TokenVocoder(nn.Module):
    """Speech tokens and speaker features to waveform; see the module docstring."""

    window: Tensor
    noise: Tensor

    def __init__(self, config: VocoderConfig | None = None):
        super().__init__()
        self.config = config = config or VocoderConfig()
        self.pitch = PitchPredictor(config)
        self.condition = VoiceCondition(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_blocks = _blocks(config.hidden_size, config.ffn_size, config.token_dilations, config)
        self.to_frames = nn.Linear(config.hidden_size, config.hidden_size * config.frames_per_token)
        self.pitch_input = nn.Linear(2 + 2 * 6, config.hidden_size)
        self.frame_blocks = _blocks(config.hidden_size, config.ffn_size, config.frame_dilations, config)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, 3 * (config.n_fft // 2 + 1))
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.pitch.embedding.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)
        with torch.no_grad():  # start near the level of speech: pulses at 0.03, noise at 0.005
            pulse, phase, hiss = self.head.bias.chunk(3)
            pulse.fill_(-3.5), phase.zero_(), hiss.fill_(-5.3)
        pad = (config.n_fft - config.window) // 2
        window = F.pad(torch.hann_window(config.window), (pad, config.n_fft - config.window - pad))
        self.register_buffer("window", window, persistent=False)
        # Synthesis repeats: sample n of every utterance meets the same noise, whatever the batch.
        noise = torch.randn(1 << 17, generator=torch.Generator().manual_seed(24_000))
        self.register_buffer("noise", noise, persistent=False)

    @property
    def sample_rate(self) -> int:
        return self.config.sample_rate

    @property
    def token_rate(self) -> int:
        return self.config.token_rate

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def predict_pitch(self, tokens: Tensor, mask: Tensor, speaker: Tensor) -> Pitch:
        """Pitch [B, F] of whole utterances: tokens [B, T], mask [B, T] (1 = real token), speaker [B, 298]."""
        deviation, logits = self.pitch(tokens, mask, speaker)
        mean, spread = pitch_statistics(speaker)
        log_f0 = (mean + spread * deviation.clamp(-3.0, 3.0)).clamp(math.log(50.0), math.log(600.0))
        # Padding holds the last real value, so that a row's end does not depend on what stands after it.
        last = (mask.sum(1, keepdim=True).long() * self.config.frames_per_token - 1).clamp_min(0)
        frame = torch.arange(log_f0.shape[1], device=log_f0.device).expand_as(log_f0).minimum(last)
        return Pitch(log_f0.gather(1, frame), (logits > 0).float())

    def pulses(self, log_f0: Tensor, phase: Tensor | None = None) -> Tensor:
        """Band-limited pulse train of unit power [B, F * hop] at F0 [B, F]; phase: first phase in cycles [B, 1]."""
        hop, length = self.config.hop, log_f0.shape[1] * self.config.hop
        f0 = log_f0.float().exp()
        line = F.interpolate(f0[:, None], scale_factor=float(hop), mode="linear", align_corners=False)[:, 0]
        cycles = (line.double() / self.sample_rate).cumsum(1)
        if phase is not None:
            cycles = cycles + phase
        angle = (2 * math.pi * (cycles - cycles.floor())).float()
        harmonics = (0.46 * self.sample_rate / f0).floor().repeat_interleave(hop, dim=1)[:, :length]
        # Σ_{k=1..K} cos kθ = sin((K + ½)θ) / (2 sin ½θ) − ½, with its limit K near θ = 0
        half = torch.sin(angle / 2)
        near = half.abs() < 1e-4
        total = torch.sin((harmonics + 0.5) * angle) / (2 * torch.where(near, torch.ones_like(half), half)) - 0.5
        return torch.where(near, harmonics, total) * (2 / harmonics).sqrt()

    def generate(
        self,
        tokens: Tensor,
        mask: Tensor,
        speaker: Tensor,
        pitch: Pitch,
        noise: Tensor | None = None,
        phase: Tensor | None = None,
    ) -> Tensor:
        """Waveform [B, T * samples_per_token] for given pitch [B, F].

        tokens [B, T] int64; mask [B, T] float, 1 where a token is real (zeros may stand on both sides);
        speaker [B, 298]; noise [B, samples] and phase [B, 1] default to fixed ones, training passes random ones.
        """
        config = self.config
        condition, keep = self.condition(speaker), mask[..., None]
        x = self.embedding(tokens)
        for block in self.token_blocks:
            x = block(x, keep, condition)
        keep = mask.repeat_interleave(config.frames_per_token, dim=1)[..., None]  # [B, F, 1]
        x = self.to_frames(x).unflatten(2, (config.frames_per_token, config.hidden_size)).flatten(1, 2)
        x = x + self.pitch_input(self._pitch_features(pitch))
        for block in self.frame_blocks:
            x = block(x, keep, condition)
        out = self.head(self.norm(x))
        with torch.autocast(out.device.type, enabled=False):  # phases and spectra need fp32
            pulse_gain, phase_shift, noise_gain = (out.float() * keep).transpose(1, 2).chunk(3, dim=1)  # [B, bins, F]
            samples = mask.repeat_interleave(config.samples_per_token, dim=1).float()
            if noise is None:
                repeats = -(-samples.shape[1] // len(self.noise))
                noise = self.noise.repeat(repeats)[: samples.shape[1]].expand_as(samples)
            pulse_spectra = same_stft(self.pulses(pitch.log_f0, phase) * samples, self.window, config.hop)
            noise_spectra = same_stft(noise * samples, self.window, config.hop)
            gain = torch.polar(pulse_gain.clamp(-12.0, 3.0).exp(), phase_shift)
            spectra = pulse_spectra * gain + noise_spectra * noise_gain.clamp(-12.0, 3.0).exp()
            return same_istft(spectra * keep.transpose(1, 2), self.window, config.hop)

    def _pitch_features(self, pitch: Pitch) -> Tensor:
        """[B, F, 14]: level of log F0, voicing, and six octave-spaced sinusoids of log F0."""
        level = (pitch.log_f0.float()[..., None] - 5.1) / 0.4
        turns = level * (math.pi / 4 * 2.0 ** torch.arange(6, device=level.device))
        return torch.cat([level, pitch.voiced.float()[..., None], turns.sin(), turns.cos()], dim=-1)

    def forward(self, tokens: Tensor, lengths: Tensor, speaker: Tensor) -> Tensor:
        """Waveform [B, T * 480]: tokens [B, T] int64 (any id as padding), lengths [B], speaker [B, 298].

        Row b is silent after lengths[b] tokens, and equals what it gives alone. Raises DataError on wrong
        shapes, ids outside the vocabulary, or speaker features that are not finite.
        """
        config = self.config
        if tokens.dim() != 2 or lengths.shape != tokens.shape[:1]:
            raise DataError(f"vocoder: tokens {list(tokens.shape)} and lengths {list(lengths.shape)} do not agree")
        if speaker.shape != (len(tokens), config.speaker_dim) or not bool(torch.isfinite(speaker).all()):
            raise DataError(
                f"vocoder: expected finite speaker features [{len(tokens)}, {config.speaker_dim}], got "
                f"{list(speaker.shape)}; make them with dcar.vocoder.speaker_features(wave, sample_rate, embedding)"
            )
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        wrong = real & ((tokens < 0) | (tokens >= config.vocab_size))
        if bool(wrong.any()):
            raise DataError(
                f"vocoder: token {int(tokens[wrong][0])} is outside 0..{config.vocab_size - 1}; "
                "strip EOS and use the tokenizer that this vocoder was trained on"
            )
        tokens, mask = tokens.masked_fill(~real, 0), real.float()
        return self.generate(tokens, mask, speaker, self.predict_pitch(tokens, mask, speaker))

    def check_tokenizer(self, identity: str) -> None:
        """CheckpointError if the weights were trained on another tokenizer than `identity` ("name@checksum", as a
        decoder's config holds it). Tokens of another tokenizer would be spoken as noise, without an error."""
        trained, given = self.config.tokenizer_checksum, identity.rpartition("@")[2]
        if trained and given and trained != given:
            raise CheckpointError(
                f"this vocoder was trained on the tokenizer {trained[:12]}…, the decoder on {given[:12]}…: use the "
                "vocoder of the decoder's tokenizer, or train one with `dcar train-vocoder`"
            )

    @torch.inference_mode()
    def synthesize(self, token_lists: Sequence[Sequence[int]], speaker: Tensor | np.ndarray) -> list[np.ndarray]:
        """One float32 wave per utterance, 480 samples a token (none for an empty list); speaker [B, 298].

        Utterances are padded to the longest of the call: pass utterances of similar length together.
        """
        device = self.head.weight.device
        speaker = torch.as_tensor(speaker, dtype=torch.float32, device=device)
        lengths = [len(t) for t in token_lists]
        if speaker.shape[:1] != (len(lengths),):
            raise DataError(f"vocoder: {len(lengths)} utterances but speaker features {list(speaker.shape)}")
        if not any(lengths):
            return [np.zeros(0, np.float32) for _ in lengths]
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, ids in zip(tokens, token_lists, strict=True):
            row[: len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
        training = self.training
        self.eval()
        waves = self(tokens.to(device), torch.tensor(lengths, device=device), speaker).clamp(-1.0, 1.0).cpu().numpy()
        self.train(training)
        return [wave[: n * self.config.samples_per_token].copy() for wave, n in zip(waves, lengths, strict=True)]

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write config.json and model.safetensors (fp16 by default: half the size, no audible difference)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": FORMAT})
        (folder / "config.json").write_text(json.dumps({"format": FORMAT, **asdict(self.config)}, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device = "cpu") -> TokenVocoder:
        """Read what `save_pretrained` wrote, as fp32 and in eval mode. Raises CheckpointError on any difference."""
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
            weights = load_file(folder / "model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder}: no readable vocoder (config.json + model.safetensors): {error}"
            ) from error
        if not isinstance(config, dict) or config.pop("format", None) != FORMAT:
            raise CheckpointError(f"{folder}/config.json: not a {FORMAT} config; is this another model's folder?")
        unknown = set(config) ^ {f.name for f in fields(VocoderConfig)}
        if unknown:
            raise CheckpointError(f"{folder}/config.json: unknown or missing keys {sorted(unknown)}")
        model = cls(VocoderConfig(**config))
        try:
            model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"{folder}: weights do not fit the config: {error}") from error
        if not all(bool(torch.isfinite(value).all()) for value in model.state_dict().values()):
            raise CheckpointError(f"{folder}/model.safetensors: weights that are not finite; the file is damaged")
        return model.eval().to(device)
