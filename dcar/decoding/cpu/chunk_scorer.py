"""Chunk scorer of a policy in C: a GRU over at most K tokens, within the whole decision
(chunk_scorer.c)."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from dcar.decoding.cpu.native import FLOAT, LANES, LONG, POINTER, Linear, Weights, members, reads
from heads.chunk_scorer import ChunkScorer


class _ChunkScorer(ctypes.Structure):
    _fields_ = [
        *members(POINTER, "token seen offset"),
        *members(Linear, "context input hidden inner"),
        ("output", POINTER),
        ("output_bias", FLOAT),
        *members(LONG, "ids features width"),
    ]


class NativeChunkScorer:
    """Weights of a `ChunkScorer`, copied, for run_decision."""

    @torch.no_grad()
    def __init__(self, chunk_scorer: ChunkScorer):
        """Copy the weights of a chunk scorer that `reads_chunk_scorer` accepts."""
        config, self._weights = chunk_scorer.config, (weights := Weights())
        # The input of SiLU is a sum over parts, and the part of a token is constant.
        embedding, seen = chunk_scorer.token.weight.tensor_split((config.embedding_size,), 1)
        token = torch.addmm(chunk_scorer.token.bias, chunk_scorer.embedding.weight, embedding.T)
        state = chunk_scorer.state
        start = chunk_scorer.start
        inner = chunk_scorer.inner
        output = chunk_scorer.output
        of_input, of_state, input_bias, state_bias = chunk_scorer.layer.all_weights[0]
        context = torch.cat((state.weight, start.weight)), torch.cat((state.bias, start.bias))
        products = (
            context,
            (of_input, input_bias),
            (of_state, state_bias),
            (inner.weight, inner.bias),
        )
        self.part = _ChunkScorer(
            *map(weights.address, (token, seen.T, chunk_scorer.offset)),
            *(weights.linear(*p) for p in products),
            weights.address(output.weight),
            float(output.bias),
            len(token),
            seen.shape[1],
            config.width,
        )


def reads_chunk_scorer(chunk_scorer: ChunkScorer) -> bool:
    """Return whether the C code supports this chunk scorer: as heads/chunk_scorer.py makes it,
    with a width that fills vectors."""
    parts = (
        chunk_scorer.token,
        chunk_scorer.state,
        chunk_scorer.start,
        chunk_scorer.inner,
        chunk_scorer.output,
    )
    plain = type(chunk_scorer.layer) is nn.GRU and reads(parts, chunk_scorer.parameters())
    return plain and chunk_scorer.config.width % LANES == 0
