"""Repetition-aware sampling (VALL-E 2, CosyVoice): a token that is drawn too often in a window is
drawn again, from the whole distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def repetition_aware(
    logits: Tensor, history: Tensor, *, top_k: int, top_p: float, share: float, mask: bool
) -> Tensor:
    """Return the distribution [..., V] of CosyVoice's repetition-aware sampling, given logits [...,
    V] and history [..., W] (-1 = none). A token is repeated if it makes up `share` of the history.

    The procedure draws u from the nucleus distribution n (the most probable tokens whose
    predecessors hold less than top_p of the whole distribution f, at most top_k of them); if u is
    repeated, it draws from f instead, without u if `mask` is set. Summing over u, with the
    set R of repeated tokens:

        q(v) = n(v) [v not in R] + f(v) sum_{u in R} n(u)                without the mask
        q(v) = n(v) [v not in R] + f(v) sum_{u in R, u != v} n(u) / (1 - f(u))             with it

    If f(u) = 1, only u can be drawn, masked or not: then q(u) = n(u) = 1 (CosyVoice's procedure
    fails). Because the distribution is explicit given the tokens before, verification of drafts
    against q (Leviathan et al. 2023) stays lossless. Source: VALL-E 2 §4.3 and
    FunAudioLLM/CosyVoice, cosyvoice/utils/common.py (ras_sampling, nucleus_sampling).
    """
    full = logits.to(torch.float64).softmax(-1)
    ordered, order = full.sort(dim=-1, descending=True, stable=True)
    kept = ordered.cumsum(-1) - ordered < top_p
    if top_k:
        kept &= torch.arange(kept.shape[-1], device=kept.device) < top_k
    nucleus = torch.zeros_like(full).scatter(-1, order, ordered * kept)
    nucleus = nucleus / nucleus.sum(-1, keepdim=True)
    real = history >= 0
    count = torch.zeros_like(full).scatter_add(-1, history.clamp(min=0), real.to(full.dtype))
    # the procedure compares whole numbers with window * share, which need not be exact in floating
    # point
    repeated = count >= history.shape[-1] * share - 1e-9
    again = nucleus * repeated  # n(u) for u in R
    if mask:
        # 1 - f(u); of the likeliest token summed over the others, which 1 - f would round away
        rest = (1 - full).scatter(-1, order[..., :1], ordered[..., 1:].sum(-1, keepdim=True))
        alone = rest <= 0
        again = torch.where(alone, 0, again / rest)
        probs = nucleus * (~repeated | alone) + full * (again.sum(-1, keepdim=True) - again).clamp(
            min=0
        )
    else:
        probs = nucleus * ~repeated + full * again.sum(-1, keepdim=True)
    return (probs / probs.sum(-1, keepdim=True)).to(torch.float32)


def histories(history: Tensor, tokens: Tensor) -> Tensor:
    """Return the window of W tokens before each of the tokens [B, m] and after the last, [B, m +
    1, W], given the first window [B, W]."""
    return torch.cat((history, tokens), dim=1).unfold(1, history.shape[1], 1)
