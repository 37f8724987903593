"""Whisper's encoder in PyTorch, from weights for CTranslate2: batches on any device, gradients.

The packaged `model.bin` of whisper-base stores its weights in float16; everything is computed in
float32.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.errors import CheckpointError
from dcar.sources.packages import whisper_base_dir

WINDOW = 400
"""Samples of an analysis window, at 16 kHz."""
HOP = 160
"""Samples from one frame of the features to the next."""
MELS = 80
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


def ctranslate2_weights(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read variables of a CTranslate2 `model.bin` (binary version 6) as float32 tensors.

    prefix: beginning of the names of the variables to read; it is removed from the names returned.
    Raises CheckpointError if the file is of another version or ends too early.
    """
    data = path.read_bytes()
    at = 0

    def number(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return int(value)

    def string() -> str:
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at].rstrip(b"\0").decode()

    weights: dict[str, Tensor] = {}
    try:
        if (version := number("I")) != 6:
            raise CheckpointError(
                f"{path}: is of CTranslate2 binary version {version}, but this reader supports "
                "version 6; convert the model again"
            )
        string()  # name of the model's kind
        number("I")  # its revision
        for _ in range(number("I")):
            name, dims = string(), [number("I") for _ in range(number("B"))]
            kind, size = _DTYPES[number("B")], number("I")
            if name.startswith(prefix):
                values = np.frombuffer(data, kind, size // np.dtype(kind).itemsize, at).astype(
                    np.float32
                )
                weights[name.removeprefix(prefix)] = torch.from_numpy(values.reshape(dims))
            at += size
    except (struct.error, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a readable CTranslate2 model ({error}); install its package again"
        ) from error
    return weights


class WhisperStates(nn.Module):
    """Whisper's encoder as a differentiable function, frozen.

    weights: variables under `encoder/` in a CTranslate2 model. layers: numbers of the layers, from
    1, whose output is returned; the last layer's output is taken after the final norm. Raises
    CheckpointError for layers that the encoder does not have.
    """

    def __init__(self, weights: dict[str, Tensor], layers: Sequence[int]):
        super().__init__()
        self.heads = int(weights["num_heads"])
        self.depth = sum(name.endswith("/ffn/linear_0/weight") for name in weights)
        if not layers or not all(1 <= layer <= self.depth for layer in layers):
            raise CheckpointError(
                f"the encoder has no layers {list(layers)}; choose from 1 to {self.depth}"
            )
        self.layers = tuple(sorted(layers))
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(value, requires_grad=False) for name, value in weights.items()}
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}/weight"], self.weights[f"{name}/bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        gamma = self.weights[f"{name}/gamma"]
        return F.layer_norm(x, gamma.shape, gamma, self.weights[f"{name}/beta"])

    def _convolution(self, x: Tensor, name: str, stride: int) -> Tensor:
        """Return gelu of the convolution of x [B, F, C] over three frames, [B, ceil(F/stride), D].

        Computed as a product of matrices, because cuDNN computes convolutions in TF32.
        """
        padded = F.pad(x, (0, 0, 1, 1))
        window = torch.cat([padded[:, k : k + x.shape[1] : stride] for k in range(3)], 2)
        weight = self.weights[f"{name}/weight"].transpose(1, 2).flatten(1)  # [D, 3C]
        return F.gelu(F.linear(window, weight, self.weights[f"{name}/bias"]))

    def forward(self, features: Tensor, frames: Tensor | None = None) -> list[Tensor]:
        """Return the states [B, ceil(F/2), D] of each chosen layer for features [B, F, 80].

        frames [B]: number of frames of every row, followed by zeros; all F by default. Rows do not
        depend on each other; the states after a row's frames are undefined.
        """
        x = self._convolution(features, "conv1", 1)
        keys = None
        if frames is not None:
            inside = torch.arange(x.shape[1], device=x.device) < frames[:, None]
            x = x * inside[..., None]  # zeros, as after the end of a single row
            keys = inside[:, None, None, ::2]  # the positions that attention reads, [B, 1, 1, T]
        x = self._convolution(x, "conv2", 2)
        x = x + self.weights["position_encodings/encodings"][: x.shape[1]]
        states = []
        for i in range(self.layers[-1]):
            attention, ffn = f"layer_{i}/self_attention", f"layer_{i}/ffn"
            h = self._linear(self._norm(x, f"{attention}/layer_norm"), f"{attention}/linear_0")
            q, k, v = (
                part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in h.chunk(3, dim=2)
            )
            h = F.scaled_dot_product_attention(q, k, v, keys).transpose(1, 2).flatten(2)
            x = x + self._linear(h, f"{attention}/linear_1")
            h = F.gelu(self._linear(self._norm(x, f"{ffn}/layer_norm"), f"{ffn}/linear_0"))
            x = x + self._linear(h, f"{ffn}/linear_1")
            if i + 1 in self.layers:
                states.append(self._norm(x, "layer_norm") if i + 1 == self.depth else x)
        return states


def whisper_base_states(layers: Sequence[int]) -> WhisperStates:
    """Return the encoder of the packaged whisper-base on the CPU.

    Raises AssetError if the package is missing.
    """
    return WhisperStates(ctranslate2_weights(whisper_base_dir() / "model.bin", "encoder/"), layers)


@lru_cache(maxsize=1)
def shared_states(device: torch.device) -> WhisperStates:
    """Return the whole encoder on a device, one per process: it takes 80 MB."""
    return whisper_base_states((6,)).to(device)


@lru_cache(maxsize=1)
def _mel_filters(device: torch.device) -> Tensor:
    """Return Whisper's mel filters [80, 201] float32."""
    from faster_whisper.feature_extractor import FeatureExtractor

    filters = FeatureExtractor.get_mel_filters(ENCODER_SAMPLE_RATE, WINDOW, MELS)
    return torch.from_numpy(filters.astype(np.float32)).to(device)


def log_mel(waves: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return Whisper's features [B, F, 80] float32 of waveforms [samples] at 16 kHz, and the number
    of frames [B] of each.

    A waveform of more than 200 samples has samples // 160 frames, followed by zeros up to the
    longest; its features do not depend on the other waveforms. They equal those of faster-whisper
    with padding=0.
    """
    rows = [torch.from_numpy(np.pad(wave, WINDOW // 2, mode="reflect")) for wave in waves]
    counts = [len(wave) // HOP for wave in waves]
    samples = pad_sequence(rows, batch_first=True).to(device)
    spectrum = torch.stft(
        samples,
        WINDOW,
        HOP,
        window=torch.hann_window(WINDOW, device=device),
        center=False,
        return_complex=True,
    )
    power = spectrum[..., : max(counts)].abs().square()
    mel = (_mel_filters(device) @ power).clamp_min(1e-10).log10()  # [B, 80, F]
    frames = torch.tensor(counts, device=device)
    outside = torch.arange(max(counts), device=device) >= frames[:, None]
    loudest = mel.masked_fill(outside[:, None], -10).amax((1, 2), keepdim=True)
    features = (mel.maximum(loudest - 8) + 4) / 4
    return features.masked_fill(outside[:, None], 0).transpose(1, 2), frames
