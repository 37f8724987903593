"""The chunk scorer in a decoding step: on the CPU a GRU over at most K tokens in one call of C (chunk_scorer.c).

It computes what heads/chunk_scorer.py does, which stays the reference.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from dcar.decoding.cpu.native import LONG, POINTER, Kernels, LinearPart, members
from heads.chunk_scorer import ChunkScorer

LANES = 16
"""Widths that are a multiple of it fill the vectors of every processor."""


class _ChunkScorer(ctypes.Structure):
    _fields_ = [*members(POINTER, "token seen offset"), *members(LinearPart, "context input hidden inner"),
                ("output", POINTER), ("output_bias", ctypes.c_float), *members(LONG, "ids features width")]


class NativeChunkScorer:
    """`ChunkScorer.forward` without the calls of some 250 operators; it holds the weights, copied where they are folded
    or packed in panels."""

    def __init__(self, native: Kernels, chunk_scorer: ChunkScorer):
        """chunk_scorer: one that `native_chunk_scorer` accepts."""
        config = chunk_scorer.config
        with torch.no_grad():
            # The input of SiLU is a sum over parts, and the part of a token is constant.
            embedding, seen = chunk_scorer.token.weight.tensor_split((config.embedding_size,), 1)
            token = torch.addmm(chunk_scorer.token.bias, chunk_scorer.embedding.weight, embedding.T)
            state, start, inner = chunk_scorer.state, chunk_scorer.start, chunk_scorer.inner
            of_input, of_state, input_bias, state_bias = chunk_scorer.layer.all_weights[0]
            context = torch.cat((state.weight, start.weight)), torch.cat((state.bias, start.bias))
            products = [native.linear(*part) for part in (
                context, (of_input, input_bias), (of_state, state_bias), (inner.weight, inner.bias))]
            tables = [token, seen.T.contiguous(), chunk_scorer.offset.detach()]
            output = chunk_scorer.output.weight.detach()
            self._held = *products, *tables, output
            self._part = _ChunkScorer(*(t.data_ptr() for t in tables), *(p.part() for p in products), output.data_ptr(),
                                    float(chunk_scorer.output.bias), len(token), seen.shape[1], config.width)
        self._sizes, self._run = (config.num_heads, config.hidden_size, seen.shape[1]), native.library.run_chunk_scorer

    def addresses(self) -> tuple[int | None, int]:
        """Of the C function and of its weights."""
        return ctypes.cast(self._run, ctypes.c_void_p).value, ctypes.addressof(self._part)

    def __call__(self, hidden: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """As `ChunkScorer.forward`; float32. IndexError for a token that is no id."""
        rows, n = tokens.shape
        most, size, features = self._sizes
        if n > most or hidden.shape != (rows, size) or candidates.shape != (rows, n, features):
            raise ValueError(f"hidden states {tuple(hidden.shape)} and candidates {tuple(candidates.shape)} do not fit "
                             f"{rows} chunks of {n} tokens, of at most {most}")
        hidden, tokens, candidates = hidden.float().contiguous(), tokens.contiguous(), candidates.float().contiguous()
        added = hidden.new_empty(rows, n)
        failed = self._run(ctypes.addressof(self._part), hidden.data_ptr(), tokens.data_ptr(), candidates.data_ptr(),
                           added.data_ptr(), rows, 1, n, features, 1, torch.get_num_threads())
        if failed == 1:
            raise RuntimeError(f"could not allocate memory for the joint score of {rows} chunks")
        if failed:
            raise IndexError(f"a token outside the {self._part.ids} ids of this chunk scorer")
        return added


def native_chunk_scorer(native: Kernels, chunk_scorer: ChunkScorer) -> NativeChunkScorer | None:
    """This chunk scorer in C; None where its dtype, memory layout or width is not supported, or a layer is not as
    heads/chunk_scorer.py makes it."""
    linear = (chunk_scorer.token, chunk_scorer.state, chunk_scorer.start, chunk_scorer.inner, chunk_scorer.output)
    plain = type(chunk_scorer.layer) is nn.GRU and all(type(layer) is nn.Linear for layer in linear)
    if not plain or native.dtype != torch.float32 or chunk_scorer.config.width % LANES:
        return None
    if not all(native.reads(weight) for weight in chunk_scorer.parameters()):
        return None
    return NativeChunkScorer(native, chunk_scorer)
