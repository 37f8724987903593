"""Triton kernels of attention for passes of few positions: rotary positions after norms of the
heads, and attention to the cache, its columns divided among programs.

The cache is the flat one of `heads.layers.KVCache`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcar.decoding.columns import Columns
from dcar.decoding.gpu.product import precision
from dcar.decoding.gpu.projection import Angles

SPLIT = 64
"""Columns of a program of `attend`."""


@triton.jit
def _rotate(
    qkv,
    cos,
    sin,
    positions,
    index,
    query_gain,
    key_gain,
    queries,
    cache,
    first,
    angles,
    epsilon,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
):
    n = tl.program_id(0)
    head = tl.program_id(1)
    half: tl.constexpr = SIZE // 2
    i = tl.arange(0, half)
    source = qkv + (n * (HEADS + 2 * SHARED) + head) * SIZE
    a = tl.load(source + i).to(tl.float32)
    b = tl.load(source + half + i).to(tl.float32)
    if head < HEADS + SHARED:
        scale = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / SIZE + epsilon)
        gain = tl.where(head < HEADS, query_gain, key_gain)
        a *= scale * tl.load(gain + i).to(tl.float32)
        b *= scale * tl.load(gain + half + i).to(tl.float32)
        angle = (tl.load(positions + n) - first) * angles
        c = tl.load(cos + angle + i).to(tl.float32)
        s = tl.load(sin + angle + half + i).to(tl.float32)
        a, b = a * c - b * s, b * c + a * s
    if head < HEADS:
        target = queries + (n * HEADS + head) * SIZE
    else:
        target = cache + (tl.load(index + n) * 2 * SHARED + head - HEADS) * SIZE
    tl.store(target + i, a.to(cache.dtype.element_ty))
    tl.store(target + half + i, b.to(cache.dtype.element_ty))


def rotate(
    qkv: Tensor,
    angles: Angles,
    positions: Tensor,
    index: Tensor,
    cache: Tensor,
    gains: tuple[Tensor, Tensor, float],
) -> Tensor:
    """Normalise each head of the queries and keys of qkv [N, (H + 2 K) d] (RMSNorm, as Qwen3
    does; gains: weights for queries and for keys, and epsilon). Otherwise see `project`, which
    does the same without a norm in one kernel with the product."""
    _, _, shared, size = cache.shape
    heads = qkv.shape[1] // size - 2 * shared
    queries = qkv.new_empty(len(qkv), heads, size)
    cos, sin, first = angles
    query_gain, key_gain, epsilon = gains
    _rotate[(len(qkv), heads + 2 * shared)](
        qkv,
        cos,
        sin,
        positions,
        index,
        query_gain,
        key_gain,
        queries,
        cache,
        first,
        cos.stride(0),
        epsilon,
        HEADS=heads,
        SHARED=shared,
        SIZE=size,
        num_warps=1,
    )
    return queries


@triton.jit
def _attend(
    queries,
    cache,
    lengths,
    prefix_lengths,
    tree,
    out,
    sums,
    peaks,
    finished,
    columns,
    prefix,
    new,
    tree_stride,
    scale,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // SHARED
    split = tl.program_id(0)
    row = tl.program_id(2) // SHARED
    shared = tl.program_id(2) % SHARED
    length = tl.load(lengths + row).to(tl.int32)
    total = prefix + length + new
    # a row that has ended may be longer than what is read; its parts are merged nevertheless
    parts = tl.minimum((total + SPLIT - 1) // SPLIT, tl.num_programs(0))
    if split < parts:
        query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
        position = query // GROUP
        valid = position < new
        size = tl.arange(0, SIZE)
        flat = ((row * new + position) * HEADS + shared * GROUP + query % GROUP) * SIZE
        place = flat[:, None] + size[None, :]
        q = tl.load(queries + place, mask=valid[:, None], other=0.0)

        column = split * SPLIT + tl.arange(0, SPLIT)
        age = column - (prefix + length)  # of the new positions: which one
        past = (column < tl.load(prefix_lengths + row)) | ((column >= prefix) & (age < 0))
        fresh = (age >= 0) & (age < new)
        source = ((row.to(tl.int64) * columns + column) * 2 * SHARED + shared) * SIZE
        entry = cache + source[:, None] + size[None, :]
        known = (past | fresh)[:, None]
        key = tl.load(entry, mask=known, other=0.0)
        value = tl.load(entry + SHARED * SIZE, mask=known, other=0.0)
        if tree is None:
            seen = past[None, :] | (fresh[None, :] & (age[None, :] <= position[:, None]))
        else:
            edge = tree + row * tree_stride + position[:, None] * new + age[None, :]
            allowed = tl.load(edge, mask=valid[:, None] & fresh[None, :], other=0) != 0
            seen = past[None, :] | allowed
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where(seen, score, float("-inf"))
        peak = tl.maximum(tl.max(score, 1), -1e30)  # finite where a query sees nothing
        weight = tl.exp2(score - peak[:, None])
        mass = tl.sum(weight, 1)
        attended = tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)

        group = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        part = (group * tl.num_programs(0) + split) * QUERIES + tl.arange(0, QUERIES)
        tl.store(sums + part[:, None] * SIZE + size[None, :], attended, mask=valid[:, None])
        tl.store(peaks + 2 * part, peak)
        tl.store(peaks + 2 * part + 1, mass)
        tl.debug_barrier()  # the counter tells others that all of this is there
        if tl.atomic_add(finished + group, 1) == parts - 1:  # the last part merges all
            tl.store(finished + group, 0)
            peak = tl.full([QUERIES], -1e30, tl.float32)
            mass = tl.zeros([QUERIES], tl.float32)
            attended = tl.zeros([QUERIES, SIZE], tl.float32)
            for other in tl.range(0, parts):
                part = (group * tl.num_programs(0) + other) * QUERIES + tl.arange(0, QUERIES)
                its = tl.load(peaks + 2 * part, cache_modifier=".cg")
                higher = tl.maximum(peak, its)
                old = tl.exp2(peak - higher)
                fraction = tl.exp2(its - higher)
                mass = mass * old
                mass += fraction * tl.load(peaks + 2 * part + 1, cache_modifier=".cg")
                more = tl.load(
                    sums + part[:, None] * SIZE + size[None, :],
                    mask=valid[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                attended = attended * old[:, None] + more * fraction[:, None]
                peak = higher
            result = attended / mass[:, None]
            tl.store(out + place, result.to(out.dtype.element_ty), mask=valid[:, None])


def attend(
    queries: Tensor, kv: Tensor, columns: Columns, finished: Tensor, scale: float | None = None
) -> Tensor:
    """Attend with the queries [N, H, d] of new positions to the keys and values of a layer,
    already written: [N, H d].

    finished: int32 zeros, `MAX_ROWS` × H of them, which are zeros again afterwards.
    """
    cache, (count, heads, size), shared = columns.cache, queries.shape, kv.shape[2]
    tree, new, out = columns.tree, columns.new, torch.empty_like(queries)
    tree_stride = 0
    if tree is not None:
        tree = tree.contiguous().view(torch.uint8)
        tree_stride = new * new if len(tree) > 1 else 0
    group, rounding = heads // shared, precision(queries.dtype)
    # without tensor cores the numbers of a larger block do not fit into registers
    block = min(16 if rounding == "ieee" else 64, max(16, triton.next_power_of_2(new * group)))
    grid = (
        triton.cdiv(columns.last, SPLIT),
        triton.cdiv(new * group, block),
        count // new * shared,
    )
    parts = grid[0] * grid[1] * grid[2] * block
    _attend[grid](
        queries,
        kv,
        cache.lengths,
        cache.prefix_lengths,
        tree,
        out,
        queries.new_empty(parts, size, dtype=torch.float32),
        queries.new_empty(parts, 2, dtype=torch.float32),
        finished,
        cache.row_columns,
        cache.prefix,
        new,
        tree_stride,
        (scale or size**-0.5) * 1.4426950408889634,  # for powers of 2
        HEADS=heads,
        SHARED=shared,
        SIZE=size,
        QUERIES=block,
        SPLIT=SPLIT,
        PRECISION=rounding,
        num_warps=8,
    )
    return out.view(count, heads * size)
