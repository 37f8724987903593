"""Adapters from speech tokenizers of other projects to `SpeechTokenizer`: S³ and X-codec2. For
codecs with layers see `rvq`.

A waveform is padded with zeros to whole tokens, so that there are ceil(seconds · rate_hz). On a
GPU, waveforms with the same number of tokens share a batch; none is padded to the length of
another. Packages are imported only on use. Weights are read without unpickling.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.errors import AssetError, AudioError, CheckpointError, ConfigError
from dcar.home import cache_folder
from dcar.sources.hub import from_hub, read_weights
from dcar.tokens.base import batch_samples, encoder_input, fitted, full_float32, in_batches
from heads.checkpoint import tensors_checksum

S3_PIP = "pip install s3tokenizer==0.3.0 torchaudio"


class CodecTokenizer:
    """Base of the adapters: checks, resampling, padding to whole tokens."""

    name: str
    vocab_size: int
    rate_hz: float
    max_seconds: float

    def __init__(self, model: Any, device: str, sample_rate: int = ENCODER_SAMPLE_RATE) -> None:
        self.model = model.to(device).eval()
        self.device, self.sample_rate = device, sample_rate
        self.checksum = tensors_checksum(self.model.state_dict())

    def encode(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        """Return codes [T] int64 of every waveform [samples] float32 mono; T = ceil(seconds ·
        rate_hz)."""
        hop = round(self.sample_rate / self.rate_hz)
        ready = [
            encoder_input(self.name, wave, sample_rate, self.max_seconds, hop, self.sample_rate)
            for wave in waves
        ]
        lengths = [count * hop for _, count in ready]

        def read(rows: list[int]) -> np.ndarray:
            values = np.stack([fitted(ready[i][0], lengths[i]) for i in rows])
            return self._encode(values, lengths[rows[0]] // hop)

        return in_batches(lengths, batch_samples(self.device, self.sample_rate), read, equal=True)

    def _encode(self, waves: np.ndarray, count: int) -> np.ndarray:
        """Return the codes of waveforms [B, samples] of `count` tokens each; see `codes`."""
        with torch.inference_mode(), full_float32():
            codes = self.codes(torch.from_numpy(waves), count)
        if (length := codes.shape[-1]) < count:
            raise AudioError(
                f"{self.name}: made {length} tokens, expected {count}; check that this is the "
                "right model file"
            )
        return codes[..., :count].cpu().numpy().astype(np.int64)

    def codes(self, waves: torch.Tensor, count: int) -> torch.Tensor:
        """Return codes [B, ≥ count], or [B, layers, ≥ count] for an RVQ codec, of waveforms of
        whole tokens, float32 [B, samples] at `sample_rate`."""
        raise NotImplementedError

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the waveform at `sample_rate` of codes [T] int64. Only the codecs that
        `dcar.vocoder.load` names implement it."""
        raise NotImplementedError


S3_RATES = {
    "speech_tokenizer_v1": 50.0,
    "speech_tokenizer_v1_25hz": 25.0,
    "speech_tokenizer_v2_25hz": 25.0,
}


