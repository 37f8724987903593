"""What all multi-token heads have in common.

A linear base head predicts the next token, and K - 1 further heads predict those behind it, all from one hidden state.
Kinds of heads say what stands behind the base head: heads/multi_token.py (the paper's) and heads/shared.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PredictionHeads(nn.Module):
    """Distributions of the next K tokens from one hidden state. Kinds of heads say in `_further` and `_one` what
    stands behind the base head."""

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int, base_bias: bool):
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads counts the base head too and must be at least 1, not {num_heads}")
        self.num_heads = num_heads
        self.base = nn.Linear(hidden_size, vocab_size, bias=base_bias)

    def forward(self, hidden: Tensor, k: int | None = None, only: int | None = None) -> Tensor:
        """Logits of heads 1..k (default all): hidden [..., D] -> [..., k, vocabulary]; with `only`, of that head
        (1-based) alone, [..., vocabulary]."""
        if only is not None:
            return self.single(hidden, only)
        k = self.num_heads if k is None else k
        if not 1 <= k <= self.num_heads:
            raise ValueError(f"asked for {k} heads of a model that has {self.num_heads}")
        base = self.base(hidden).unsqueeze(-2)
        return base if k == 1 else torch.cat((base, self._further(hidden, k)), dim=-2)

    def single(self, hidden: Tensor, head: int) -> Tensor:
        """Logits of one head (1-based): hidden [..., D] -> [..., vocabulary]; keeps training memory low.

        Training asks for it as `heads(hidden, only=head)`: ZeRO-3 gathers the parameters of modules that are called.
        """
        return self.base(hidden) if head == 1 else self._one(hidden, head)

    def _further(self, hidden: Tensor, k: int) -> Tensor:
        """Logits of heads 2..k, k > 1: hidden [..., D] -> [..., k - 1, vocabulary]."""
        raise NotImplementedError

    def _one(self, hidden: Tensor, head: int) -> Tensor:
        """Logits of a head behind the base head: hidden [..., D] -> [..., vocabulary]."""
        raise NotImplementedError
