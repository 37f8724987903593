"""Triton kernels of ScaledAdam. Each works on all tensors of a group in one launch.

Their time is that of moving the tensors: in a step, a parameter and its gradient are read twice,
the moments once, and parameter and moments are written. Only tensors at the largest RMS are read
and written once more.

A kernel finds the tensors by a table of their addresses, because those of gradients may change from
step to step. Each program has `BLOCK` elements of one tensor. Sums are of blocks, then of tensors,
in an order that only shapes determine.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcar.optim.tensors import Tensors

BLOCK = 4096
PARAMETERS = tl.constexpr(0)
GRADIENTS = tl.constexpr(1)
MOMENTS = tl.constexpr(2)
SQUARES = tl.constexpr(3)


@triton.jit
def _elements(owners, firsts, sizes, BLOCK: tl.constexpr):
    """Return the tensor of this program, its elements [BLOCK], and which of them exist."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    element = (program - tl.load(firsts + tensor)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tensor, element, element < tl.load(sizes + tensor)


@triton.jit
def _tensor(addresses, kind, count, tensor):
    return tl.load(addresses + kind * count + tensor).to(tl.pointer_type(tl.float32))


@triton.jit
def _measure(addresses, owners, firsts, sizes, sums, count, programs, BLOCK: tl.constexpr):
    tensor, element, real = _elements(owners, firsts, sizes, BLOCK)
    p = tl.load(_tensor(addresses, PARAMETERS, count, tensor) + element, mask=real, other=0.0)
    g = tl.load(_tensor(addresses, GRADIENTS, count, tensor) + element, mask=real, other=0.0)
    target = sums + tl.program_id(0)
    tl.store(target, tl.sum(p * p))
    tl.store(target + programs, tl.sum(g * g))
    tl.store(target + 2 * programs, tl.sum(p * g))


@triton.jit
def _total(sums, firsts, totals, programs, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    kind = tl.program_id(1)
    last = tl.load(firsts + tensor + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(tl.load(firsts + tensor), last, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(sums + kind * programs + i, mask=i < last, other=0.0)
    tl.store(totals + kind * tl.num_programs(0) + tensor, tl.sum(total))


@triton.jit
def _step(
    addresses,
    owners,
    firsts,
    sizes,
    sums,
    fine,
    clip,
    eps,
    rate,
    growth,
    beta1,
    rest1,
    beta2,
    rest2,
    count,
    BLOCK: tl.constexpr,
):
    if tl.load(fine) != 0:
        tensor, element, real = _elements(owners, firsts, sizes, BLOCK)
        parameter = _tensor(addresses, PARAMETERS, count, tensor) + element
        gradient = _tensor(addresses, GRADIENTS, count, tensor) + element
        moment = _tensor(addresses, MOMENTS, count, tensor) + element
        square = _tensor(addresses, SQUARES, count, tensor) + element
        g = tl.load(gradient, mask=real, other=0.0) * tl.load(clip)
        m = tl.load(moment, mask=real, other=0.0) * beta1 + g * rest1
        s = tl.load(square, mask=real, other=0.0) * beta2 + g * g * rest2
        p = tl.load(parameter, mask=real, other=0.0) * tl.load(growth + tensor)
        p -= m / (tl.sqrt(s) + tl.load(eps + tensor)) * tl.load(rate + tensor)
        tl.store(moment, m, mask=real)
        tl.store(square, s, mask=real)
        tl.store(parameter, p, mask=real)
        tl.store(sums + tl.program_id(0), tl.sum(tl.where(real, p * p, 0.0)))


@triton.jit
def _multiply(addresses, owners, firsts, sizes, factors, count, BLOCK: tl.constexpr):
    tensor, element, real = _elements(owners, firsts, sizes, BLOCK)
    factor = tl.load(factors + tensor)
    if factor != 1:
        parameter = _tensor(addresses, PARAMETERS, count, tensor) + element
        p = tl.load(parameter, mask=real, other=0.0)
        tl.store(parameter, p * factor, mask=real)


class KernelTensors(Tensors):
    """`Tensors` by Triton kernels, for float32 on a GPU."""

    def __init__(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        squares: list[Tensor],
    ):
        device = parameters[0].device
        lists = (parameters, gradients, moments, squares)
        addresses = torch.tensor(
            [[tensor.data_ptr() for tensor in each] for each in lists],
            pin_memory=device.type == "cuda",
        )
        blocks = blocks_of(tuple(p.numel() for p in parameters), device)
        self._where = addresses.to(device, non_blocking=True), *blocks
        self._parameters = parameters
        self._firsts, self._sizes = blocks[1:]
        self._count, self._programs = len(parameters), len(blocks[0])

    def measure(self) -> tuple[Tensor, Tensor, Tensor]:
        sums = self._new(3, self._programs)
        with torch.cuda.device_of(sums):  # Triton launches on the current device
            _measure[(self._programs,)](
                *self._where, sums, self._count, self._programs, BLOCK=BLOCK, num_warps=4
            )
        parameters, gradients, products = self._totals(sums)
        return (parameters / self._sizes).sqrt(), gradients.sqrt(), products

    def step(
        self,
        betas: Sequence[float],
        fine: Tensor,
        clip: Tensor,
        eps: Tensor,
        rate: Tensor,
        growth: Tensor,
    ) -> Tensor:
        sums = self._new(1, self._programs)
        decay = [number for beta in betas for number in (beta, 1 - beta)]
        numbers = (fine.view(torch.uint8), clip, eps, rate, growth, *decay)
        with torch.cuda.device_of(sums):
            _step[(self._programs,)](
                *self._where, sums, *numbers, self._count, BLOCK=BLOCK, num_warps=4
            )
        # moments are changed by nobody else
        torch.autograd.graph.increment_version(self._parameters)
        return (self._totals(sums)[0] / self._sizes).sqrt()

    def multiply(self, factors: Tensor) -> None:
        with torch.cuda.device_of(factors):
            _multiply[(self._programs,)](
                *self._where, factors, self._count, BLOCK=BLOCK, num_warps=4
            )

    def _new(self, *shape: int) -> Tensor:
        return self._parameters[0].new_empty(shape)

    def _totals(self, sums: Tensor) -> Tensor:
        """Return the sums [K, N] of tensors, given those of blocks [K, programs]."""
        totals = self._new(len(sums), self._count)
        with torch.cuda.device_of(sums):
            _total[(self._count, len(sums))](
                sums, self._firsts, totals, self._programs, BLOCK=1024, num_warps=4
            )
        return totals


@functools.lru_cache(maxsize=8)
def blocks_of(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Divide N tensors of these sizes among programs. Return the tensor of each program, the first
    program of each tensor [N + 1], and the sizes [N]."""
    counts = [math.ceil(size / BLOCK) for size in sizes]
    firsts = [0, *itertools.accumulate(counts)]
    owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    return (
        owners.to(device),
        torch.tensor(firsts, dtype=torch.int32, device=device),
        torch.tensor(sizes, device=device),
    )
