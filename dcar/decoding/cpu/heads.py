"""Multi-token heads of either kind in C: the logits of a step in one call (heads.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dcar.decoding.cpu.native import LONG, POINTER, Kernels, LinearPart, check_rows, members
from heads.build import Heads
from heads.multi_token import MultiTokenHeads
from heads.shared import SharedHeads

STACKED_ROWS = 8
"""With more rows PyTorch multiplies the stacked weights of independent heads faster."""


class _Heads(ctypes.Structure):
    _fields_ = [("base", LinearPart), *members(POINTER, "blocks biases projection"),
                *members(LONG, "count heads shared")]


class _SharedHeads(ctypes.Structure):
    _fields_ = [*members(LinearPart, "base out"), *members(ctypes.POINTER(LinearPart), "up down"),
                *members(POINTER, "offset scale shift norm norm_bias"), *members(LONG, "count heads"),
                ("epsilon", ctypes.c_float)]


class NativeHeads:
    """Logits of heads 1..k for few rows; it reads the memory of the weights (small float32 linear layers are
    copied)."""

    _run: Callable[..., int]
    _part: _Heads | _SharedHeads

    def __init__(self, native: Kernels, heads: Heads):
        """heads: ones that `native_heads` accepts."""
        self._base = native.linear(heads.base.weight, heads.base.bias)

    def takes(self, rows: int, k: int) -> bool:
        """Whether k heads of so many hidden states are faster here than in PyTorch."""
        return rows <= STACKED_ROWS

    def __call__(self, hidden: Tensor, k: int) -> Tensor:
        """hidden [N, D] -> [N, k, vocabulary], 1 <= k <= the heads there are."""
        out, size = self._base.shape
        check_rows(hidden, self._base.weight, size)
        if not 1 <= k <= self._part.heads + 1:
            raise ValueError(f"asked for {k} heads of a model that has {self._part.heads + 1}")
        x, y = hidden.contiguous(), hidden.new_empty(len(hidden), k, out)
        if self._run(ctypes.addressof(self._part), x.data_ptr(), y.data_ptr(), len(x), k, torch.get_num_threads()):
            raise RuntimeError(f"could not allocate memory for {k} heads of {len(x)} rows")
        return y


class NativeIndependentHeads(NativeHeads):
    """`MultiTokenHeads`."""

    def __init__(self, native: Kernels, heads: MultiTokenHeads):
        super().__init__(native, heads)
        self._held = [p.detach() for p in (heads.block_weight, heads.block_bias, heads.projection)]
        self._part = _Heads(self._base.part(), *(p.data_ptr() for p in self._held), heads.blocks, heads.num_heads - 1,
                            int(heads.share_blocks))
        self._run = native.library.run_heads


class NativeSharedHeads(NativeHeads):
    """`SharedHeads`: the rows of all offsets go through every product together."""

    def __init__(self, native: Kernels, heads: SharedHeads):
        super().__init__(native, heads)
        up, down, out = ([native.linear(*layer.parameters()) for layer in layers]
                         for layers in (heads.up, heads.down, [] if heads.out is None else [heads.out]))
        norm = [torch.empty(0)] * 2 if heads.norm is None else [heads.norm.weight.detach(), heads.norm.bias.detach()]
        held = [p.detach() for p in (heads.offset, heads.scale, heads.shift)] + norm
        many = LinearPart * heads.blocks
        self._held = [*up, *down, *out, *held]
        self._part = _SharedHeads(
            self._base.part(), out[0].part() if out else LinearPart(), many(*(part.part() for part in up)),
            many(*(part.part() for part in down)), *(p.data_ptr() for p in held), heads.blocks, heads.num_heads - 1,
            1e-5 if heads.norm is None else heads.norm.eps)
        self._run = native.library.run_shared_heads
        self._most = 1 << 30 if all(part.panels for part in (self._base, *up, *down, *out)) else native.rows

    def takes(self, rows: int, k: int) -> bool:
        return rows * k <= self._most


def native_heads(native: Kernels, heads: Heads) -> NativeHeads | None:
    """These heads in C; None where they are not as heads/multi_token.py or heads/shared.py makes them, or where the
    dtype or memory layout is not supported."""
    linear: list[nn.Module | None] = [heads.base]
    if isinstance(heads, SharedHeads):
        linear += [*heads.up, *heads.down, *([] if heads.out is None else [heads.out])]
        plain = heads.norm is None or type(heads.norm) is nn.LayerNorm
    else:
        plain = isinstance(heads, MultiTokenHeads)
    if not plain or not all(type(layer) is nn.Linear for layer in linear):
        return None
    if not all(native.reads(weight) for weight in heads.parameters()):
        return None
    return NativeSharedHeads(native, heads) if isinstance(heads, SharedHeads) else NativeIndependentHeads(native, heads)
