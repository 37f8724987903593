"""The vocoder: speech tokens + a voice -> 24 kHz waveform, on one CPU thread far faster than real time.

    tokens + voice ── acoustic model ──>        log-mel, F0, voicing          (dcar/vocoder/acoustic.py)
    log-mel + voice ── equaliser ──>            log-mel, as bright as the prompt  (dcar/vocoder/equalizer.py)
    log-mel + pitch ── renderer, 100 Hz ── inverse STFT ──> wave              (dcar/vocoder/renderer.py)

Two networks, because they learn different things from different amounts of data. What a token sounds like in a voice
takes hours of speech, but a spectrogram is target enough: no waves, no phases, so a training step is cheap. How a
spectrogram becomes a wave is the same for all voices and mostly signal processing. Blocks: Vocos (Siuzdak 2023).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dcar.errors import CheckpointError, DataError
from dcar.vocoder.acoustic import AcousticModel, VocoderConfig, absolute_pitch
from dcar.vocoder.equalizer import Equalizer
from dcar.vocoder.renderer import Pitch, Renderer
from dcar.vocoder.streaming import StreamingVocoder
from heads.checkpoint import STORED, wrong_types

FORMAT = "dcar-vocoder-2"


class TokenVocoder(nn.Module):
    """Speech tokens and speaker features to waveform; see the module docstring."""

    def __init__(self, config: VocoderConfig | None = None):
        super().__init__()
        self.config = config = config or VocoderConfig()
        self.sample_rate, self.token_rate, self.vocab_size = config.sample_rate, config.token_rate, config.vocab_size
        self.acoustic = AcousticModel(config)
        self.renderer = Renderer(config)
        self.equalizer = Equalizer(config)

    def train(self, mode: bool = True) -> TokenVocoder:
        if mode:
            self.equalizer.forget()
        return super().train(mode)

    def predict(self, tokens: Tensor, mask: Tensor, speaker: Tensor) -> tuple[Tensor, Pitch]:
        """Log-mel [B, F, bands] and pitch [B, F] of utterances: tokens [B, T], mask [B, T] (1 = real token), speaker
        [B, 298]."""
        said = self.acoustic(tokens, mask, speaker)
        log_f0 = absolute_pitch(said.deviation, speaker)
        # Padding holds the last real value, so that a row's end does not depend on what stands after it.
        last = (mask.sum(1, keepdim=True).long() * self.config.frames_per_token - 1).clamp_min(0)
        frame = torch.arange(log_f0.shape[1], device=log_f0.device).expand_as(log_f0).minimum(last)
        log_mel = said.log_mel + self.equalizer(self.acoustic, speaker)[:, None]
        return log_mel, Pitch(log_f0.gather(1, frame), (said.voicing > 0).float())

    def forward(self, tokens: Tensor, lengths: Tensor, speaker: Tensor) -> Tensor:
        """Waveform [B, T * samples_per_token]: tokens [B, T] int64 (any id as padding), lengths [B], speaker [B, 298].

        Row b is silent after lengths[b] tokens, and equals what it gives alone. Raises DataError on wrong
        shapes, ids outside the vocabulary, or speaker features that are not finite.
        """
        config = self.config
        if tokens.dim() != 2 or lengths.shape != tokens.shape[:1]:
            raise DataError(f"vocoder: tokens {list(tokens.shape)} and lengths {list(lengths.shape)} do not agree")
        self.check_speaker(speaker, len(tokens))
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        self.check_ids(tokens[real])
        tokens, mask = tokens.masked_fill(~real, 0), real.float()
        log_mel, pitch = self.predict(tokens, mask, speaker)
        return self.renderer(log_mel, pitch, mask.repeat_interleave(config.frames_per_token, dim=1))

    def check_speaker(self, speaker: Tensor, rows: int) -> None:
        """DataError if these are no voice features of so many utterances."""
        if speaker.shape != (rows, self.config.speaker_dim) or not bool(torch.isfinite(speaker).all()):
            raise DataError(f"vocoder: expected finite speaker features [{rows}, {self.config.speaker_dim}], got "
                            f"{list(speaker.shape)}; make them with speaker_features(wave, sample_rate, embedding)")

    def check_ids(self, tokens: Tensor) -> None:
        """DataError for ids outside the vocabulary: tokens [N]."""
        wrong = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)]
        if len(wrong):
            raise DataError(f"vocoder: token {int(wrong[0])} is outside 0..{self.config.vocab_size - 1}; "
                            "strip EOS and use the tokenizer that this vocoder was trained on")

    def check_tokenizer(self, identity: str) -> None:
        """CheckpointError if the weights were trained on another tokenizer than `identity` ("name@checksum", as a
        decoder's config holds it). Tokens of another tokenizer would be spoken as noise, without an error."""
        trained, given = self.config.tokenizer_checksum, identity.rpartition("@")[2]
        if trained and given and trained != given:
            raise CheckpointError(f"this vocoder was trained on the tokenizer {trained[:12]}…, the decoder on "
                                  f"{given[:12]}…: use the vocoder of the decoder's tokenizer, or train one with `dcar "
                                  "train-vocoder`")

    @torch.inference_mode()
    def synthesize(self, token_lists: Sequence[Sequence[int]], speaker: Tensor | np.ndarray) -> list[np.ndarray]:
        """One float32 wave per utterance, samples_per_token samples a token (none for an empty list); speaker [B, 298].

        On a CPU each is spoken by itself, which is faster there (dcar/vocoder/streaming.py). On other devices they are
        padded to the longest of the call: pass utterances of similar length together.
        """
        device = self.renderer.head.weight.device
        speaker = torch.as_tensor(speaker, dtype=torch.float32, device=device)
        lengths = [len(t) for t in token_lists]
        if speaker.shape[:1] != (len(lengths),):
            raise DataError(f"vocoder: {len(lengths)} utterances but speaker features {list(speaker.shape)}")
        if not any(lengths):
            return [np.zeros(0, np.float32) for _ in lengths]
        training = self.training
        if device.type == "cpu":
            alone = zip(token_lists, speaker, strict=True)
            spoken = [StreamingVocoder(self, row).push(ids, last=True) for ids, row in alone]
        else:
            tokens = pad_sequence([torch.as_tensor(ids, dtype=torch.int64) for ids in token_lists], batch_first=True)
            waves = self.eval()(tokens.to(device), torch.tensor(lengths, device=device), speaker).clamp(-1.0, 1.0)
            samples = [n * self.config.samples_per_token for n in lengths]
            spoken = [wave[:n].copy() for wave, n in zip(waves.cpu().numpy(), samples, strict=True)]
        if training:
            self.train()
        return spoken

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write config.json and model.safetensors (fp16 by default: half the size, no audible difference)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": FORMAT})
        text = json.dumps({"format": FORMAT, **asdict(self.config)}, indent=2)
        text = re.sub(r"\[[^]]*\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)  # a line for each list
        (folder / "config.json").write_text(text + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device = "cpu") -> TokenVocoder:
        """Read what `save_pretrained` wrote, as fp32 and in eval mode. Raises CheckpointError on any difference."""
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
            weights = load_file(folder / "model.safetensors")
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: no readable vocoder (config.json and model.safetensors): "
                                  f"{error}") from error
        if not isinstance(config, dict) or config.pop("format", None) != FORMAT:
            raise CheckpointError(f"{folder}/config.json: not a {FORMAT} config; is this another model's folder?")
        config.setdefault("calibration_tokens", [])  # vocoders from before it
        unknown = set(config) ^ {f.name for f in fields(VocoderConfig)}
        if unknown:
            raise CheckpointError(f"{folder}/config.json: unknown or missing keys {sorted(unknown)}")
        widest = max((max(value.shape, default=0) for value in weights.values()), default=0)
        wrong = wrong_types(VocoderConfig, config) or [
            f"{name}: {size}" for name, size in config.items() if name.endswith(("_size", "_fft", "_bands", "_dim"))
            and size > 2 * widest]  # would take memory for what the weights do not hold
        if wrong:
            raise CheckpointError(f"{folder}/config.json: impossible settings ({', '.join(wrong)[:200]}); copy it "
                                  "again")
        if odd := [f"{n} as {t.dtype}" for n, t in weights.items() if t.dtype not in STORED]:
            raise CheckpointError(f"{folder}/model.safetensors: weights that are no numbers of a model "
                                  f"({', '.join(odd[:3])}); copy it again")
        try:
            model = cls(VocoderConfig(**config))
            model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=True)
        except (CheckpointError, RuntimeError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
            raise CheckpointError(f"{folder}: weights do not fit the config: {error}") from error
        if not all(bool(torch.isfinite(value).all()) for value in model.state_dict().values()):
            raise CheckpointError(f"{folder}/model.safetensors: weights that are not finite; the file is damaged")
        return model.eval().to(device)
