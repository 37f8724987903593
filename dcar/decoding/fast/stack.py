"""Transformer layers and heads for decoding alone: few kernels, made for a handful of rows, one write to the cache.

The mathematics is that of heads/layers.py, which stays the reference; sums may be rounded in another order. Rows are
flat here: N = batch × new positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcar.decoding.fast.cpu.native import STACKED_ROWS, NativeStack, Places, kernels
from heads.layers import RotaryTable, TransformerLayer
from heads.multi_token import MultiTokenHeads

Affine = Callable[[Tensor], Tensor]


def affine(module: nn.Module, native: bool = True) -> Affine:
    """x [N, in] -> [N, out], as `module` computes it; on the CPU by kernels for few rows (`dcar.decoding.fast.cpu`).

    These read weights where they are, but small float32 ones are copied: later changes of the module do not reach such
    a copy. Whatever is no linear layer (a quantised module) is used as it is.
    """
    if not isinstance(module, nn.Linear):
        return module
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()

    def plain(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    own = kernels(weight.dtype) if native and weight.device.type == "cpu" and weight.is_contiguous() else None
    if own is None:
        return plain
    few = own.linear(weight, bias)
    return few if few.panels else lambda x: few(x) if len(x) <= own.rows else plain(x)


def own_layers(model: object) -> list[TransformerLayer] | None:
    """The layers of a decoder that is a stack of `TransformerLayer`s; None for any other (a language model of
    `transformers`)."""
    layers = list(getattr(model, "layers", [None]))
    return layers if all(isinstance(layer, TransformerLayer) for layer in layers) else None


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True = may attend) as what is added to the scores: made once, not by every layer's attention."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def weights_signature(module: nn.Module) -> Hashable:
    """Where a module's weights are and how often they were written; it changes when one is replaced, moved or trained.

    It goes by version counters, which writes through `.data` do not move.
    """
    return tuple((p.data_ptr(), p._version) for p in module.parameters())


def norm(module: nn.LayerNorm) -> Affine:
    shape, weight, bias = module.normalized_shape, module.weight.detach(), module.bias.detach()
    return lambda x: torch.layer_norm(x, shape, weight, bias, module.eps)


class FusedLayer:
    """One `TransformerLayer` in two halves, between which the caller writes the cache and attends."""

    def __init__(self, layer: TransformerLayer, native: bool = True):
        self.num_heads = layer.num_heads
        self.qkv, self.out = affine(layer.qkv, native), affine(layer.out, native)
        self.up, self.down = affine(layer.up, native), affine(layer.down, native)
        self.attention_norm, self.ffn_norm = norm(layer.attention_norm), norm(layer.ffn_norm)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries and keys, and values: x [N, D] -> [N, 3, H, D/H]."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), 3, self.num_heads, -1)
        return torch.addcmul(qkv * cos, qkv.roll(qkv.shape[-1] // 2, -1), sin)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residuals of attention and feed-forward: x and attended [N, D] -> [N, D]."""
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))


class FusedStack:
    """Layers, the norm behind them and perhaps a linear layer behind that; before them perhaps a norm and a linear
    layer. For few positions on the CPU all of it is one call; otherwise the caller goes through `before`, `layers` and
    `behind`, and writes the cache and attends between the layers' halves."""

    def __init__(self, layers: Sequence[TransformerLayer], last: Sequence[nn.Module], first: Sequence[nn.Module] = (),
                 native: bool = True):
        weight = layers[0].attention_norm.weight
        found = kernels(weight.dtype) if native and weight.device.type == "cpu" else None
        self.own: NativeStack | None = None if found is None else found.stack(layers, last, first)
        native = native and self.own is None  # nothing is copied twice
        self.layers = [FusedLayer(layer, native) for layer in layers]
        self._before, self._behind = ([norm(part) if isinstance(part, nn.LayerNorm) else affine(part, native)
                                       for part in parts] for parts in (first, last))

    def before(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda x, part: part(x), self._before, x)

    def behind(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda x, part: part(x), self._behind, x)

    def takes(self, positions: int) -> NativeStack | None:
        """The one call, if it is for so many."""
        return self.own if self.own is not None and positions <= self.own.rows else None


