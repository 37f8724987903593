"""Probabilities of the next tokens and the tokens drawn from them, in few calls.

The mathematics is that of dcar/sampling.py. On the CPU distributions.c does it in one call each. On a GPU, for
samplings that the kernels do not know, and where a row has no probabilities, the reference does it, so that one place
says what is wrong.
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
    """How distributions are warped, for the kernels."""
    return _Warping(temperature, top_k, eos)


def takes(config: SamplingConfig, size: int) -> bool:
    """Whether distributions over `size` ids are warped here: by temperature and a small top-k, or none."""
    return config.top_p >= 1 and not config.repetition_window and not MOST_KEPT < config.top_k < size


def native_probs(own: Kernels, logits: Tensor, config: SamplingConfig, forbidden: Tensor | None,
                 eos: int) -> Tensor | None:
    """`dcar.sampling.warp` of logits [..., V] -> float32 [..., V]. None where a row has no distribution."""
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    return probs if _run(own, logits, config, forbidden, eos, probs, None, None) else None


def native_tokens(own: Kernels, logits: Tensor, u: Tensor, config: SamplingConfig, forbidden: Tensor | None,
          eos: int) -> Tensor | None:
    """The tokens that `dcar.sampling.sample_several` draws from these distributions at numbers u [..., N] -> [..., N].
    None where a row has no distribution."""
    tokens = logits.new_empty(u.shape, dtype=torch.long)
    return tokens if _run(own, logits, config, forbidden, eos, None, u.contiguous(), tokens) else None


def _run(own: Kernels, logits: Tensor, config: SamplingConfig, forbidden: Tensor | None, eos: int, probs: Tensor | None,
         u: Tensor | None, tokens: Tensor | None) -> bool:
    """Fill the distribution, or the tokens; whether every row has a distribution."""
    size, logits = logits.shape[-1], logits.contiguous()
    banned = None if forbidden is None else forbidden.contiguous()
    read = [None if t is None else t.data_ptr() for t in (banned, probs, u, tokens)]
    how = ctypes.addressof(warping(config.temperature, config.top_k, eos))
    undefined = own.run_distributions(logits.data_ptr(), how, *read, logits.numel() // size, size,
                                      0 if u is None else u.shape[-1], torch.get_num_threads())
    if undefined < 0:
        raise RuntimeError(f"could not allocate memory for distributions of {size} ids")
    return not undefined


def probs_of(logits: Tensor, config: SamplingConfig, forbidden: Tensor | None, eos: int,
           history: Tensor | None = None) -> Tensor:
    """As `dcar.sampling.warp`."""
    own, probs = kernels_of(logits, config), None
    if own is not None:
        probs = native_probs(own, logits, config, forbidden, eos)
    return warp(logits, config, forbidden, eos, history) if probs is None else probs


def tokens_of(logits: Tensor, u: Tensor, config: SamplingConfig, forbidden: Tensor | None,
             eos: int) -> tuple[Tensor, Tensor | None]:
    """Tokens [..., N] drawn from the warped distributions of logits [..., V] at numbers u [..., N], as
    `sample_several` draws them; and these distributions, where somebody should look whether they are any."""
    own, tokens = kernels_of(logits, config), None
    if own is not None:
        tokens = native_tokens(own, logits, u, config, forbidden, eos)
    if tokens is not None:
        return tokens, None
    probs = warp(logits, config, forbidden, eos)
    return sample_several(probs, u), probs


def kernels_of(logits: Tensor, config: SamplingConfig | None = None) -> Kernels | None:
    """What computes with numbers of this type and place in C, of distributions with this sampling, where it does."""
    if logits.device.type != "cpu" or config is not None and not takes(config, logits.shape[-1]):
        return None
    return kernels(logits.dtype)
