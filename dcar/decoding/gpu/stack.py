"""Transformer layers in Triton: five kernels a layer for passes of few positions.

A GPU spends such passes on launches, and on reading weights: project (norm, queries, keys and
values, their rotation and the write to the cache), attend, product (with the residual), product
(norm and GELU), product (residual). Blocks follow from shapes alone; nothing is tuned, or allocated
by data, at run time, so a pass can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dcar.decoding.columns import Columns, RotaryCache
from dcar.decoding.compiled import CompiledStack
from dcar.decoding.gpu.attention import attend
from dcar.decoding.gpu.product import MAX_ROWS, Norm, fits, product
from dcar.decoding.gpu.projection import project
from heads.layers import TransformerLayer


class GPUStack(CompiledStack):
    """`Stack` in Triton, of layers that `reads_stack` accepts. A pass of more than `MAX_ROWS`
    positions, such as a prefill, is left to `CompiledStack`, and so is a policy's layer."""

    def read(self, x: Tensor, rotary: RotaryCache, positions: Tensor, columns: Columns) -> Tensor:
        few = len(x) <= MAX_ROWS and columns.real is None and columns.ends is None
        if torch.compiler.is_compiling() or not few:
            return super().read(x, rotary, positions, columns)
        with torch.cuda.device_of(x):  # Triton launches on the current device
            return self._read(x, rotary, positions, columns)

    def _read(self, x: Tensor, rotary: RotaryCache, positions: Tensor, columns: Columns) -> Tensor:
        x, heads = self.before(x), self.layers[0].num_heads
        finished = x.new_zeros(MAX_ROWS * heads, dtype=torch.int32)
        first, cos, sin = rotary.rotations
        angles = cos, sin, first
        for kv, layer in zip(columns.kv, self.layers, strict=True):
            norm, places = _norm(layer.attention_norm), (positions, columns.index)
            queries = project(x, *_linear(layer.qkv), norm, angles, *places, kv)
            if columns.writes_only and layer is self.layers[-1]:
                return x
            y = attend(queries, kv, columns, finished)
            x = product(y, *_linear(layer.out), residual=x)
            y = product(x, *_linear(layer.up), norm=_norm(layer.ffn_norm), gelu=True)
            x = product(y, *_linear(layer.down), residual=x)
        return self.after(x)


def _linear(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias


def _norm(norm: nn.LayerNorm) -> Norm:
    return norm.weight, norm.bias, norm.eps


def reads_stack(layers: Sequence[TransformerLayer]) -> bool:
    """Return whether the kernels support these layers: as heads/layers.py makes them, of sizes
    that `fits` accepts."""
    linears = [part for layer in layers for part in (layer.qkv, layer.out, layer.up, layer.down)]
    norms = [part for layer in layers for part in (layer.attention_norm, layer.ffn_norm)]
    sizes = [layer.out.in_features // layer.num_heads for layer in layers]
    return (
        all(type(part) is nn.Linear and part.bias is not None for part in linears)
        and all(type(part) is nn.LayerNorm for part in norms)
        and fits(linears, sizes)
    )
