"""Operations of a decoding step. `Backend` computes them in PyTorch; `dcar.decoding.cpu.backend` in
C, on a CPU.

A reader gets its backend once, when it is made (dcar/decoding/readers.py); no other code depends on
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dcar import ties
from dcar.decoding.stack import Stack
from dcar.repetition import repetition_aware
from dcar.sampling import SamplingConfig, nuclei, sample, sample_several, warp
from heads.build import Heads
from heads.layers import TransformerLayer
from heads.policy import CandidatePolicy

Decided = tuple[Tensor, Tensor, Tensor]
"""Candidates [B, N, n], their features [B, N, n, F], and log-probabilities [B, N K] of candidate
and size (`CandidatePolicy.log_probs`)."""


class Backend:
    """Operations in PyTorch, on any device."""

    copies = False
    """True if prepared operations hold copies of weights, so that they must be prepared again
    after an update."""
    compiled = False
    """True if steps are compiled, so that their shapes are fixed as on a GPU."""
    captured = True
    """False if CUDA graphs of these operations are wrong on this GPU (dcar/first_use.py)."""

    def part(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Prepare a function of a step: tensors and buffers of a state are its arguments, tensors
        its result."""
        return function

    def stack(
        self,
        layers: Sequence[TransformerLayer],
        last: Sequence[nn.Module],
        first: Sequence[nn.Module] = (),
    ) -> Stack:
        """Prepare layers for decoding; see `Stack`."""
        return Stack(layers, last, first)

    def language_layers(self, backbone: Any) -> Any:
        """Return a class in place of `RotaryLayers` of dcar/decoding/language.py, or None."""
        return None

    def heads(self, heads: Heads) -> Callable[..., Tensor]:
        """Prepare multi-token heads. Return a function with the arguments of
        `PredictionHeads.logits`."""
        return heads.logits

    def probs(
        self,
        logits: Tensor,
        sampling: SamplingConfig,
        forbidden: Tensor | None,
        eos: int,
        history: Tensor | None = None,
    ) -> Tensor:
        """See `dcar.sampling.warp`."""
        return warp(logits, sampling, forbidden, eos, history, self.largest)

    def largest(self, values: Tensor, k: int, weights: Tensor | None, p: float) -> Tensor:
        """See `dcar.ties.largest`."""
        return ties.largest(values, k, weights, p)

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
        return sample_several(self.probs(logits, sampling, forbidden, eos), u), False

    def in_turn(
        self,
        logits: Tensor,
        u: Tensor,
        sampling: SamplingConfig,
        forbidden: Tensor | None,
        eos: int,
        history: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Draw the tokens [B, k] of a chunk by repetition-aware sampling, in which the distribution
        of each depends on those before it, at numbers u [B, k], given logits [B, k, V] and the
        window [B, W] before the chunk. Also return their distributions [B, k, V]. A token without
        a distribution is V (see `sample`)."""
        full, nucleus = nuclei(logits, sampling, forbidden, eos, self.largest)
        share, mask = sampling.repetition_share, sampling.repetition_mask
        return self.one_by_one(full, nucleus, history, u, share, mask)

    def one_by_one(
        self, full: Tensor, nucleus: Tensor, history: Tensor, u: Tensor, share: float, mask: bool
    ) -> tuple[Tensor, Tensor]:
        """Draw as `in_turn` does, given the distributions [B, k, V] of `dcar.repetition.nucleus`;
        share and mask: see `repetition_aware`."""
        tokens, probs = [], []
        for j in range(full.shape[1]):
            probs.append(
                repetition_aware(full[:, j], nucleus[:, j], history, share=share, mask=mask)
            )
            tokens.append(sample(probs[-1], u[:, j]))
            last = tokens[-1].clamp(max=full.shape[-1] - 1)
            history = torch.cat((history[:, 1:], last[:, None]), 1)
        return torch.stack(tokens, 1), torch.stack(probs, 1)

    def decision(self, policy: CandidatePolicy) -> Callable[..., Decided | None] | None:
        """Return a function that makes a whole decision after the draw in one call, if the backend
        has one for this policy, with its present weights.

        It takes hidden states [B, D], logits [B, n, V + 1], the numbers u [B, n] at which the
        tokens of the first candidate are drawn (`shifted` for the others), the number of
        candidates, the arguments of `warp` and a dial. It returns None where only PyTorch can.
        """
        return None
