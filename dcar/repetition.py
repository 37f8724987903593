"""Repetition-aware sampling (VALL-E 2, CosyVoice): a token that is drawn too often in a window is
drawn again, from the whole distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcar.ties import MaskOfLargest, largest


def nucleus(
    logits: Tensor, top_k: int, top_p: float, mask_of: MaskOfLargest = largest
) -> tuple[Tensor, Tensor]:
    """Return the whole distribution f and the nucleus distribution n of `repetition_aware`, each
    [..., V] float64, given logits [..., V] float32: of the most probable tokens whose predecessors
    hold less than top_p of f, at most top_k (0 = any number)."""
    full = logits.to(torch.float64).softmax(-1)
    first = full * mask_of(logits, top_k, full, top_p)
    return full, first / first.sum(-1, keepdim=True)


def repetition_aware(
    full: Tensor, nucleus: Tensor, history: Tensor, *, share: float, mask: bool
) -> Tensor:
    """Return the distribution [..., V] of CosyVoice's repetition-aware sampling, given both
    distributions of `nucleus` and history [..., W] (-1 = none). A token is repeated if it makes up
    `share` of the history.

    The procedure draws u from the nucleus distribution n; if u is repeated, it draws from the whole
    distribution f instead, without u if `mask` is set. Summing over u, with the set R of repeated
    tokens:

        q(v) = n(v) [v not in R] + f(v) sum_{u in R} n(u)                without the mask
        q(v) = n(v) [v not in R] + f(v) sum_{u in R, u != v} n(u) / (1 - f(u))             with it

    If f(u) = 1, only u can be drawn, masked or not: then q(u) = n(u) = 1 (CosyVoice's procedure
    fails). Because the distribution is explicit given the tokens before, verification of drafts
    against q (Leviathan et al. 2023) stays lossless. Source: VALL-E 2 §4.3 and
    FunAudioLLM/CosyVoice, cosyvoice/utils/common.py (ras_sampling, nucleus_sampling).
    """
    real = history >= 0
    count = torch.zeros_like(full).scatter_add(-1, history.clamp(min=0), real.to(full.dtype))
    repeated = count >= least_count(history.shape[-1], share)
    again = nucleus * repeated  # n(u) for u in R
    if mask:
        rest = others(full)
        alone = rest <= 0
        again = torch.where(alone, 0, again / rest)
        probs = nucleus * (~repeated | alone) + full * (again.sum(-1, keepdim=True) - again).clamp(
            min=0
        )
    else:
        probs = nucleus * ~repeated + full * again.sum(-1, keepdim=True)
    return (probs / probs.sum(-1, keepdim=True)).to(torch.float32)


def others(full: Tensor) -> Tensor:
    """Return 1 - f(u) [..., V]; of the likeliest token the sum of the others, which 1 - f would
    round away."""
    likeliest = full.argmax(-1, keepdim=True)
    rest = full.scatter(-1, likeliest, 0).sum(-1, keepdim=True)
    return (1 - full).scatter(-1, likeliest, rest)


def least_count(window: int, share: float) -> int:
    """Return how often a repeated token is in the history. window * share may be a whole number
    that is not exact in floating point."""
    return max(1, math.ceil(window * share - 1e-9))


def histories(history: Tensor, tokens: Tensor) -> Tensor:
    """Return the window of W tokens before each of the tokens [B, m] and after the last, [B, m +
    1, W], given the first window [B, W]."""
    return torch.cat((history, tokens), dim=1).unfold(1, history.shape[1], 1)
