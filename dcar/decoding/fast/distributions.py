"""Probabilities of the next tokens and the tokens drawn from them: one call of C each on the CPU (distributions.c).

It computes what dcar/sampling.py does, which stays the reference: on a GPU, for samplings that the kernels do not
support, and where a row has no distribution, `warp` and `sample_several` are called.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dcar.decoding.fast.cpu.native import Kernels, kernels
from dcar.sampling import SamplingConfig, sample_several, warp

MOST_KEPT = 64
"""Of a distribution; distributions.c has the same number."""


class _Warping(ctypes.Structure):
    _fields_ = [("temperature", ctypes.c_float), ("top_k", ctypes.c_long), ("eos", ctypes.c_long)]


@functools.cache
def warping(temperature: float, top_k: int, eos: int) -> _Warping:
    """The settings of `warp`, for the kernels."""
    return _Warping(temperature, top_k, eos)


def takes(config: SamplingConfig, size: int) -> bool:
    """Whether the kernels support this sampling of `size` ids: temperature, and a small top-k or none."""
    return config.top_p >= 1 and not config.repetition_window and not MOST_KEPT < config.top_k < size


def native_probs(native: Kernels, logits: Tensor, config: SamplingConfig, forbidden: Tensor | None,
                 eos: int) -> Tensor | None:
    """`dcar.sampling.warp` of logits [..., V] -> float32 [..., V]. None where a row has no distribution."""
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    return probs if _run(native, logits, config, forbidden, eos, probs, None, None) else None


def native_tokens(native: Kernels, logits: Tensor, u: Tensor, config: SamplingConfig, forbidden: Tensor | None,
                  eos: int) -> Tensor | None:
    """`dcar.sampling.sample_several` of these distributions at numbers u [..., N] -> ids [..., N]. None where a row has
    no distribution."""
    tokens = logits.new_empty(u.shape, dtype=torch.long)
    return tokens if _run(native, logits, config, forbidden, eos, None, u.contiguous(), tokens) else None


def _run(native: Kernels, logits: Tensor, config: SamplingConfig, forbidden: Tensor | None, eos: int,
         probs: Tensor | None, u: Tensor | None, tokens: Tensor | None) -> bool:
    """Fill the distribution, or the tokens; whether every row has a distribution."""
    size, logits = logits.shape[-1], logits.contiguous()
    banned = None if forbidden is None else forbidden.contiguous()
    read = [None if t is None else t.data_ptr() for t in (banned, probs, u, tokens)]
    how = ctypes.addressof(warping(config.temperature, config.top_k, eos))
    undefined = native.run_distributions(logits.data_ptr(), how, *read, logits.numel() // size, size,
                                      0 if u is None else u.shape[-1], torch.get_num_threads())
    if undefined < 0:
        raise RuntimeError(f"could not allocate memory for distributions of {size} ids")
    return not undefined


def probs_of(logits: Tensor, config: SamplingConfig, forbidden: Tensor | None, eos: int,
             history: Tensor | None = None) -> Tensor:
    """As `dcar.sampling.warp`."""
    native = kernels_of(logits, config)
    probs = None if native is None else native_probs(native, logits, config, forbidden, eos)
    return warp(logits, config, forbidden, eos, history) if probs is None else probs


def tokens_of(logits: Tensor, u: Tensor, config: SamplingConfig, forbidden: Tensor | None,
              eos: int) -> tuple[Tensor, Tensor | None]:
    """Tokens [..., N] drawn from the warped distributions of logits [..., V] at numbers u [..., N], as by
    `sample_several`; and these distributions, where the caller has to check that they are any."""
    native = kernels_of(logits, config)
    tokens = None if native is None else native_tokens(native, logits, u, config, forbidden, eos)
    if tokens is not None:
        return tokens, None
    probs = warp(logits, config, forbidden, eos)
    return sample_several(probs, u), probs


def kernels_of(logits: Tensor, config: SamplingConfig) -> Kernels | None:
    """The kernels for logits of this dtype and device, if they support this sampling."""
    if logits.device.type != "cpu" or not takes(config, logits.shape[-1]):
        return None
    return kernels(logits.dtype)
