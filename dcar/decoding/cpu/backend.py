"""Operations of a decoding step in C, for float32 layers and heads of supported widths.

Operations that it does not support (another sampling, a row without a distribution) are computed in
PyTorch.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dcar.decoding.backend import Backend, Decided
from dcar.decoding.cpu.chunk_scorer import NativeChunkScorer, reads_chunk_scorer
from dcar.decoding.cpu.heads import NativeHeads, reads_heads
from dcar.decoding.cpu.native import FLOAT, LONG, POINTER, address, check_memory, kernels, members
from dcar.decoding.cpu.stack import CPUStack, reads_stack
from dcar.decoding.stack import Stack
from dcar.sampling import SamplingConfig
from heads.build import Heads
from heads.candidates import MIN_LOG_PROB
from heads.layers import TransformerLayer
from heads.policy import NEVER, CandidatePolicy

MOST_KEPT = 64
"""Largest top-k of distributions.c."""


class _Warping(ctypes.Structure):
    _fields_ = [("temperature", FLOAT), *members(LONG, "top_k eos")]


class _Decision(ctypes.Structure):
    _fields_ = [
        *members(POINTER, "weight bias scorer"),
        *members(LONG, "reach features actions"),
        *members(FLOAT, "unlikely never"),
    ]
    held: tuple[NativeChunkScorer | None, tuple[Tensor, Tensor]]  # the weights, kept alive


@functools.cache
def warping(temperature: float, top_k: int, eos: int) -> _Warping:
    return _Warping(temperature, top_k, eos)


def serves(logits: Tensor, sampling: SamplingConfig) -> bool:
    """Return whether the C code supports this sampling of logits [..., V]: temperature, and a
    small top-k or none."""
    small = not MOST_KEPT < sampling.top_k < logits.shape[-1]
    return (
        small
        and sampling.top_p >= 1
        and not sampling.repetition_window
        and logits.dtype == torch.float32
    )


class CPUBackend(Backend):
    """Operations in C."""

    copies = True

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def stack(
        self,
        layers: Sequence[TransformerLayer],
        last: Sequence[nn.Module],
        first: Sequence[nn.Module] = (),
    ) -> Stack:
        if reads_stack(layers, last, first):
            return CPUStack(self._library, layers, last, first)
        return Stack(layers, last, first)

    def heads(self, heads: Heads) -> Callable[..., Tensor]:
        return NativeHeads(self._library, heads) if reads_heads(heads) else super().heads(heads)

    def probs(
        self,
        logits: Tensor,
        sampling: SamplingConfig,
        forbidden: Tensor | None,
        eos: int,
        history: Tensor | None = None,
    ) -> Tensor:
        probs = logits.new_empty(logits.shape, dtype=torch.float32)
        if self._draw(logits, sampling, forbidden, eos, probs=probs):
            return probs
        return super().probs(logits, sampling, forbidden, eos, history)

    def tokens(
        self,
        logits: Tensor,
        u: Tensor,
        sampling: SamplingConfig,
        forbidden: Tensor | None,
        eos: int,
    ) -> tuple[Tensor, bool]:
        tokens, u = u.new_empty(u.shape, dtype=torch.long), u.contiguous()
        if self._draw(logits, sampling, forbidden, eos, u=u, tokens=tokens):
            return tokens, True
        return super().tokens(logits, u, sampling, forbidden, eos)

    def _draw(
        self,
        logits: Tensor,
        sampling: SamplingConfig,
        forbidden: Tensor | None,
        eos: int,
        *,
        probs: Tensor | None = None,
        u: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> bool:
        """Write `warp` of logits [..., V] to probs [..., V], and tokens [..., N] drawn from it
        at numbers u [..., N]. Return False if the C code does not support this sampling, or a
        row has no distribution."""
        if not serves(logits, sampling):
            return False
        size, logits = logits.shape[-1], logits.contiguous()
        banned = None if forbidden is None else forbidden.contiguous()
        undefined = self._library.run_distributions(
            logits.data_ptr(),
            ctypes.addressof(warping(sampling.temperature, sampling.top_k, eos)),
            *map(address, (banned, probs, u, tokens)),
            logits.numel() // size,
            size,
            0 if u is None else u.shape[-1],
            torch.get_num_threads(),
        )
        check_memory(undefined < 0, f"distributions of {size} ids")
        return undefined == 0

    def decision(self, policy: CandidatePolicy) -> Callable[..., Decided | None] | None:
        scorer, config = None, policy.config
        if policy.chunk_scorer is not None:
            if not reads_chunk_scorer(policy.chunk_scorer):
                return None
            scorer = NativeChunkScorer(policy.chunk_scorer)
        with torch.no_grad():
            weight, bias = (part[: config.reach].float() for part in policy.end_scores())
        ends = weight.T.contiguous(), bias.contiguous()
        part = _Decision(
            *(t.data_ptr() for t in ends),
            scorer and ctypes.addressof(scorer.part),
            config.reach,
            config.num_features,
            config.num_actions,
            MIN_LOG_PROB,
            NEVER,
        )
        part.held = scorer, ends
        return functools.partial(self._decide, part, config.hidden_size)

    def _decide(
        self,
        part: _Decision,
        width: int,
        hidden: Tensor,
        logits: Tensor,
        u: Tensor,
        several: int,
        sampling: SamplingConfig,
        forbidden: Tensor | None,
        eos: int,
        dial: float,
    ) -> Decided | None:
        if not serves(logits, sampling):
            return None
        (rows, n, size), (scorer, _) = logits.shape, part.held
        if (
            n != part.reach
            or hidden.shape != (rows, width)
            or hidden.dtype != logits.dtype
            or (scorer is not None and size > scorer.part.ids)
        ):
            raise ValueError(
                f"hidden states {tuple(hidden.shape)} and logits {tuple(logits.shape)} do not fit "
                f"a policy of {part.reach} ends"
            )
        hidden, logits, u = hidden.contiguous(), logits.contiguous(), u.contiguous()
        banned = None if forbidden is None else forbidden.contiguous()
        tokens = u.new_empty(rows, several, n, dtype=torch.long)
        features = u.new_empty(rows, several, n, part.features, dtype=torch.float32)
        log_probs = features.new_empty(rows, several * part.actions)
        status = self._library.run_decision(
            ctypes.addressof(part),
            logits.data_ptr(),
            hidden.data_ptr(),
            ctypes.addressof(warping(sampling.temperature, sampling.top_k, eos)),
            address(banned),
            *(t.data_ptr() for t in (u, tokens, features, log_probs)),
            rows,
            several,
            size,
            torch.get_num_threads(),
            dial,
        )
        check_memory(status < 0, f"a decision among {rows * several} chunks")
        return (tokens, features, log_probs) if status else None


def cpu_backend(dtype: torch.dtype) -> Backend:
    """Return the operations in C, or in PyTorch for another dtype than float32 or if there is no
    compiler."""
    library = kernels() if dtype == torch.float32 else None
    return Backend() if library is None else CPUBackend(library)