class S3Tokenizer(CodecTokenizer):
    """Supervised semantic tokens of CosyVoice through the package `s3tokenizer`: v1 with 4096
    codes at 50 or 25 Hz, v2 with FSQ, 3⁸ = 6561 codes at 25 Hz."""

    max_seconds = 30.0

    def __init__(self, spec: str, device: str = "cpu") -> None:
        """Load the model that spec, NAME[@FILE], names.

        NAME is one of S3_RATES; FILE is its `.onnx` as published by CosyVoice, or a `.pt` of the
        package's state dict. Without FILE the package's cache is used, or its download. Sizes are
        read from the weights. Raises ConfigError for an unknown NAME, AssetError for a missing
        package or file, CheckpointError for weights of another model.
        """
        name, _, file = spec.partition("@")
        if name not in S3_RATES:
            raise ConfigError(f"s3:{name}: unknown S³ tokenizer; choose {', '.join(S3_RATES)}")
        try:
            import s3tokenizer
            from s3tokenizer.model import ModelConfig
            from s3tokenizer.model import S3Tokenizer as V1
            from s3tokenizer.model_v2 import ModelConfig as ModelConfigV2
            from s3tokenizer.model_v2 import S3TokenizerV2 as V2
        except ImportError as error:
            raise AssetError(
                f"s3:{name} needs the package s3tokenizer ({error}); run: {S3_PIP}"
            ) from error
        try:  # without FILE the package downloads the model and checks its SHA-256
            path = Path(file or s3tokenizer._download(name, str(cache_folder("s3tokenizer"))))
        except (OSError, RuntimeError) as error:
            raise AssetError(
                f"s3:{name}: cannot be downloaded ({error}); get {s3tokenizer._MODELS[name]} on a "
                f"machine with network and write tokenizer=s3:{name}@FILE"
            ) from error
        if not path.is_file():
            raise AssetError(
                f"{path}: no such file; download {s3tokenizer._MODELS[name]} and write "
                f"tokenizer=s3:{name}@FILE"
            )
        if path.suffix.lower() == ".onnx":
            weights = s3tokenizer.onnx2torch(str(path), None, False)
        else:
            weights = read_weights(path, f"the state dict of {name}")
        try:
            size, mels = weights["encoder.conv1.weight"].shape[:2]
            blocks = [int(k.split(".")[2]) for k in weights if k.startswith("encoder.blocks.")]
            sizes = {
                "n_mels": mels,
                "n_audio_state": size,
                "n_audio_head": size // 64,
                "n_audio_layer": 1 + max(blocks),
            }
            if name.startswith("speech_tokenizer_v2"):
                model, self.vocab_size = V2(name, ModelConfigV2(**sizes)), 3**8
            else:
                self.vocab_size = weights["quantizer._codebook.embed"].shape[0]
                model = V1(name, ModelConfig(**sizes, n_codebook_size=self.vocab_size))
            model.load_state_dict(weights, strict=True)
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: does not contain the weights of {name} "
                f"({str(error).splitlines()[0][:120]}); it may be another version's file"
            ) from error
        super().__init__(model, device)
        self.name = name.replace("speech_tokenizer", "s3")
        self.rate_hz, self.mels = S3_RATES[name], mels
        self._mel = s3tokenizer.log_mel_spectrogram

    def codes(self, waves: torch.Tensor, count: int) -> torch.Tensor:
        # one by one, because a spectrum is scaled by its own peak
        mels = torch.stack([self._mel(wave, n_mels=self.mels) for wave in waves])
        lengths = torch.full((len(mels),), mels.shape[2])
        codes, lengths = self.model.quantize(mels.to(self.device), lengths.to(self.device))
        return codes[:, : int(lengths[0])]


class XCodec2Tokenizer(CodecTokenizer):
    """X-codec2 (LLaSA): one FSQ codebook of 4⁸ = 65536 codes at 50 Hz, through
    `transformers.Xcodec2Model`."""

    max_seconds = 60.0

    def __init__(self, source: str | Path, device: str = "cpu") -> None:
        """Load the model. source: folder or hub name of the transformers version
        (`HKUSTAudio/xcodec2-hf`)."""
        from transformers import SeamlessM4TFeatureExtractor, Xcodec2Model

        model: Any = from_hub(Xcodec2Model.from_pretrained, source, "an X-codec2 model")
        self.rate_hz = model.config.sampling_rate / model.config.hop_length
        self.vocab_size = int(np.prod(model.config.quantization_levels))
        super().__init__(model, device, model.config.sampling_rate)
        # as X-codec2 was trained: 80 Kaldi filters, two frames per token. The extractor of the
        # transformers version computes the same, but needs torchaudio.
        self.name, self.extractor = "xcodec2", SeamlessM4TFeatureExtractor()
        self.hop = model.config.hop_length

    def codes(self, waves: torch.Tensor, count: int) -> torch.Tensor:
        # transformers pads past the end by up to one token
        waves = torch.nn.functional.pad(waves, (0, self.hop))
        edges = list(torch.nn.functional.pad(waves, (self.hop // 2, self.hop // 2)).numpy())
        features = self.extractor(edges, sampling_rate=self.sample_rate, return_tensors="pt")
        inputs = features.input_features.to(self.device)
        encoded = self.model.encode(waves[:, None].to(self.device), input_features=inputs)
        return encoded.audio_codes[:, 0]

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return self.model.decode(audio_codes=codes[None, None].to(self.device)).audio_values
