"""Reader of language models: forward passes in few kernels, on the ragged cache.

The layers of Llama, Qwen2, Qwen3 and Mistral and of `cosyvoice-lm` are computed here, with the
modules of the model itself: projections are called, so that adapters of peft and merged weights
both work. Only compiled layers without adapters read copies of weights, joined to fewer products:
half of a large model's memory again. The computation of these models is fixed, so `transformers`
has no part in a pass; its forward, which training uses, is the reference of the tests.

Rows are flat within the layers: N = batch × new positions.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcar.decoding.backend import Backend
from dcar.decoding.columns import CausalMask, Columns, columns_of, window
from dcar.decoding.reader import Layout, Reader
from dcar.decoding.stack import product
from dcar.decoding.storage import CacheStorage
from dcar.model.backbones.cosyvoice_lm import CosyVoiceLM, Distances, sinusoids
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder, text_prefix
from heads.layers import KVCache

REACH = 8192
"""Maximum number of positions of a row, text and speech together, that the tables cover."""


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    """Normalise x [..., D] as an RMSNorm module of `transformers` does, in one kernel."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Compute grouped-query attention (Ainslie et al. 2023) of queries [N, H, d], keys and values
    [B, K, columns, d]: [N, H d].

    The H / K queries that share keys and values become positions of a single head. Keys and values
    are thus not repeated, and every backend of `scaled_dot_product_attention` can be used: not all
    of them support grouped queries with a mask. mask: see `grouped`.
    """
    rows, shared = keys.shape[:2]
    q = queries.unflatten(1, (shared, -1)).unflatten(0, (rows, -1))  # [B, m, K, H / K, d]
    new, groups = q.shape[1], q.shape[3]
    q = q.transpose(1, 2).flatten(2, 3)  # [B, K, m × H / K, d]
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    y = y.unflatten(2, (new, groups)).transpose(1, 2)  # [B, m, K, H / K, d]
    return y.reshape(len(queries), -1)


def grouped(mask: Tensor | None, groups: int) -> Tensor | None:
    """Return an additive mask [B or 1, 1, m, columns] for the queries of `attend`: [B or 1, 1, m
    × groups, columns]."""
    return mask if mask is None or mask.shape[2] == 1 else mask.repeat_interleave(groups, dim=2)


class RotaryLayers:
    """Layers of Llama, Qwen2 (biases), Qwen3 (norms of queries and keys) and Mistral, with the
    final norm."""

    def __init__(self, backbone: Any, device: torch.device, dtype: torch.dtype, backend: Backend):
        self._layers, self._norm, self._backend = backbone.layers, backbone.norm, backend
        self._rotary = rotations(backbone).to(device, dtype)
        joins = backend.compiled and all(map(has_plain_products, backbone.layers))
        self._joined = [JoinedProducts(layer) if joins else None for layer in backbone.layers]

    def read(self, x: Tensor, positions: Tensor, columns: Columns, cache: KVCache) -> Tensor:
        """Run new positions after each row's past: x [N, D], positions [B, m] -> [N, D]. Keys
        and values are written."""
        shared = columns.kv[0].shape[2]
        groups = self._layers[0].self_attn.num_key_value_groups
        mask, positions = grouped(columns.mask(), groups), positions.reshape(-1)
        rows, last = columns.rows, columns.last
        if self._backend.compiled and mask is not None:
            part = self._backend.part(masked_layer)
            for layer, joined, kv in zip(self._layers, self._joined, columns.kv, strict=True):
                x = part(layer, joined, x, self._rotary, positions, kv, columns.index, mask)
        else:
            heads = groups * shared
            rotation = angles(self._rotary, positions, heads + shared, shared)
            for i, (layer, joined) in enumerate(zip(self._layers, self._joined, strict=True)):
                kv = columns.kv[i]
                x = read_layer(layer, joined, x, rotation, kv, columns.index, rows, last, mask)
        return rms_norm(self._norm, x)


def rotations(backbone: Any) -> Tensor:
    """Return cosines and signed sines [REACH, 2, 2, d] of all positions: of the rotation, and of
    the identity."""
    # A new module: the frequencies of the model's own may have been cast with its weights.
    cos, sin = type(backbone.rotary_emb)(config=backbone.config)(
        torch.zeros(()), torch.arange(REACH)[None]
    )
    half = cos.shape[-1] // 2
    sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)  # see `heads.layers.RotaryTable`
    rotation = torch.stack((cos[0], sin[0]), 1)  # [REACH, 2, d]
    identity = torch.tensor([1.0, 0.0])[:, None].expand_as(rotation)
    return torch.stack((rotation, identity), 2)


def angles(table: Tensor, positions: Tensor, rotated: int, plain: int) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine for positions [N] from the table of `rotations`, each [N,
    heads, d]: of `rotated` heads and, the identity, of `plain` ones, so that queries, keys and
    values are rotated at once."""
    both = table.index_select(0, positions)
    heads = torch.cat(
        (both[:, :, :1].expand(-1, -1, rotated, -1), both[:, :, 1:].expand(-1, -1, plain, -1)), 2
    )
    return heads[:, 0], heads[:, 1]


