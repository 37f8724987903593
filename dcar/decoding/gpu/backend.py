"""Operations of a decoding step in Triton, for layers of supported widths."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

from dcar.decoding.backend import Backend
from dcar.decoding.stack import Stack
from heads.layers import TransformerLayer


class GPUBackend(Backend):
    """Operations in Triton."""

    def stack(
        self,
        layers: Sequence[TransformerLayer],
        last: Sequence[nn.Module],
        first: Sequence[nn.Module] = (),
    ) -> Stack:
        from dcar.decoding.gpu.stack import GPUStack, reads_stack  # imports triton

        if reads_stack(layers):
            return GPUStack(layers, last, first)
        return super().stack(layers, last, first)


def gpu_backend(device: torch.device) -> Backend:
    """Return the operations in Triton, or in PyTorch for a GPU older than Ampere or without
    Triton, which every CUDA build of PyTorch brings."""
    if importlib.util.find_spec("triton") is None:
        return Backend()
    return GPUBackend() if torch.cuda.get_device_capability(device) >= (8, 0) else Backend()
