"""Operations of a decoding step. `Backend` computes them in PyTorch; `dcar.decoding.cpu.backend` in
C, on a CPU.

A reader gets its backend once, when it is made (dcar/decoding/readers.py); no other code depends on
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from dcar.decoding.stack import Stack
from dcar.sampling import SamplingConfig, sample_several, warp
from heads.build import Heads
from heads.chunk_scorer import ChunkScorer, LogRatios
from heads.layers import TransformerLayer
from heads.policy import ChunkPolicyConfig


class Decision(NamedTuple):
    """Candidates, the policy's distribution over their ends, and the most likely end if it is
    known."""

    tokens: Tensor  # [B, N, n]
    features: Tensor  # [B, N, n, F], as `ChunkPolicy.candidate_features`
    log_probs: Tensor  # [B, N K], as `ChunkPolicy.log_probs`
    # [B] its size, its log-probability, its chunk 0..N-1
    likeliest: tuple[Tensor, Tensor, Tensor] | None = None


class LinearEnds(Protocol):
    """Linear map from features of a chunk's n tokens to the scores of its ends."""

    weight: Tensor  # [n F, n]
    bias: Tensor  # [n]


class Backend:
    """Operations in PyTorch, on any device."""

    copies = False
    """True if prepared operations hold copies of weights, so that they must be prepared again
    after an update."""

    def stack(
        self,
        layers: Sequence[TransformerLayer],
        last: Sequence[nn.Module],
        first: Sequence[nn.Module] = (),
    ) -> Stack:
        """Prepare layers for decoding; see `Stack`."""
        return Stack(layers, last, first)

    def heads(self, heads: Heads) -> Callable[..., Tensor]:
        """Prepare multi-token heads. Return a function with the arguments of
        `PredictionHeads.logits`."""
        return heads.logits

    def chunk_scorer(self, chunk_scorer: ChunkScorer) -> LogRatios:
        """Prepare a chunk scorer with its present weights."""
        return partial(chunk_scorer, recurrent=chunk_scorer.layer.all_weights[0])

    def probs(
        self,
        logits: Tensor,
        sampling: SamplingConfig,
        forbidden: Tensor | None,
        eos: int,
        history: Tensor | None = None,
    ) -> Tensor:
        """See `dcar.sampling.warp`."""
        return warp(logits, sampling, forbidden, eos, history)

    def tokens(
        self,
        logits: Tensor,
        u: Tensor,
        sampling: SamplingConfig,
        forbidden: Tensor | None,
        eos: int,
    ) -> tuple[Tensor, bool]:
        """Draw tokens [..., N] at numbers u [..., N] from the warped distributions of logits
        [..., V]. Also return whether every one is known to be an id (see `sample`)."""
        return sample_several(warp(logits, sampling, forbidden, eos), u), False

    def decision(
        self, shape: ChunkPolicyConfig, ends: LinearEnds, chunk_scorer: ChunkScorer | None
    ) -> Callable[..., Decision | None] | None:
        """Return a function that makes a whole decision after the draw in one call (see
        `PolicyReader.decide`), if the backend has one. ends: the scores of a chunk's ends as one
        product with the features of its tokens."""
        return None
