"""Transformer layers and heads for decoding: few kernels, made for a handful of rows, one write to the cache.

They compute what heads/layers.py does, which stays the reference; sums may be rounded in another order. Rows are flat:
N = batch × new positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcar.decoding.fast.columns import Columns, RotaryCache
from dcar.decoding.fast.cpu.heads import native_heads
from dcar.decoding.fast.cpu.native import NativeStack, kernels
from dcar.model.car import CARDecoder
from heads.build import Heads
from heads.layers import TransformerLayer

Affine = Callable[[Tensor], Tensor]


def affine(module: nn.Module, native: bool = True) -> Affine:
    """x [N, in] -> [N, out], as `module` computes it; on the CPU by kernels for few rows (`dcar.decoding.fast.cpu`).

    These read weights in place, except small float32 ones, which are copied: later changes of the module do not reach
    such a copy. What they do not support is the module itself.
    """
    if not native or not isinstance(module, nn.Linear) or module.weight.device.type != "cpu":
        return module
    few_rows = kernels(module.weight.dtype)
    if few_rows is None or not few_rows.reads(module.weight):
        return module
    product = few_rows.linear(module.weight, module.bias)
    return product if product.panels else lambda x: product(x) if len(x) <= few_rows.rows else module(x)


def has_own_layers(model: object) -> TypeGuard[CARDecoder]:
    """Whether a decoder is a stack of `TransformerLayer`s, not another one (a language model of `transformers`)."""
    return isinstance(model, CARDecoder) and all(isinstance(layer, TransformerLayer) for layer in model.layers)


def weights_signature(module: nn.Module) -> Hashable:
    """Addresses and version counters of a module's weights; it changes when one is replaced, moved or trained (but not
    when one is written through `.data`)."""
    return tuple((p.data_ptr(), p._version) for p in module.parameters())


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules of one kind hold equal weights; False on a GPU, where comparing would synchronise."""
    return all(p.device.type == q.device.type == "cpu" and p.dtype == q.dtype and torch.equal(p, q)
               for p, q in zip(one.parameters(), other.parameters(), strict=True))


class FusedLayer:
    """One `TransformerLayer` in two halves, between which the cache is written and attended to."""

    def __init__(self, layer: TransformerLayer, native: bool):
        self.num_heads = layer.num_heads
        self.qkv, self.out = affine(layer.qkv, native), affine(layer.out, native)
        self.up, self.down = affine(layer.up, native), affine(layer.down, native)
        self.attention_norm, self.ffn_norm = layer.attention_norm, layer.ffn_norm

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries and keys, and values: x [N, D] -> [N, 3, H, D/H]."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), 3, self.num_heads, -1)
        return torch.addcmul(qkv * cos, qkv.roll(qkv.shape[-1] // 2, -1), sin)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residuals of attention and feed-forward: x and attended [N, D] -> [N, D]."""
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))


class Stack:
    """Layers with the final norm (and linear layer) after them and, in a policy, the norm and linear layer before them:
    everything between embeddings and heads."""

    def __init__(self, layers: Sequence[TransformerLayer], last: Sequence[nn.Module], first: Sequence[nn.Module] = ()):
        weight = layers[0].attention_norm.weight
        library = kernels(weight.dtype) if weight.device.type == "cpu" else None
        self.native: NativeStack | None = None if library is None else library.stack(layers, last, first)
        native = self.native is None  # else small weights would be copied twice
        self.layers = [FusedLayer(layer, native) for layer in layers]
        self._before, self._after = ([affine(part, native) for part in parts] for parts in (first, last))

    def read(self, x: Tensor, rotary: RotaryCache, positions: Tensor, columns: Columns) -> Tensor:
        """New positions behind each row's past: x [N, in] -> [N, out], or [B, out] of the columns' `ends`. Keys and
        values are written. The result may share the memory of x.

        positions [N]: for the rotary embedding. `ends` of several layers are supported in C only.
        """
        if self.native is not None and len(x) <= self.native.rows:  # a handful of positions on a CPU
            return self.native(x, rotary, positions, columns)
        cos, sin = rotary(positions)
        mask = columns.mask()
        x = functools.reduce(lambda x, part: part(x), self._before, x)
        for i, layer in enumerate(self.layers):
            rotated = layer.project(x, cos, sin)  # [N, 3, H, D/H]
            columns.write(i, rotated[:, 1:])
            queries = rotated[:, 0]
            if columns.ends is not None:
                queries, x = queries.index_select(0, columns.ends), x.index_select(0, columns.ends)
            keys, values = columns.read(i)
            y = F.scaled_dot_product_attention(columns.fold(queries), keys, values, attn_mask=mask)
            x = layer.finish(x, columns.flat(y))
        return functools.reduce(lambda x, part: part(x), self._after, x)


class FusedHeads:
    """Heads of either kind for few rows on the CPU: hidden [..., D] -> logits of heads 1..k [..., k, vocabulary]."""

    def __init__(self, heads: Heads):
        weight = heads.base.weight
        library = kernels(weight.dtype) if weight.device.type == "cpu" else None
        self.heads, self._native = heads, None if library is None else native_heads(library, heads)

    def __call__(self, hidden: Tensor, k: int | None = None) -> Tensor:
        flat, k = hidden.reshape(-1, hidden.shape[-1]), self.heads.num_heads if k is None else k
        if self._native is None or not self._native.takes(len(flat), k):
            return self.heads(hidden, k)
        return self._native(flat, k).view(*hidden.shape[:-1], k, -1)
