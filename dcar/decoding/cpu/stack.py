"""Transformer layers in C: all layers of a pass in one call (layers.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dcar.decoding.columns import Columns, RotaryCache, Rotations
from dcar.decoding.cpu.native import (
    LANES,
    LONG,
    POINTER,
    Linear,
    Weights,
    address,
    check_memory,
    members,
    reads,
)
from dcar.decoding.stack import Stack
from heads.layers import TransformerLayer


class _Layer(ctypes.Structure):
    _fields_ = [
        *members(POINTER, "attention_norm attention_bias ffn_norm ffn_bias"),
        *members(Linear, "qkv out up down"),
    ]


class _Pass(ctypes.Structure):
    """Arguments of run_layers, as in layers.c."""

    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *members(POINTER, "last_norm last_bias"),
        *members(LONG, "count heads"),
        ("epsilon", ctypes.c_float),
        ("keys_values", ctypes.POINTER(POINTER)),
        *members(POINTER, "cos sin"),
        *members(LONG, "angle_stride positions threads"),
        *members(POINTER, "x result angle index"),
        ("row_columns", LONG),
        *members(POINTER, "hole_from hole_to mask"),
        ("mask_columns", LONG),
    ]


class _Memory(NamedTuple):
    """Cache and rotary table, kept alive, and arguments with their addresses."""

    kv: list[Tensor]
    rotations: Rotations
    addresses: _Pass


class CPUStack(Stack):
    """`Stack` in C, of layers that `reads_stack` accepts."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[TransformerLayer],
        last: Sequence[nn.Module],
        first: Sequence[nn.Module] = (),
    ):
        super().__init__(layers, last, first)
        self._run, self._weights = library.run_layers, (weights := Weights())
        parts = [
            _Layer(
                *weights.norm(layer.attention_norm),
                *weights.norm(layer.ffn_norm),
                *weights.linears((layer.qkv, layer.out, layer.up, layer.down)),
            )
            for layer in layers
        ]
        self._pass = _Pass(
            (_Layer * len(parts))(*parts),
            *weights.norm(last[0]),
            len(parts),
            layers[0].num_heads,
            layers[0].attention_norm.eps,
        )
        # this and `before` are PyTorch's: a policy has them, but no decoder
        self._linear = self.after[1:]
        self._memory: _Memory | None = None

    def read(self, x: Tensor, rotary: RotaryCache, positions: Tensor, columns: Columns) -> Tensor:
        x = self.before(x)
        if x.dtype != torch.float32 or x.shape[1] != self.layers[0].out.out_features:
            raise TypeError(
                f"rows {tuple(x.shape)} of {x.dtype} cannot be read by these float32 layers"
            )
        memory, rotations = self._memory, rotary.rotations
        if memory is None or memory.kv is not columns.kv or memory.rotations is not rotations:
            memory = self._memory = self._addresses(columns.kv, rotations)
        p = _Pass.from_buffer_copy(memory.addresses)  # other threads may run the same layers
        read = [
            None if t is None else t.contiguous()  # kept alive until the end of the call
            for t in (x, positions, columns.index, *columns.padding(), columns.mask_of_tree())
        ]
        p.x, p.angle, p.index, p.hole_from, p.hole_to, p.mask = map(address, read)
        y = torch.empty_like(x)
        p.positions, p.threads = len(x), torch.get_num_threads()
        p.row_columns = len(columns.kv[0]) // columns.rows
        p.result = None if columns.writes_only else y.data_ptr()
        p.mask_columns = 0 if columns.tree is None else columns.last
        check_memory(self._run(ctypes.addressof(p)), f"{len(x)} positions through {p.count} layers")
        return self._linear(y if columns.ends is None else y.index_select(0, columns.ends))

    def _addresses(self, kv: list[Tensor], rotations: Rotations) -> _Memory:
        """Return the arguments with the addresses of the cache and of the rotary table, which
        seldom change."""
        first, cos, sin = rotations
        if cos.dtype != torch.float32 or not all(
            layer.dtype == torch.float32 and layer.is_contiguous() for layer in kv
        ):
            raise TypeError("keys and values must be contiguous torch.float32, as the rotations")
        p = _Pass.from_buffer_copy(self._pass)
        p.keys_values = (POINTER * len(kv))(*(layer.data_ptr() for layer in kv))
        p.angle_stride = cos.stride(0)
        p.cos, p.sin = (t.data_ptr() - first * p.angle_stride * t.itemsize for t in (cos, sin))
        return _Memory(kv, rotations, p)


def reads_stack(
    layers: Sequence[TransformerLayer], last: Sequence[nn.Module], first: Sequence[nn.Module]
) -> bool:
    """Return whether the C code supports these layers: as heads/layers.py makes them, with
    widths that fill vectors."""
    parts: list[nn.Module] = [
        part
        for layer in layers
        for part in (
            layer.attention_norm,
            layer.ffn_norm,
            layer.qkv,
            layer.out,
            layer.up,
            layer.down,
        )
    ]
    parts += [part for part in (*last, *first) if not isinstance(part, nn.Identity)]
    if not reads(parts):
        return False
    epsilons = {part.eps for part in parts if isinstance(part, nn.LayerNorm)}
    widths = [
        width
        for layer in layers
        for width in (layer.up.out_features, layer.out.in_features // layer.num_heads)
    ]
    widths += [part.normalized_shape[0] for part in parts if isinstance(part, nn.LayerNorm)]
    return len(epsilons) == 1 and all(width % LANES == 0 for width in widths)
