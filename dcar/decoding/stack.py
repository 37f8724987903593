"""Transformer layers for decoding: flat rows, few kernels, one write to the cache per layer.

They compute the same as heads/layers.py; sums may be rounded in another order. Rows are flat: N =
batch × new positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcar.decoding.columns import Columns, RotaryCache
from heads.layers import TransformerLayer


class Stack:
    """Layers with the final norm (and linear layer) after them and, in a policy, the norm and
    linear layer before them: everything between embeddings and heads."""

    def __init__(
        self,
        layers: Sequence[TransformerLayer],
        last: Sequence[nn.Module],
        first: Sequence[nn.Module] = (),
    ):
        self.layers = list(layers)
        self.before = nn.Sequential(*first)
        self.after = nn.Sequential(*last)

    def read(self, x: Tensor, rotary: RotaryCache, positions: Tensor, columns: Columns) -> Tensor:
        """Run new positions that follow each row's past: x [N, in] -> [N, out], or [B, out] of the
        columns' `ends` (with one layer). Keys and values are written to the cache. The result may
        share the memory of x.

        positions [N]: for the rotary embedding.
        """
        cos, sin = rotary(positions)
        mask = columns.mask()
        x = self.before(x)
        for i, layer in enumerate(self.layers):
            last = i + 1 == len(self.layers)
            x = read_layer(layer, x, (cos, sin), columns, i, mask, columns.writes_only and last)
        return x if columns.writes_only else self.after(x)


def read_layer(
    layer: TransformerLayer,
    x: Tensor,
    rotation: tuple[Tensor, Tensor],
    columns: Columns,
    i: int,
    mask: Tensor | None,
    writes_only: bool = False,
) -> Tensor:
    """Run layer i: x [N, D] -> [N, D], or [B, D] of the columns' `ends`. Its keys and values are
    written to the cache, and with `writes_only` nothing else happens.

    rotation: cosine and signed sine, each [N, 3, 1, D/H]; mask: see `Columns`.
    """
    rotated = project(layer, x, rotation)
    columns.write(i, rotated[:, 1:])
    if writes_only:
        return x
    queries = rotated[:, 0]
    if columns.ends is not None:
        queries, x = queries.index_select(0, columns.ends), x.index_select(0, columns.ends)
    keys, values = columns.read(i)
    y = F.scaled_dot_product_attention(columns.fold(queries), keys, values, attn_mask=mask)
    return finish(layer, x, columns.flat(y))


def project(layer: TransformerLayer, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return the rotated queries and keys, and the values, [N, 3, H, D/H] of x [N, D]."""
    return rotate(queries_keys_values(layer, x), *rotation)


def queries_keys_values(layer: TransformerLayer, x: Tensor) -> Tensor:
    """Return queries, keys and values before their rotation, [N, 3, H, D/H] of x [N, D]."""
    return product(layer.qkv, layer.attention_norm(x)).view(len(x), 3, layer.num_heads, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, …, H, D/H] by cosines and signed sines [N, …, 1, D/H]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def finish(layer: TransformerLayer, x: Tensor, attended: Tensor) -> Tensor:
    """Return the output [N, D] of a layer for its input x and the attended values [N, D]."""
    x = x + product(layer.out, attended)
    inner = F.gelu(product(layer.up, layer.ffn_norm(x)), approximate="tanh")
    return x + product(layer.down, inner)


def product(linear: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer to x [N, in]. Compiled, the bias is added apart: Inductor makes a
    product of one row a reduction, but leaves `addmm` to a library."""
    if not torch.compiler.is_compiling():
        return linear(x)
    y = x @ linear.weight.t()
    return y if linear.bias is None else y + linear.bias
