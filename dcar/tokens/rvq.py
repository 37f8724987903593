"""Codecs with residual codebooks: the first layer gives the speech tokens, the others refine it.

A residual vector quantiser encodes a frame in `layers` codes, each of which quantises the residual
of the layers before it (Zeghidour et al. 2021, arXiv 2107.03312). A decoder generates the first
layer; `dcar prepare … residual=true` stores the others. The codes of a layer do not depend on the
number of layers, so tokens of `codec:NAME` and of `codec:NAME@8` are the same.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcar.errors import AssetError, CheckpointError, ConfigError, DataError
from dcar.sources.hub import from_hub, read_weights
from dcar.tokens.codec import CodecTokenizer
from heads.checkpoint import read_config

SPEECHTOKENIZER_PIP = "pip install speechtokenizer==1.0.1 torchaudio"


class RVQCodec(CodecTokenizer):
    """Codec with `layers` codebooks of `vocab_size` codes each.

    padded_from: least number of frames from which utterances of several lengths share a padded
    batch of the decoder; infinite if its convolutions look ahead, so that padding would change the
    end of the sound.
    """

    max_seconds = 60.0
    padded_from: float = math.inf

    def __init__(
        self, source: str, model: Any, sample_rate: int, hop: int, vocab_size: int, available: int,
        layers: int, device: str,
    ) -> None:  # fmt: skip
        """Store the model and its sizes.

        source: folder or name, for messages. hop: samples per frame. available: number of layers
        that the model has. layers: number of layers to use. Raises ConfigError for more layers than
        the model has.
        """
        if not 1 <= layers <= available:
            raise ConfigError(
                f"{source}@{layers}: the codec has {available} layers; write @1 to @{available}"
            )
        super().__init__(model, device, sample_rate)
        self.layers, self.vocab_size, self.hop = layers, vocab_size, hop
        self.rate_hz = sample_rate / hop

    def encode(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        """Return the codes [T] int64 of the first layer; see `encode_layers`."""
        return [codes[0] for codes in self.encode_layers(waves, sample_rate)]

    def encode_layers(self, waves: list[np.ndarray], sample_rate: int) -> list[np.ndarray]:
        """Return the codes [layers, T] int64 of every waveform [samples] float32 mono.

        T = ceil(seconds · rate_hz). Raises AudioError for waveforms that cannot be encoded.
        """
        return super().encode(waves, sample_rate)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the waveform [samples] of codes [T] int64 of the first layer alone."""
        return self.decode_layers(codes[None, None])[0]

    @torch.inference_mode()
    def decode_layers(self, codes: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the waveforms [B, samples] float32 of codes [B, L, T] int64, L ≤ layers.

        Each waveform equals the one that is decoded from its row alone. samples = T · sample_rate /
        rate_hz; samples after an utterance's end are zero.

        lengths: frames [B] of each utterance; T if it is not given. Codes after them are ignored.
        Raises DataError for more layers than the codec was loaded with.
        """
        batch, depth, frames = codes.shape
        if depth > self.layers:
            raise DataError(
                f"{self.name}: {depth} layers of codes, but the codec was loaded with "
                f"{self.layers}; write @{depth} after its name"
            )
        counts = [frames] * batch if lengths is None else lengths.tolist()
        inside = torch.arange(frames) < torch.tensor(counts)[:, None]  # [B, T]
        inside = inside.to(self.device)
        codes = codes.to(self.device).where(inside[:, None], 0)
        sound = torch.zeros(batch, frames * self.hop, device=self.device)
        for rows in self._batches(counts):
            longest = max(counts[row] for row in rows)
            wave = self.sound(codes[rows, :, :longest]).float()[:, : longest * self.hop]
            sound[rows, : wave.shape[1]] = wave
        return sound * inside.repeat_interleave(self.hop, dim=1)

    def _batches(self, counts: Sequence[int]) -> Iterable[list[int]]:
        """Return groups of rows that may be decoded together; rows of 0 frames are left out.

        counts: number of frames of every row.
        """
        batches: dict[float, list[int]] = defaultdict(list)
        for row, count in enumerate(counts):
            if count:
                batches[count if count < self.padded_from else math.inf].append(row)
        return batches.values()

    def sound(self, codes: Tensor) -> Tensor:
        """Return the model's waveforms [B, samples] of codes [B, L, T] int64 on its device."""
        raise NotImplementedError


def parse_layers(spec: str) -> tuple[str, int]:
    """Return folder or name, and number of layers, of NAME[@LAYERS]; 1 layer if no number is
    given, or the folder's own name ends in one."""
    source, _, layers = spec.rpartition("@")
    if source and layers.isdecimal() and not Path(spec).exists():
        return source, int(layers)
    return spec, 1


class SpeechTokenizerCodec(RVQCodec):
    """SpeechTokenizer (Zhang et al. 2023, arXiv 2308.16692): up to 8 layers of 1,024 codes, 50 Hz.

    The first layer is distilled from HuBERT.
    """

    name = "speechtokenizer-rvq1"

    def __init__(self, spec: str | Path, device: str = "cpu") -> None:
        """Load the model. spec: FOLDER[@LAYERS] with the published `config.json` and
        `SpeechTokenizer.pt`.

        Raises AssetError if the files or the package are missing, CheckpointError if the files do
        not match.
        """
        source, layers = parse_layers(str(spec))
        folder = Path(source)
        if not (folder / "config.json").is_file():
            raise AssetError(
                f"{folder}: has no config.json of SpeechTokenizer; run `hf download "
                "fnlp/SpeechTokenizer --local-dir FOLDER` and give the folder that contains "
                "config.json and SpeechTokenizer.pt"
            )
        try:
            from speechtokenizer.model import SpeechTokenizer as Model
        except ImportError as error:
            raise AssetError(
                f"{folder}: SpeechTokenizer needs its package ({error}); run: {SPEECHTOKENIZER_PIP}"
            ) from error
        config = read_config(folder, "copy config.json and SpeechTokenizer.pt again")
        weights = read_weights(folder / "SpeechTokenizer.pt", "SpeechTokenizer's state dict")
        try:
            model = Model(config)
            model.load_state_dict(weights)
            hop = math.prod(config["strides"])
            sizes = config["sample_rate"], hop, config["codebook_size"], config["n_q"]
        except (RuntimeError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{folder}: the weights do not fit config.json "
                f"({str(error).splitlines()[0][:120]}); copy both files again"
            ) from error
        super().__init__(source, model, *sizes, layers, device)

    def codes(self, waves: Tensor, count: int) -> Tensor:
        return self.model.encode(waves[:, None].to(self.device), n_q=self.layers).transpose(0, 1)

    def sound(self, codes: Tensor) -> Tensor:
        return self.model.decode(codes.transpose(0, 1))[:, 0]


class EncodecCodec(RVQCodec):
    """EnCodec (Défossez et al. 2022, arXiv 2210.13438): up to 32 layers of 1,024 codes, 75 Hz."""

    name = "encodec-rvq1"

    def __init__(self, source: str, model: Any, layers: int, device: str) -> None:
        config = model.config
        if config.audio_channels != 1 or config.normalize or config.chunk_length_s is not None:
            raise CheckpointError(
                f"{source}: this EnCodec is stereo, normalises its input or cuts it; use the 24 "
                "kHz model, facebook/encodec_24khz"
            )
        sizes = config.sampling_rate, config.hop_length, config.codebook_size
        super().__init__(source, model, *sizes, config.num_quantizers, layers, device)
        layers_of = model.quantizer.get_num_quantizers_for_bandwidth
        self.bandwidth = min(b for b in config.target_bandwidths if layers_of(b) >= layers)
        if _causal(config) and config.norm_type == "weight_norm":
            # the reflected padding at the start looks ahead by less than the kernel
            self.padded_from = config.kernel_size

    def codes(self, waves: Tensor, count: int) -> Tensor:
        encoded = self.model.encode(waves[:, None].to(self.device), bandwidth=self.bandwidth)
        return encoded.audio_codes[0, :, : self.layers]

    def sound(self, codes: Tensor) -> Tensor:
        return self.model.decode(codes[None], [None]).audio_values[:, 0]


class MimiCodec(RVQCodec):
    """Mimi (Défossez et al. 2024, arXiv 2410.00037): up to 32 layers of 2,048 codes, 12.5 Hz.

    The first layer is distilled from WavLM; the others quantise the same latents apart from it.
    """

    name = "mimi-rvq1"

    def __init__(self, source: str, model: Any, layers: int, device: str) -> None:
        config = model.config
        hop = round(config.sampling_rate / config.frame_rate)
        sizes = config.sampling_rate, hop, config.codebook_size
        super().__init__(source, model, *sizes, config.num_quantizers, layers, device)
        if _causal(config) and config.pad_mode == "constant":
            self.padded_from = 1

    def codes(self, waves: Tensor, count: int) -> Tensor:
        encoded = self.model.encode(waves[:, None].to(self.device), num_quantizers=self.layers)
        return encoded.audio_codes

    def sound(self, codes: Tensor) -> Tensor:
        return self.model.decode(codes).audio_values[:, 0]


class DacCodec(RVQCodec):
    """DAC (Kumar et al. 2023, arXiv 2306.06546): up to 9, 12 or 32 layers of 1,024 codes; 50 Hz at
    16 kHz, 75 Hz at 24 kHz, 86.1 Hz at 44.1 kHz."""

    name = "dac-rvq1"

    def __init__(self, source: str, model: Any, layers: int, device: str) -> None:
        config = model.config
        sizes = config.sampling_rate, config.hop_length, config.codebook_size
        super().__init__(source, model, *sizes, config.n_codebooks, layers, device)

    def codes(self, waves: Tensor, count: int) -> Tensor:
        encoded = self.model.encode(waves[:, None].to(self.device), n_quantizers=self.layers)
        return encoded.audio_codes

    def sound(self, codes: Tensor) -> Tensor:
        return self.model.decode(audio_codes=codes).audio_values


def _causal(config: Any) -> bool:
    """Return True if the convolutions of an EnCodec or a Mimi do not look ahead."""
    return config.use_causal_conv and config.trim_right_ratio == 1


MODELS = {"encodec": EncodecCodec, "mimi": MimiCodec, "dac": DacCodec}
"""Codecs of transformers, by `model_type` of their config.json."""


def load_codec(spec: str, device: str = "cpu") -> RVQCodec:
    """Return the codec of transformers at FOLDER_OR_NAME[@LAYERS].

    Raises AssetError or CheckpointError if it cannot be loaded, ConfigError for another kind of
    model or for more layers than it has.
    """
    from transformers import AutoConfig, AutoModel

    source, layers = parse_layers(spec)
    kind = from_hub(AutoConfig.from_pretrained, source, "a codec").model_type
    if kind not in MODELS:
        raise ConfigError(f"codec:{source}: is a {kind}; choose a model of {', '.join(MODELS)}")
    model = from_hub(AutoModel.from_pretrained, source, "a codec", dtype=torch.float32)
    return MODELS[kind](source, model, layers, device)
