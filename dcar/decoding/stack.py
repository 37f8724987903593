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
            qkv = layer.qkv(layer.attention_norm(x)).view(len(x), 3, layer.num_heads, -1)
            # [N, 3, H, D/H]
            rotated = torch.addcmul(qkv * cos, qkv.roll(qkv.shape[-1] // 2, -1), sin)
            columns.write(i, rotated[:, 1:])
            if columns.writes_only and i + 1 == len(self.layers):
                return x
            queries = rotated[:, 0]
            if columns.ends is not None:
                queries, x = queries.index_select(0, columns.ends), x.index_select(0, columns.ends)
            keys, values = columns.read(i)
            y = F.scaled_dot_product_attention(columns.fold(queries), keys, values, attn_mask=mask)
            x = x + layer.out(columns.flat(y))
            x = x + layer.down(F.gelu(layer.up(layer.ffn_norm(x)), approximate="tanh"))
        return self.after(x)
