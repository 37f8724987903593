"""Triton kernels of linear layers for few rows, with the norm before and all that follows inside.

Their time is that of reading the weights, once, 16 bytes at a time. On an H100 (132 processors), in
bfloat16:

- A program makes 16 outputs, so that layers of 1,024 outputs occupy 64 processors; in wide layers
  32, because each program reads the inputs of all rows.
- It has 3 blocks of 256 or 512 inputs under way, 24 KB of weights or more: on that many processors
  enough to cover the latency of the memory.
- `tl.dot` pads rows to 16. A row alone takes the same path, because multiplying zeros while weights
  arrive costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_ROWS = 32
"""Most flat rows of a pass. Each program of a product reads the inputs of all rows; with more rows
they outweigh the weights, and a library's kernel is better."""
MIN_WIDTH = 16
"""Divisor of the inputs of `product`: the least that `tl.dot` multiplies."""
HEAD_SIZES = (16, 32, 64, 128)
"""Sizes of attention heads: what `tl.dot` multiplies and shared memory holds."""

Norm = tuple[Tensor, Tensor | None, float]
"""Weight, bias (None: RMSNorm) and epsilon of a norm."""


@triton.jit
def _moments(x, row, used, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr):
    """Mean and mean square deviation of rows; of the block's own mean, then merged (Chan et al.
    1979), because the difference of two large sums would cancel. Not CENTRED: deviation from 0."""
    mean = tl.zeros_like(row).to(tl.float32)
    squares = tl.zeros_like(mean)
    for start in tl.static_range(0, WIDTH, BLOCK):
        k = start + tl.arange(0, BLOCK)
        block = tl.load(x + row[:, None] * WIDTH + k[None, :], mask=used[:, None], other=0.0)
        block = block.to(tl.float32)
        if CENTRED:
            own = tl.sum(block, 1) / BLOCK
            block -= own[:, None]
            squares += (own - mean) * (own - mean) * (start * BLOCK / (start + BLOCK))
            mean += (own - mean) * (BLOCK / (start + BLOCK))
        squares += tl.sum(block * block, 1)
    return mean, squares / WIDTH


@triton.jit
def multiply(
    x,
    weight,
    other,
    gain,
    shift,
    epsilon,
    rows,
    output,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return norm(x) weightᵀ and norm(x) otherᵀ for the rows `output` of both weights, as float32
    [ROWS, OUTPUTS]; `other`, `gain` and `shift` may be None."""
    row = tl.arange(0, ROWS)
    used = row < rows
    source = output.to(tl.int64) * WIDTH
    if gain is not None:
        mean, variance = _moments(x, row, used, WIDTH, BLOCK, shift is not None)
        scale = tl.rsqrt(variance + epsilon)
    y = tl.zeros([ROWS, OUTPUTS], tl.float32)
    z = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=3):
        k = start + tl.arange(0, BLOCK)
        w = tl.load(weight + source[None, :] + k[:, None])
        v = tl.load(x + row[:, None] * WIDTH + k[None, :], mask=used[:, None], other=0.0)
        if gain is not None:
            v = v.to(tl.float32)
            if shift is not None:
                v -= mean[:, None]
            v = v * scale[:, None] * tl.load(gain + k).to(tl.float32)[None, :]
            if shift is not None:
                v += tl.load(shift + k).to(tl.float32)[None, :]
            v = v.to(w.dtype)
        y = tl.dot(v, w, y, input_precision=PRECISION)
        if other is not None:
            w = tl.load(other + source[None, :] + k[:, None])
            z = tl.dot(v, w, z, input_precision=PRECISION)
    return y, z


@triton.jit
def _product(
    x,
    weight,
    gate,
    bias,
    gain,
    shift,
    residual,
    out,
    rows,
    outputs,
    epsilon,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = column < outputs
    output = tl.minimum(column, outputs - 1)
    y, gates = multiply(
        x,
        weight,
        gate,
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
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        y *= gates * tl.sigmoid(gates)
    if GELU:  # tanh(t) = 2 sigmoid(2 t) - 1
        y *= tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    target = row[:, None] * outputs + column[None, :]
    written = (row < rows)[:, None] & inside[None, :]
    if residual is not None:
        y += tl.load(residual + target, mask=written, other=0.0).to(tl.float32)
    tl.store(out + target, y.to(out.dtype.element_ty), mask=written)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: Tensor | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return f(norm(x) weightᵀ + bias) + residual, [N, out], of x [N, in], weight [out, in].

    norm: see `Norm`. gate [out, in]: f multiplies by SiLU(norm(x) gateᵀ), as in SwiGLU; gelu: f is
    GELU (by tanh). N is at most `MAX_ROWS`, `in` a multiple of `MIN_WIDTH`. Sums are float32; the
    products of float32 weights as torch's float32 precision says.
    """
    rows, outputs = len(x), len(weight)
    out = x.new_empty(rows, outputs)
    gain, shift, epsilon = norm or (None, None, 0.0)
    each = 32 if outputs >= 3072 else 16
    _product[(triton.cdiv(outputs, each),)](
        x,
        weight,
        gate,
        bias,
        gain,
        shift,
        residual,
        out,
        rows,
        outputs,
        epsilon,
        OUTPUTS=each,
        GELU=gelu,
        **blocks_of(x, plain=norm is None and gate is None),
    )
    return out


def blocks_of(x: Tensor, plain: bool = False) -> dict[str, Any]:
    """Return how a kernel divides the inputs x [N, in] of a product; plain: without norm and gate.
    BLOCK, the inputs that are multiplied at once, divides their number. The shared memory of a GPU
    for desktops, 99 KiB, is enough."""
    rows, width = x.shape
    padded = max(16, triton.next_power_of_2(rows))
    inputs = 512 if width >= 4096 and plain else 256
    most = inputs * 32 // (padded * x.element_size())
    return {
        "WIDTH": width,
        "ROWS": padded,
        "BLOCK": min(width & -width, most),
        "PRECISION": precision(x.dtype),
        "num_warps": 4,
    }


def fits(products: Iterable[nn.Linear], head_sizes: Iterable[int]) -> bool:
    """Return whether the kernels support layers of these products and sizes of attention heads."""
    products = list(products)
    return (
        products[0].weight.dtype in DTYPES
        and all(part.in_features % MIN_WIDTH == 0 for part in products)
        and all(size in HEAD_SIZES for size in head_sizes)
    )


def precision(dtype: torch.dtype) -> str:
    """Return how `tl.dot` may round numbers of this type: float32 as torch's products do."""
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    return "ieee" if exact and dtype == torch.float32 else "tf32"
