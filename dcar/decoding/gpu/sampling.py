"""Triton kernels of sampling: the set of tokens to draw from, found without sorting, and
repetition-aware sampling of a chunk.

A program holds the distribution of a token in registers, up to `MOST_IDS` ids. The set ends at the
value that bisection over the bits of a float32 finds in 32 sums, and among ids of that value by a
cumulative sum. Weights are summed as whole multiples of 2^-52, so the order of a sum does not
matter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcar import ties
from dcar.repetition import least_count, others

MOST_IDS = 8192
"""Most ids of a distribution in registers."""
ONE = 2**52
"""Weight 1 as a whole number."""


@triton.jit
def _first(order, weight, limit):
    """Return where the predecessors weigh less than `limit`, in descending `order`, of equals by
    index."""
    high = tl.max(order, 0)
    low = high * 0 - 2139095042  # before -inf
    for _ in range(32):
        middle = (low & high) + ((low ^ high) >> 1)
        short = tl.sum(tl.where(order > middle, weight, 0), 0) < limit
        high = tl.where(short, middle, high)
        low = tl.where(short, low, middle)
    tied = tl.where(order == high, weight, 0)
    before = tl.sum(tl.where(order > high, weight, 0), 0) + tl.cumsum(tied, 0) - tied
    return (order > high) | ((order == high) & (before < limit))


@triton.jit
def _kept(values, weights, out, size, k, limit, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < size
    first = tl.program_id(0).to(tl.int64) * size
    value = tl.load(values + first + i, mask=inside, other=0.0)
    value = tl.where(value == 0, 0.0, value)  # one zero
    value = tl.where(value != value, float("nan"), value)  # one NaN, the largest
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
    kept = inside
    if k > 0:
        kept = kept & _first(order, inside.to(tl.int32), k)
    if weights is not None:
        weight = tl.load(weights + first + i, mask=inside, other=0.0).to(tl.float64)
        kept = kept & _first(order, (weight * 4503599627370496.0).to(tl.int64), limit)
    tl.store(out + first + i, kept, mask=inside)


def _launch_kept(values: Tensor, k: int, weights: Tensor | None, limit: int) -> Tensor:
    values, size = values.contiguous(), values.shape[-1]
    weights = None if weights is None else weights.contiguous()
    out = torch.empty_like(values, dtype=torch.bool)
    with torch.cuda.device_of(values):  # Triton launches on the current device
        _kept[(values.numel() // size,)](values, weights, out, size, k, limit, **block_of(size))
    return out


_kept_operator = torch.library.custom_op("dcar::kept", _launch_kept, mutates_args=())


@_kept_operator.register_fake
def _(values: Tensor, *_: object) -> Tensor:
    return torch.empty_like(values, dtype=torch.bool)


def largest(values: Tensor, k: int, weights: Tensor | None = None, p: float = 1.0) -> Tensor:
    """See `dcar.ties.largest`, of values float32. The sums of weights are exact here and rounded
    there: the results differ if the predecessors of a token weigh p within the rounding of a sum of
    all weights (2^-23 for float32 weights)."""
    if values.shape[-1] > MOST_IDS:
        return ties.largest(values, k, weights, p)
    return _kept_operator(values, k, weights, max(1, math.ceil(p * ONE)))


@triton.jit
def _in_turn(
    full,
    nucleus,
    rest,
    history,
    numbers,
    tokens,
    probs,
    size,
    count,
    repeats,
    WINDOW: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < size
    w = tl.arange(0, PLACES)
    for j in range(count):
        # the window: before the chunk, then within it
        old = tl.load(history + row * WINDOW + j + w, mask=j + w < WINDOW, other=-1)
        new = (j + w >= WINDOW) & (w < WINDOW)
        seen = tl.maximum(old, tl.load(tokens + row * count + j + w - WINDOW, mask=new, other=-1))
        seen = tl.minimum(seen, size - 1)
        same = seen[:, None] == seen[None, :]
        known = tl.sum((same & (w[None, :] < w[:, None])).to(tl.int32), 1) > 0
        repeated = (seen >= 0) & (tl.sum(same.to(tl.int32), 1) >= repeats) & (known == 0)
        first = (row * count + j) * size
        n = tl.load(nucleus + first + seen, mask=repeated, other=0.0)
        f = tl.load(full + first + seen, mask=repeated, other=0.0)
        if rest is None:
            again = tl.sum(n, 0)
            q = f * again
        else:
            left = tl.load(rest + first + seen, mask=repeated, other=1.0)
            shares = tl.where(left > 0, n / left, 0.0)
            again = tl.sum(shares, 0)
            q = tl.where(left > 0, 0.0, n) + f * tl.maximum(again - shares, 0.0)
        n = tl.load(nucleus + first + i, mask=inside, other=0.0)
        f = tl.load(full + first + i, mask=inside, other=0.0)
        tl.store(probs + first + i, (n + f * again).to(tl.float32), mask=inside)
        tl.debug_barrier()
        tl.store(probs + first + seen, q.to(tl.float32), mask=repeated)
        tl.debug_barrier()
        p = tl.load(probs + first + i, mask=inside, other=0.0)
        p = (p * (1 / tl.sum(p.to(tl.float64), 0))).to(tl.float32)
        tl.store(probs + first + i, p, mask=inside)
        cumulative = tl.cumsum(p.to(tl.float64), 0)
        total = tl.sum(tl.where(i == size - 1, cumulative, 0.0), 0)
        above = cumulative > tl.load(numbers + row * count + j) * total  # false for NaN
        token = tl.sum((inside & (above == 0)).to(tl.int32), 0)
        tl.store(tokens + row * count + j, token.to(tl.int64))
        tl.debug_barrier()


def _launch_in_turn(
    full: Tensor, nucleus: Tensor, rest: Tensor | None, history: Tensor, u: Tensor, repeats: int
) -> tuple[Tensor, Tensor]:
    (rows, count, size), window = full.shape, history.shape[1]
    tokens = torch.empty(rows, count, dtype=torch.long, device=full.device)
    probs = torch.empty(full.shape, dtype=torch.float32, device=full.device)
    with torch.cuda.device_of(full):
        _in_turn[(rows,)](
            full.contiguous(),
            nucleus.contiguous(),
            None if rest is None else rest.contiguous(),
            history.contiguous(),
            u.contiguous(),
            tokens,
            probs,
            size,
            count,
            repeats,
            WINDOW=window,
            PLACES=max(2, triton.next_power_of_2(window)),
            **block_of(size),
        )
    return tokens, probs


_in_turn_operator = torch.library.custom_op("dcar::in_turn", _launch_in_turn, mutates_args=())


@_in_turn_operator.register_fake
def _(full: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    probs = torch.empty(full.shape, dtype=torch.float32, device=full.device)
    return torch.empty(full.shape[:2], dtype=torch.long, device=full.device), probs


def in_turn(
    full: Tensor, nucleus: Tensor, history: Tensor, u: Tensor, share: float, mask: bool
) -> tuple[Tensor, Tensor]:
    """Draw as `Backend.one_by_one` does, from distributions of at most `MOST_IDS` ids. The sums are
    those of `repetition_aware`, in another order."""
    repeats = least_count(history.shape[1], share)
    return _in_turn_operator(full, nucleus, others(full) if mask else None, history, u, repeats)


def block_of(size: int) -> dict[str, int]:
    """Return the sizes of a program that holds so many ids."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
