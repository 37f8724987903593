"""Operations of a decoding step in Triton, for layers of supported widths."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dcar.decoding.compiled import CompiledBackend, masked_layer
from dcar.decoding.stack import Stack
from heads.layers import TransformerLayer


class GPUBackend(CompiledBackend):
    """Operations compiled by Inductor, and layers in Triton."""

    def stack(
        self,
        layers: Sequence[TransformerLayer],
        last: Sequence[nn.Module],
        first: Sequence[nn.Module] = (),
    ) -> Stack:
        from dcar.decoding.gpu.stack import GPUStack, reads_stack  # imports triton

        if reads_stack(layers):
            return GPUStack(self.part(masked_layer), layers, last, first)
        return super().stack(layers, last, first)

    def language_layers(self, backbone: Any) -> Any:
        from dcar.decoding.gpu.language import GPURotaryLayers, reads_layers  # imports triton

        return GPURotaryLayers if reads_layers(backbone) else super().language_layers(backbone)

    def largest(self, values: Tensor, k: int, weights: Tensor | None, p: float) -> Tensor:
        from dcar.decoding.gpu.sampling import largest  # imports triton

        return largest(values, k, weights, p)

    def one_by_one(
        self, full: Tensor, nucleus: Tensor, history: Tensor, u: Tensor, share: float, mask: bool
    ) -> tuple[Tensor, Tensor]:
        from dcar.decoding.gpu.sampling import MOST_IDS, in_turn  # imports triton

        if full.shape[-1] > MOST_IDS:
            return super().one_by_one(full, nucleus, history, u, share, mask)
        return in_turn(full, nucleus, history, u, share, mask)


def gpu_backend(device: torch.device) -> CompiledBackend:
    """Return the compiled operations, with layers in Triton unless the GPU is older than Ampere or
    there is no Triton, which every CUDA build of PyTorch brings."""
    if importlib.util.find_spec("triton") is None:
        return CompiledBackend()
    recent = torch.cuda.get_device_capability(device) >= (8, 0)
    return GPUBackend() if recent else CompiledBackend()