def has_plain_products(layer: Any) -> bool:
    """Return whether the linear layers have no adapters and are not quantised."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    )
    return all(type(part) is nn.Linear for part in parts)


class JoinedProducts:
    """Products of a layer with the same input, each as one linear layer with copies of the
    weights."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = join(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = join(mlp.gate_proj, mlp.up_proj)


@torch.no_grad()
def join(*parts: nn.Linear) -> nn.Linear:
    """Return a linear layer that returns the results of these ones side by side."""
    weight = torch.cat([part.weight for part in parts])
    out = nn.Linear(weight.shape[1], len(weight), parts[0].bias is not None, device="meta")
    out.weight = nn.Parameter(weight, requires_grad=False)
    if out.bias is not None:
        out.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return out


def read_layer(
    layer: Any,
    joined: JoinedProducts | None,
    x: Tensor,
    rotation: tuple[Tensor, Tensor],
    kv: Tensor,
    index: Tensor,
    rows: int,
    last: int,
    mask: Tensor | None,
) -> Tensor:
    """Run one layer: x [N, D] -> [N, D]. Its keys and values are written to kv [rows × columns, 2,
    K, d] at index [N], and the first `last` columns of a row are read.

    rotation: see `angles`; mask: see `grouped`.
    """
    attention, mlp, (cos, sin) = layer.self_attn, layer.mlp, rotation
    shared, size = kv.shape[2:]
    heads = attention.num_key_value_groups * shared
    y = rms_norm(layer.input_layernorm, x)
    if joined is None:
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (project(y).unflatten(1, (-1, size)) for project in projections)
    else:
        qkv = product(joined.qkv, y).unflatten(1, (-1, size))
        q, k, v = qkv.split((heads, shared, shared), 1)
    if hasattr(attention, "q_norm"):
        q, k = rms_norm(attention.q_norm, q), rms_norm(attention.k_norm, k)
    qkv = torch.cat((q, k, v), 1)  # [N, H + 2 K, d]
    qkv = torch.addcmul(qkv * cos, qkv.roll(size // 2, -1), sin)
    kv.index_put_((index,), qkv[:, heads:].unflatten(1, (2, shared)))
    y = attend(qkv[:, :heads], *window(kv, rows, last), mask, attention.scaling)
    if joined is None:
        x = x + attention.o_proj(y)
        return x + mlp(rms_norm(layer.post_attention_layernorm, x))
    x = x + product(attention.o_proj, y)
    y = product(joined.gate_up, rms_norm(layer.post_attention_layernorm, x))
    gate, up = y.chunk(2, -1)
    return x + product(mlp.down_proj, mlp.act_fn(gate) * up)


def masked_layer(
    layer: Any,
    joined: JoinedProducts | None,
    x: Tensor,
    table: Tensor,
    positions: Tensor,
    kv: Tensor,
    index: Tensor,
    mask: Tensor,
) -> Tensor:
    """Run one layer; see `read_layer`. table: of `rotations`, read at positions [N]."""
    shared, groups = kv.shape[2], layer.self_attn.num_key_value_groups
    rotation = angles(table, positions, (groups + 1) * shared, shared)
    rows, last = mask.shape[0], mask.shape[3]
    return read_layer(layer, joined, x, rotation, kv, index, rows, last, mask)


def key_positions(cache: KVCache, positions: Tensor, columns: int) -> Tensor:
    """Return positions [B, columns] of the keys in a cache to which those at `positions` [B, m]
    were appended; those of empty columns are arbitrary."""
    column = torch.arange(columns, device=positions.device)
    known = torch.where(
        column < cache.prefix, column, column - cache.prefix + cache.prefix_lengths[:, None]
    )
    at = (
        cache.prefix
        + cache.lengths[:, None]
        + torch.arange(positions.shape[1], device=positions.device)
    )
    return known.scatter(1, at, positions)


class RelativeLayers:
    """Blocks of `cosyvoice-lm`, whose attention uses relative positions, with the modules before
    and after them."""

    def __init__(
        self, backbone: CosyVoiceLM, device: torch.device, dtype: torch.dtype, backend: Backend
    ):
        self._backbone = backbone
        self._table = sinusoids(REACH, backbone.norm.weight.shape[0], device).to(dtype)

    def read(self, x: Tensor, positions: Tensor, columns: Columns, cache: KVCache) -> Tensor:
        """See `RotaryLayers.read`."""
        model: Any = self._backbone
        keys = key_positions(cache, positions, columns.last)
        # [B, m, columns]
        behind = (positions[..., None] - keys[:, None]).clamp(0, columns.last - 1)
        relative, mask = Distances(self._table[: columns.last], behind), columns.mask()
        x = F.relu(model.input_norm(model.input(x))) * math.sqrt(x.shape[1])
        for i, layer in enumerate(model.layers):
            attention = layer.self_attn
            q, k, v = attention.project(layer.norm1(x))  # [N, H, d]
            columns.write(i, torch.stack((k, v), 1))
            q = columns.fold(q)  # [B, H, m, d]
            bias = attention.position_scores(q, relative)
            y = attention.attend(q, *columns.read(i), bias if mask is None else bias + mask)
            x = x + attention.linear_out(columns.flat(y))
            x = x + layer.feed_forward(layer.norm2(x))
        return model.norm(x)


class LanguageReader(Reader):
    """Reader of a `BackboneDecoder`. Hidden states have the type of the heads, keys and values
    that of the layers."""

    config: BackboneConfig

    def __init__(self, model: BackboneDecoder, backend: Backend):
        weight = model.norm.weight
        self.device, self.dtype, self.config = weight.device, weight.dtype, model.config
        self.hidden_dtype = model.heads.base.weight.dtype
        self.backend, self.heads = backend, backend.heads(model.heads)
        self._embedding, self._text_embedding = model.speech_embedding, model.backbone.embed_tokens
        if isinstance(model.backbone, CosyVoiceLM):
            layers: Any = RelativeLayers
        else:
            layers = backend.language_layers(model.backbone) or RotaryLayers
        self._layers = layers(model.backbone, self.device, self.dtype, backend)
        self._causal = CausalMask(self.device, self.dtype)

    def new_cache(
        self, rows: int, text: int, capacity: int, storage: CacheStorage | None = None
    ) -> KVCache:
        config = self.config
        return KVCache(
            config.num_layers,
            rows,
            config.num_kv_heads,
            capacity,
            config.head_dim,
            prefix=text,
            device=self.device,
            dtype=self.dtype,
            allocate=partial(storage.tensors, self.device, self.dtype) if storage else None,
        )

    def text_room(self, units: int) -> int:
        return super().text_room(units + self.config.template_length)

    def cover(self, cache: KVCache) -> None:
        if cache.row_columns > REACH:
            raise ValueError(
                f"{cache.prefix} positions of text and {cache.capacity} of speech exceed the "
                f"{REACH} positions that decoding of language models supports"
            )

    @torch.no_grad()
    def prefill(
        self, text_ids: Tensor, text_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor
    ) -> tuple[KVCache, Tensor]:
        prefix, lengths = text_prefix(
            self.config, self._text_embedding, self._embedding, text_ids, text_lengths
        )
        n, p = prefix.shape[1], prompt_ids.shape[1]
        cache = self.new_cache(len(text_ids), n, p)
        self.cover(cache)
        cache.prefix_lengths = lengths
        column = torch.arange(n + p, device=self.device)
        real = (column < lengths[:, None]) | (column >= n)  # [B, n + P]
        # [B, n + P, n + P]; every row sees at least column 0
        visible = (column <= column[:, None]) & real[:, None]
        positions = torch.where(column < n, column, column - n + lengths[:, None])
        x = torch.cat((prefix.to(self.dtype), self._embed(prompt_ids)), dim=1)
        # text and prompt are read as one tree
        whole = cache.without_prefix()
        columns = columns_of(whole, 0, n + p, self._causal, tree=visible)
        hidden = self._run(whole, x, positions, columns)[:, n:]
        cache.lengths = prompt_lengths
        return cache, hidden

    def read(
        self,
        cache: KVCache,
        tokens: Tensor,
        longest: int,
        layout: Layout | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        part, new = self.part(cache), tokens.shape[1]
        x, positions = part(place)(cache, self._embedding.weight, tokens, layout)
        tree = None if layout is None else layout[0]
        columns = columns_of(cache, longest, new, self._causal, tree=tree, part=part)
        return self._run(cache, x.to(self.dtype), positions, columns)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._embedding(tokens).to(self.dtype)

    def _run(self, cache: KVCache, x: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        """Return hidden states [B, m, D] of x [B, m, D] at positions [B, m] after each row's
        past."""
        hidden = self._layers.read(x.flatten(0, 1), positions, columns, cache)
        return hidden.view(x.shape).to(self.hidden_dtype)


def place(
    cache: KVCache, embedding: Tensor, tokens: Tensor, layout: Layout | None
) -> tuple[Tensor, Tensor]:
    """Return embeddings [B, m, D] and positions [B, m] of tokens [B, m] that follow each row's
    past."""
    offsets = torch.arange(tokens.shape[1], device=tokens.device) if layout is None else layout[1]
    positions = (cache.prefix_lengths + cache.lengths)[:, None] + offsets
    return F.embedding(tokens, embedding), positions
