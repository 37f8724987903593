"""Chunk scorer of a policy in C, within the whole decision (chunk_scorer.c)."""

import ctypes

import torch

from dcar.decoding.cpu.native import FLOAT, LANES, LONG, POINTER, Linear, Weights, members, reads
from heads.chunk_scorer import ChunkScorer


class _ChunkScorer(ctypes.Structure):
    _fields_ = [
        *members(POINTER, "tokens seen offset"),
        *members(Linear, "state inner"),
        ("output", POINTER),
        ("output_bias", FLOAT),
        *members(LONG, "ids features width window"),
    ]


class NativeChunkScorer:
    """Weights of a `ChunkScorer`, copied, for run_decision."""

    @torch.no_grad()
    def __init__(self, chunk_scorer: ChunkScorer):
        """Copy the weights of a chunk scorer that `reads_chunk_scorer` accepts."""
        config, self._weights = chunk_scorer.config, (weights := Weights())
        layer, state, inner, output = (
            chunk_scorer.tokens,
            chunk_scorer.state,
            chunk_scorer.inner,
            chunk_scorer.output,
        )
        # the input of SiLU is a sum over parts, and the part of a token in each place is constant
        places = layer.weight.view(config.width, config.window, -1).permute(1, 2, 0)
        of_tokens, of_features = places.split(
            (config.embedding_size, places.shape[1] - config.embedding_size), 1
        )
        self.part = _ChunkScorer(
            weights.address(chunk_scorer.embedding.weight @ of_tokens),
            weights.address(of_features),
            weights.address(chunk_scorer.offset + layer.bias),
            weights.linear(state.weight, state.bias),
            weights.linear(inner.weight, inner.bias),
            weights.address(output.weight),
            float(output.bias),
            config.vocab_size,
            of_features.shape[1],
            config.width,
            config.window,
        )


def reads_chunk_scorer(chunk_scorer: ChunkScorer) -> bool:
    """Return whether the C code supports this chunk scorer: as heads/chunk_scorer.py makes it,
    with a width that fills vectors."""
    parts = (chunk_scorer.tokens, chunk_scorer.state, chunk_scorer.inner, chunk_scorer.output)
    plain = reads(parts, chunk_scorer.parameters())
    return plain and chunk_scorer.config.width % LANES == 0
