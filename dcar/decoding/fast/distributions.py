"""Probabilities of the next tokens and the tokens drawn from them: one call of C each on the CPU (distributions.c).

It computes what dcar/sampling.py does, which stays the reference: on a GPU, for samplings that the kernels do not
support, and where a row has no distribution, `warp` and `sample_several` are called.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dcar.decoding.fast.cpu.native import LONG, Kernels, address, kernels, members
from dcar.sampling import SamplingConfig, sample_several, warp

MOST_KEPT = 64
"""Of a distribution; distributions.c has the same number."""


class _Warping(ctypes.Structure):
    _fields_ = [("temperature", ctypes.c_float), *members(LONG, "top_k eos")]


@functools.cache
def warping(temperature: float, top_k: int, eos: int) -> _Warping:
    """The settings of `warp`, for the kernels."""
    return _Warping(temperature, top_k, eos)


def kernels_of(logits: Tensor, config: SamplingConfig) -> Kernels | None:
    """The kernels for logits [..., V] of this dtype and device, if they support this sampling: temperature, and a small
    top-k or none."""
    small = not MOST_KEPT < config.top_k < logits.shape[-1]
    supported = logits.device.type == "cpu" and small and config.top_p >= 1 and not config.repetition_window
    return kernels(logits.dtype) if supported else None


def native_draw(native: Kernels, logits: Tensor, config: SamplingConfig, forbidden: Tensor | None, eos: int,
                u: Tensor | None = None) -> Tensor | None:
    """`dcar.sampling.warp` of logits [..., V] -> float32 [..., V]; given numbers u [..., N], `sample_several` of that
    -> ids [..., N]. None where a row has no distribution."""
    size, logits = logits.shape[-1], logits.contiguous()
    banned = None if forbidden is None else forbidden.contiguous()
    u = None if u is None else u.contiguous()
    probs = logits.new_empty(logits.shape, dtype=torch.float32) if u is None else None
    tokens = None if u is None else logits.new_empty(u.shape, dtype=torch.long)
    undefined = native.library.run_distributions(
        logits.data_ptr(), ctypes.addressof(warping(config.temperature, config.top_k, eos)),
        *map(address, (banned, probs, u, tokens)), logits.numel() // size, size, 0 if u is None else u.shape[-1],
        torch.get_num_threads())
    if undefined < 0:
        raise RuntimeError(f"could not allocate memory for distributions of {size} ids")
    return None if undefined else probs if u is None else tokens


def probs_of(logits: Tensor, config: SamplingConfig, forbidden: Tensor | None, eos: int,
             history: Tensor | None = None) -> Tensor:
    """As `dcar.sampling.warp`."""
    native = kernels_of(logits, config)
    probs = None if native is None else native_draw(native, logits, config, forbidden, eos)
    return warp(logits, config, forbidden, eos, history) if probs is None else probs


def tokens_of(logits: Tensor, u: Tensor, config: SamplingConfig, forbidden: Tensor | None,
              eos: int) -> tuple[Tensor, Tensor | None]:
    """Tokens [..., N] drawn from the warped distributions of logits [..., V] at numbers u [..., N], as by
    `sample_several`; and these distributions, where the caller has to check that they are any."""
    native = kernels_of(logits, config)
    tokens = None if native is None else native_draw(native, logits, config, forbidden, eos, u)
    if tokens is not None:
        return tokens, None
    probs = warp(logits, config, forbidden, eos)
    return sample_several(probs, u), probs
