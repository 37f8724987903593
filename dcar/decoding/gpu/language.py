"""Layers of language models in Triton: five kernels a layer for passes of few positions, as in
stack.py, or six with norms of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcar.decoding.columns import Columns
from dcar.decoding.gpu.attention import attend, rotate
from dcar.decoding.gpu.product import MAX_ROWS, Norm, fits, product
from dcar.decoding.gpu.projection import project
from dcar.decoding.language import RotaryLayers, has_plain_products, rms_norm
from heads.layers import KVCache


class GPURotaryLayers(RotaryLayers):
    """`RotaryLayers` in Triton, of layers that `reads_layers` accepts. A pass of more than
    `MAX_ROWS` positions is left to `RotaryLayers`."""

    def read(self, x: Tensor, positions: Tensor, columns: Columns, cache: KVCache) -> Tensor:
        if torch.compiler.is_compiling() or len(x) > MAX_ROWS:
            return super().read(x, positions, columns, cache)
        with torch.cuda.device_of(x):  # Triton launches on the current device
            return self._read(x, positions.reshape(-1), columns)

    def _read(self, x: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        angles = self._rotary[:, 0, 0], self._rotary[:, 1, 0], 0
        heads = self._layers[0].self_attn.num_key_value_groups * columns.kv[0].shape[2]
        finished = x.new_zeros(MAX_ROWS * heads, dtype=torch.int32)
        for kv, layer, joined in zip(columns.kv, self._layers, self._joined, strict=True):
            assert joined is not None  # of `reads_layers`
            attention, qkv, out = layer.self_attn, joined.qkv, layer.self_attn.o_proj
            norm, places = _norm(layer.input_layernorm), (positions, columns.index)
            if hasattr(attention, "q_norm"):
                y = product(x, qkv.weight, qkv.bias, norm=norm)
                queries = rotate(y, angles, *places, kv, _norms_of_heads(attention))
            else:
                queries = project(x, qkv.weight, qkv.bias, norm, angles, *places, kv)
            y = attend(queries, kv, columns, finished, attention.scaling)
            x = product(y, out.weight, out.bias, residual=x)
            gate, up = joined.gate_up.weight.chunk(2)
            y = product(x, up, norm=_norm(layer.post_attention_layernorm), gate=gate)
            x = product(y, layer.mlp.down_proj.weight, residual=x)
        return rms_norm(self._norm, x)


def _norm(norm: Any) -> Norm:
    return norm.weight, None, norm.variance_epsilon


def _norms_of_heads(attention: Any) -> tuple[Tensor, Tensor, float]:
    norm = attention.q_norm
    return norm.weight, attention.k_norm.weight, norm.variance_epsilon


def reads_layers(backbone: Any) -> bool:
    """Return whether the kernels support the layers of a language model: linear layers without
    adapters and SwiGLU without biases, of sizes that `fits` accepts."""
    if backbone.config.hidden_act != "silu" or not all(map(has_plain_products, backbone.layers)):
        return False
    linears, sizes = [], set()
    for layer in backbone.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inner = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if any(part.bias is not None for part in inner):
            return False
        linears += [attention.q_proj, attention.o_proj, *inner]
        sizes.add(attention.head_dim)
    return fits(linears, sizes)
