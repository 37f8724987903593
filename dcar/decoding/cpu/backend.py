"""The operations of a decoding step in C, for the samplings, widths and numbers of rows that the kernels are made for.

What they do not support (another sampling, more rows, a row without a distribution) is computed in PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dcar.decoding.backend import Backend, Decision, LinearEnds
from dcar.decoding.columns import Columns, RotaryCache
from dcar.decoding.cpu.chunk_scorer import NativeChunkScorer, native_chunk_scorer
from dcar.decoding.cpu.heads import native_heads
from dcar.decoding.cpu.native import LONG, POINTER, Kernels, address, kernels, members
from dcar.decoding.stack import Stack
from dcar.sampling import SamplingConfig
from heads.build import Heads
from heads.candidates import MIN_LOG_PROB
from heads.chunk_scorer import ChunkScorer, LogRatios
from heads.layers import TransformerLayer
from heads.policy import NEVER, ChunkPolicyConfig

MOST_KEPT = 64
"""Of a distribution; distributions.c has the same number."""


class _Warping(ctypes.Structure):
    _fields_ = [("temperature", ctypes.c_float), *members(LONG, "top_k eos")]


@functools.cache
def warping(temperature: float, top_k: int, eos: int) -> _Warping:
    """The settings of `warp`, for the kernels."""
    return _Warping(temperature, top_k, eos)


class _Decision(ctypes.Structure):
    _fields_ = [*members(POINTER, "weight bias scorer scorer_weights"),
                *members(LONG, "width reach features actions"), *members(ctypes.c_float, "unlikely never")]


class CPUBackend(Backend):
    """The operations of one dtype in C."""

    copies = True

    def __init__(self, native: Kernels):
        self.native = native

    def stack(self, layers: Sequence[TransformerLayer], last: Sequence[nn.Module],
              first: Sequence[nn.Module] = ()) -> Stack:
        return CPUStack(self.native, layers, last, first)

    def heads(self, heads: Heads) -> Callable[..., Tensor]:
        native = native_heads(self.native, heads)
        if native is None:
            return heads

        def logits(hidden: Tensor, k: int | None = None) -> Tensor:
            flat, k = hidden.reshape(-1, hidden.shape[-1]), heads.num_heads if k is None else k
            return native(flat, k).view(*hidden.shape[:-1], k, -1) if native.takes(len(flat), k) else heads(hidden, k)

        return logits

    def chunk_scorer(self, chunk_scorer: ChunkScorer) -> LogRatios:
        native = kernels(torch.float32)  # as the chunk scorer is, of a decoder of any dtype
        return (native and native_chunk_scorer(native, chunk_scorer)) or chunk_scorer

    def probs(self, logits: Tensor, sampling: SamplingConfig, forbidden: Tensor | None, eos: int,
              history: Tensor | None = None) -> Tensor:
        probs = self._draw(logits, sampling, forbidden, eos)
        return super().probs(logits, sampling, forbidden, eos, history) if probs is None else probs

    def tokens(self, logits: Tensor, u: Tensor, sampling: SamplingConfig, forbidden: Tensor | None,
               eos: int) -> tuple[Tensor, bool]:
        tokens = self._draw(logits, sampling, forbidden, eos, u)
        return super().tokens(logits, u, sampling, forbidden, eos) if tokens is None else (tokens, True)

    def _serves(self, logits: Tensor, sampling: SamplingConfig) -> bool:
        """Whether the kernels support this sampling of logits [..., V]: temperature, and a small top-k or none."""
        small = not MOST_KEPT < sampling.top_k < logits.shape[-1]
        return small and sampling.top_p >= 1 and not sampling.repetition_window and logits.dtype == self.native.dtype

    def _draw(self, logits: Tensor, sampling: SamplingConfig, forbidden: Tensor | None, eos: int,
              u: Tensor | None = None) -> Tensor | None:
        """`warp` of logits [..., V] -> float32 [..., V]; given numbers u [..., N], ids [..., N] drawn from that. None
        if the kernels do not serve this sampling, or a row has no distribution."""
        if not self._serves(logits, sampling):
            return None
        size, logits = logits.shape[-1], logits.contiguous()
        banned = None if forbidden is None else forbidden.contiguous()
        u = None if u is None else u.contiguous()
        probs = logits.new_empty(logits.shape, dtype=torch.float32) if u is None else None
        tokens = None if u is None else logits.new_empty(u.shape, dtype=torch.long)
        undefined = self.native.library.run_distributions(
            logits.data_ptr(), ctypes.addressof(warping(sampling.temperature, sampling.top_k, eos)),
            *map(address, (banned, probs, u, tokens)), logits.numel() // size, size, 0 if u is None else u.shape[-1],
            torch.get_num_threads())
        if undefined < 0:
            raise RuntimeError(f"could not allocate memory for distributions of {size} ids")
        return None if undefined else probs if u is None else tokens

    def decision(self, shape: ChunkPolicyConfig, ends: LinearEnds,
                 chunk_scorer: LogRatios | None) -> Callable[..., Decision | None] | None:
        native = chunk_scorer if isinstance(chunk_scorer, NativeChunkScorer) else None
        if chunk_scorer is not native:
            return None
        addresses = (None, None) if native is None else native.addresses()
        part = _Decision(ends.weight.data_ptr(), ends.bias.data_ptr(), *addresses, shape.hidden_size, shape.reach,
                         shape.features, shape.num_actions, MIN_LOG_PROB, NEVER)
        return functools.partial(self._decide, part)

    def _decide(self, part: _Decision, hidden: Tensor, logits: Tensor, u: Tensor, sampling: SamplingConfig,
                forbidden: Tensor | None, eos: int, dial: float) -> Decision | None:
        if not self._serves(logits, sampling):
            return None
        (rows, n, size), several = logits.shape, u.shape[-1]
        if n != part.reach or hidden.shape != (rows, part.width) or hidden.dtype != logits.dtype:
            raise ValueError(f"hidden states {tuple(hidden.shape)} and logits {tuple(logits.shape)} do not fit a "
                             f"policy of {part.reach} ends")
        hidden, logits, u = hidden.contiguous(), logits.contiguous(), u.contiguous()
        banned = None if forbidden is None else forbidden.contiguous()
        tokens, best = u.new_empty(rows, several, n, dtype=torch.long), u.new_empty(rows, n, dtype=torch.long)
        features = u.new_empty(rows, several, n, part.features, dtype=torch.float32)
        log_probs, taken = features.new_empty(rows, several * part.actions), features.new_empty(rows)
        sizes, chosen = tokens.new_empty(rows), tokens.new_empty(rows)
        longest = self.native.library.run_decision(
            ctypes.addressof(part), logits.data_ptr(), hidden.data_ptr(),
            ctypes.addressof(warping(sampling.temperature, sampling.top_k, eos)), address(banned), u.data_ptr(),
            *(t.data_ptr() for t in (tokens, features, log_probs, sizes, chosen, taken, best)), rows, several,
            size, torch.get_num_threads(), dial)
        if longest < 0:
            raise RuntimeError(f"could not allocate memory for a decision among {rows * several} chunks")
        return Decision(tokens, features, log_probs, (sizes, taken, chosen)) if longest else None


class CPUStack(Stack):
    """Layers in C for few new positions."""

    def __init__(self, native: Kernels, layers: Sequence[TransformerLayer], last: Sequence[nn.Module],
                 first: Sequence[nn.Module] = ()):
        super().__init__(layers, last, first)
        self.native = native.stack(layers, last, first)

    def read(self, x: Tensor, rotary: RotaryCache, positions: Tensor, columns: Columns) -> Tensor:
        if self.native is not None and len(x) <= self.native.rows:
            return self.native(x, rotary, positions, columns)
        return super().read(x, rotary, positions, columns)


def cpu_backend(dtype: torch.dtype) -> Backend:
    """The operations in C, or in PyTorch if there are no kernels for this dtype or no compiler (see `kernels`)."""
    native = kernels(dtype)
    return Backend() if native is None else CPUBackend(native)