class FusedHeads:
    """`MultiTokenHeads` for few rows on the CPU: hidden [..., D] -> logits of heads 1..k [..., k, vocabulary]."""

    def __init__(self, heads: MultiTokenHeads):
        weight = heads.projection
        found = kernels(weight.dtype) if weight.device.type == "cpu" else None
        self.heads, self._own = heads, None if found is None else found.heads(heads)

    def __call__(self, hidden: Tensor, k: int | None = None) -> Tensor:
        flat, k = hidden.reshape(-1, hidden.shape[-1]), self.heads.num_heads if k is None else k
        if self._own is None or len(flat) > STACKED_ROWS:
            return self.heads(hidden, k)
        return self._own(flat, k).view(*hidden.shape[:-1], k, -1)


class Rotation:
    """Rotary angles of queries and keys, with the identity for values, so that all three are turned in one go."""

    def __init__(self, table: RotaryTable, first: int, last: int, device: torch.device, dtype: torch.dtype):
        """Positions first..last, which may be negative (a prompt before BOS)."""
        self.first, self.last = first, last
        cos, sin = table.span(first, last - first + 1, device)
        ones, zeros = torch.ones_like(cos[0, 0]), torch.zeros_like(cos[0, 0])
        self.cos = torch.stack((cos[0, 0], cos[0, 0], ones), 1)[:, :, None].to(dtype)  # [P, 3, 1, D/H]
        self.sin = torch.stack((sin[0, 0], sin[0, 0], zeros), 1)[:, :, None].to(dtype)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [N] -> cosine and signed sine, each [N, 3, 1, D/H]."""
        index = positions - self.first
        return self.cos.index_select(0, index), self.sin.index_select(0, index)


class CausalMask:
    """What one row without padding may see, as a view of one table: new position i of `new` does not see the last
    new - 1 - i columns. Nothing is computed in a step."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._table = torch.zeros(0, 0, device=device, dtype=dtype)

    def __call__(self, new: int, columns: int) -> Tensor | None:
        """Added to the scores of `new` positions: [1, 1, new, columns]; None where a single one sees everything."""
        if new == 1:
            return None
        rows, width = self._table.shape
        if new > rows or columns > width:
            rows, width = max(new, rows, 8), max(round_up(columns, 512), width)
            seen = torch.ones(rows, width, dtype=torch.bool, device=self._table.device).tril(width - rows)
            self._table = additive(seen, self._table.dtype)
        return self._table[None, None, rows - new :, width - columns :]


class StaticCache:
    """Keys and values of a stack of layers, [layer][row, column, key or value, head, D/H], allocated once.

    A row's text stands right-aligned before column `text`, its speech from there on, so that what a row may see is
    one run of columns. Rolling back is a change of the row's length; nothing is ever moved.
    """

    def __init__(self, layers: int, rows: int, text: int, capacity: int, heads: int, head_dim: int,
                 device: torch.device, dtype: torch.dtype):
        self.text, self.width = text, text + capacity
        self.kv = torch.zeros(layers, rows, self.width, 2, heads, head_dim, device=device, dtype=dtype)
        self._flat = [layer.view(rows * self.width, 2, heads, head_dim) for layer in self.kv]
        self._keys, self._values = self.kv[:, :, :, 0], self.kv[:, :, :, 1]

    def index(self, row: Tensor | None, position: Tensor) -> Tensor:
        """Flat columns [N] of speech positions [N] of rows [N] (None: the first one)."""
        return position + self.text if row is None else row * self.width + (position + self.text)

    def write(self, layer: int, index: Tensor, keys_values: Tensor) -> None:
        """Store [N, 2, H, D/H] at flat columns [N]."""
        self._flat[layer].index_copy_(0, index, keys_values)

    def read(self, layer: int, rows: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, H, last - first, D/H] of a run of columns."""
        window = self.kv[layer, :rows, first:last]  # [B, C, 2, H, D/H]
        return window[:, :, 0].transpose(1, 2), window[:, :, 1].transpose(1, 2)

    def places(self, index: Tensor, start: Tensor | None = None) -> Places:
        """Flat columns [N] for a stack that is one call; start [rows]: the first column of each row, None = 0."""
        return Places(self._keys, self._values, index, hole_to=start)

    def load(self, row: int, kv: Tensor, text: int, speech: int, source: int, prefix: int) -> None:
        """Copy row `source` of a reference cache kv [layers, 2, B, H, C, D/H]: `text` of its `prefix` columns, then
        `speech` positions."""
        part = kv[:, :, source].permute(0, 3, 1, 2, 4)  # [layers, C, 2, H, D/H]
        self.kv[:, row, self.text - text : self.text] = part[:, :text]
        self.kv[:, row, self.text : self.text + speech] = part[:, prefix : prefix + speech]
