"""Multi-token heads in C: the logits of a step in one call (heads.c)."""

import ctypes

import torch
from torch import Tensor, nn

from dcar.decoding.cpu.native import (
    FLOAT,
    LANES,
    LONG,
    POINTER,
    Linear,
    Weights,
    check_memory,
    members,
    reads,
)
from heads.build import Heads
from heads.shared import SharedHeads


class _Heads(ctypes.Structure):
    _fields_ = [
        *members(Linear, "base out"),
        *members(ctypes.POINTER(Linear), "up down"),
        *members(POINTER, "offset scale shift norm norm_bias"),
        *members(LONG, "count heads"),
        ("epsilon", FLOAT),
    ]


class NativeHeads:
    """Function that returns logits of heads 1..k, with the arguments of
    `PredictionHeads.logits`."""

    def __init__(self, library: ctypes.CDLL, heads: Heads):
        """Copy the weights of heads that `reads_heads` accepts."""
        self._run, self._weights = library.run_heads, (weights := Weights())
        self._size = heads.base.in_features
        self._out = heads.base.out_features
        self._most = heads.num_heads
        self._part = part = _Heads(
            base=weights.linear(*heads.base.parameters()), heads=heads.num_heads - 1
        )
        if isinstance(heads, SharedHeads) and heads.norm is not None and heads.out is not None:
            part.up = weights.linears(heads.up)
            part.down = weights.linears(heads.down)
            part.count = heads.blocks
            part.offset, part.scale, part.shift = map(
                weights.address, (heads.offset, heads.scale, heads.shift)
            )
            (part.norm, part.norm_bias), part.epsilon = weights.norm(heads.norm), heads.norm.eps
            part.out = weights.linear(heads.out.weight)

    def __call__(self, hidden: Tensor, k: int | None = None, first: int = 1) -> Tensor:
        """Return logits [..., k + 1 - first, vocabulary] of heads first..k (default: all) of hidden
        [..., D]."""
        k = self._most if k is None else k
        if not first <= k <= self._most:
            raise ValueError(f"{k} heads requested of a model that has {self._most}")
        if hidden.dtype != torch.float32 or hidden.shape[-1] != self._size:
            raise TypeError(
                f"hidden states {tuple(hidden.shape)} of {hidden.dtype} cannot be read by float32 "
                f"heads of width {self._size}"
            )
        x, y = hidden.contiguous(), hidden.new_empty(*hidden.shape[:-1], k, self._out)
        rows = x.numel() // self._size
        failed = self._run(
            ctypes.addressof(self._part),
            x.data_ptr(),
            y.data_ptr(),
            rows,
            k,
            torch.get_num_threads(),
        )
        check_memory(failed, f"{k} heads of {rows} rows")
        return y[..., first - 1 :, :]


def reads_heads(heads: Heads) -> bool:
    """Return whether the C code supports these heads: a base head alone, or shared ones, of
    widths that fill vectors."""
    parts: list[nn.Module] = [heads.base]
    if isinstance(heads, SharedHeads):
        last = [part for part in (heads.norm, heads.out) if part is not None]
        parts += [*heads.up, *heads.down, *last]
    elif heads.num_heads > 1:
        return False
    return reads(parts, heads.parameters()) and heads.base.in_features % LANES == 0
