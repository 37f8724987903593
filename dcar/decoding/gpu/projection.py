"""Triton kernel of queries, keys and values for few rows: norm, product, rotary positions and the
write to the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dcar.decoding.gpu.product import Norm, blocks_of, multiply

Angles = tuple[Tensor, Tensor, int]
"""Cosine and signed sine of rotary positions, each [P, …] with the d numbers of a head first in a
row, and the position of the first row."""


@triton.jit
def _project(
    x,
    weight,
    bias,
    gain,
    shift,
    cos,
    sin,
    positions,
    index,
    queries,
    kv,
    rows,
    first,
    angles,
    epsilon,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # a program has the outputs i of both halves of a head, which are rotated together
    half: tl.constexpr = SIZE // 2
    head = tl.program_id(0)
    i = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    used = row < rows
    output = head * SIZE + i
    a, b = multiply(
        x,
        weight,
        weight + half * WIDTH,
        gain,
        shift,
        epsilon,
        rows,
        output,
        WIDTH,
        ROWS,
        OUTPUTS,
        BLOCK,
        PRECISION,
    )
    if bias is not None:
        a += tl.load(bias + output).to(tl.float32)[None, :]
        b += tl.load(bias + half + output).to(tl.float32)[None, :]
    if head < HEADS + SHARED:  # values are not rotated
        angle = (tl.load(positions + row, mask=used, other=0) - first) * angles
        angle = angle[:, None] + i[None, :]
        c = tl.load(cos + angle, mask=used[:, None], other=0.0).to(tl.float32)
        s = tl.load(sin + angle + half, mask=used[:, None], other=0.0).to(tl.float32)
        a, b = a * c - b * s, b * c + a * s
    if head < HEADS:
        target = queries
        place = (row * HEADS + head).to(tl.int64) * SIZE
    else:
        target = kv
        place = tl.load(index + row, mask=used, other=0) * 2 * SHARED + head - HEADS
        place = place * SIZE
    target = target + place[:, None] + i[None, :]
    tl.store(target, a.to(kv.dtype.element_ty), mask=used[:, None])
    tl.store(target + half, b.to(kv.dtype.element_ty), mask=used[:, None])


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    angles: Angles,
    positions: Tensor,
    index: Tensor,
    kv: Tensor,
) -> Tensor:
    """Compute queries, keys and values of x [N, in] as `product` does. Rotate queries and keys by
    the angles of positions [N], and write keys and values to rows index [N] of a layer's cache
    [columns, 2, K, d]. Return the queries [N, H, d]."""
    rows, (shared, size) = len(x), kv.shape[2:]
    heads = len(weight) // size - 2 * shared
    queries = x.new_empty(rows, heads, size)
    cos, sin, first = angles
    each = min(16, size // 2)
    _project[(heads + 2 * shared, size // 2 // each)](
        x,
        weight,
        bias,
        norm[0],
        norm[1],
        cos,
        sin,
        positions,
        index,
        queries,
        kv,
        rows,
        first,
        cos.stride(0),
        norm[2],
        HEADS=heads,
        SHARED=shared,
        SIZE=size,
        OUTPUTS=each,
        **blocks_of(x),
    )
    return queries
