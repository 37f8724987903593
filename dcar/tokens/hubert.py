"""HuBERT states and their k-means codes: the papers' speech tokens (HuBERT-Large, last layer, 2048
codes, 50 Hz).

    dcar fit-tokenizer encoder=hubert:facebook/hubert-large-ll60k vocab_size=2048 sample_hours=73 \\
        max_frames=1000000 \\
        standardize=false corpus=libritts path=/data/LibriTTS out=runs/hubert-km2048

Departures from fairseq's simple_kmeans: the waveform is padded with 80 zeros, so that there are
ceil(seconds · 50) states instead of one or two fewer, and states may be standardised before k-means
(`standardize`).

A GPU encodes waveforms in batches. HuBERT-Large normalises its convolutions frame by frame and
takes an attention mask, so batches of different lengths give the states of single waveforms up to
rounding (1e-4 in float32). HuBERT-base normalises its first convolution over the time of a
waveform, so padding would change every state; only waveforms with the same number of frames share a
batch.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.errors import CheckpointError, ConfigError
from dcar.sources.hub import from_hub
from dcar.tokens.base import batch_samples, encoder_input, fitted, full_float32, in_batches
from heads.checkpoint import tensors_checksum

MAX_SECONDS = 60.0
"""Longest waveform: attention is quadratic in the length, and longer recordings are cut earlier."""


class HubertEncoder:
    """Encoder that returns the states of one layer of a HuBERT model of `transformers`, in full
    float32 on any device."""

    kind, name = "hubert-kmeans", "hubert"
    max_seconds = MAX_SECONDS

    def __init__(self, source: str | Path, layer: int = -1, device: str = "cpu") -> None:
        """Load the model. `source`: folder or hub name. `layer`: counted as by
        `output_hidden_states`; 0 is the input of the first Transformer layer, -1 the last
        layer's output. Raises AssetError, CheckpointError, ConfigError."""
        from transformers import AutoFeatureExtractor, HubertModel

        self.source, self.device = str(source), device
        extractor: Any = from_hub(
            AutoFeatureExtractor.from_pretrained, source, "a HuBERT feature extractor"
        )
        model: Any = from_hub(
            HubertModel.from_pretrained, source, "a HuBERT model", dtype=torch.float32
        )
        self.model = model.to(device).eval()
        if extractor.sampling_rate != ENCODER_SAMPLE_RATE:
            raise CheckpointError(
                f"{source}: its feature extractor expects {extractor.sampling_rate} Hz, but "
                f"HuBERT reads {ENCODER_SAMPLE_RATE} Hz; correct sampling_rate in "
                "preprocessor_config.json"
            )
        self.normalize = bool(extractor.do_normalize)
        layers = model.config.num_hidden_layers
        if not -layers - 1 <= layer <= layers:
            raise ConfigError(
                f"hubert: there is no layer {layer} in {source}, only 0 to {layers}; choose one of "
                "these, or -1 for the last"
            )
        self.layer = layer % (layers + 1)
        self.state_size = int(model.config.hidden_size)
        stride, window = math.prod(model.config.conv_stride), 1
        for kernel, step in zip(
            reversed(model.config.conv_kernel), reversed(model.config.conv_stride), strict=True
        ):
            window = (window - 1) * step + kernel
        self.stride, self.padding = stride, window - stride
        self.rate_hz = ENCODER_SAMPLE_RATE / stride
        self.padded = model.config.feat_extract_norm == "layer"
        self.sha256 = tensors_checksum(self.model.state_dict())

    @property
    def identity(self) -> str:
        return f"hubert {self.sha256} layer={self.layer} normalize={self.normalize}"

    def card(self) -> dict[str, Any]:
        folder = Path(self.source)  # may be relative; the tokenizer is loaded from anywhere
        encoder = str(folder.absolute()) if folder.is_dir() else self.source
        return {"encoder": encoder, "layer": self.layer, "normalize": self.normalize}

    def __call__(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return the states [T, D] float32 of one waveform, T = ceil(seconds · rate_hz). Raises
        AudioError for bad audio or more than MAX_SECONDS."""
        return self.batch([wave], sample_rate)[0].cpu().numpy()

    def batch(self, waves: Sequence[np.ndarray], sample_rate: int) -> list[Tensor]:
        """Return the states [T, D] float32 of every waveform [samples], on the encoder's device.

        At most `batch_samples` are encoded at once. Raises AudioError for bad audio or more than
        MAX_SECONDS.
        """
        inputs = [self._input(wave, sample_rate) for wave in waves]
        lengths = [len(values) for values in inputs]
        most = batch_samples(self.device, ENCODER_SAMPLE_RATE)

        def read(rows: list[int]) -> list[Tensor]:
            return self._states([inputs[i] for i in rows])

        return in_batches(lengths, most, read, equal=not self.padded)

    def _input(self, wave: np.ndarray, sample_rate: int) -> Tensor:
        """Return the model's input for a waveform: float32 [stride · T + padding]."""
        wave, frames = encoder_input("hubert", wave, sample_rate, MAX_SECONDS, self.stride)
        if self.normalize:
            wave = (wave - wave.mean()) / np.sqrt(wave.var() + 1e-7)
        wave = fitted(wave, frames * self.stride + self.padding)
        return torch.from_numpy(wave.astype(np.float32))

    def _states(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the states [T, D] of inputs that share a batch."""
        lengths = torch.tensor([len(values) for values in inputs])
        values = pad_sequence(list(inputs), batch_first=True)  # [B, S]
        mask = None
        if len(lengths.unique()) > 1:
            mask = (torch.arange(values.shape[1]) < lengths[:, None]).long().to(self.device)
        with torch.inference_mode(), full_float32():
            output = self.model(values.to(self.device), mask, output_hidden_states=True)
        states = output.hidden_states[self.layer].float()
        frames = ((lengths - self.padding) // self.stride).tolist()
        return [row[:count] for row, count in zip(states, frames, strict=True)]


@lru_cache(maxsize=2)
def shared_hubert(source: str, layer: int, device: str) -> HubertEncoder:
    """Return the encoder with these settings, one per process: HuBERT-Large takes 1.3 GB."""
    return HubertEncoder(source, layer, device)


def parse_encoder(spec: str) -> tuple[str, int]:
    """Parse `hubert:SOURCE[@LAYER]` into (source, layer), the last layer if none is given. An @
    within the path of a folder belongs to it. Raises ConfigError for anything else."""
    whole = spec.removeprefix("hubert:")
    source, at, layer = whole.rpartition("@")
    if not at or "/" in layer or Path(whole).exists():
        source, layer = whole, "-1"
    if not spec.startswith("hubert:") or not source or not layer.lstrip("-").isdigit():
        raise ConfigError(f"encoder={spec}: write whisper-base or hubert:FOLDER_OR_NAME[@LAYER]")
    return source, int(layer)
