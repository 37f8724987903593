"""Multi-token heads of CAR: one hidden state predicts the next K tokens (DCAR paper §3.1 and App.
C.1).

Head 1 (the base head) is a linear layer. Each of the K - 1 additional heads has its own stack of
residual blocks z <- z + SiLU(W z + b) and a bias-free projection. The heads share no parameter:
they are slices of stacked tensors, so that evaluating the first k heads costs as many kernel
launches as evaluating one. Additional heads that share one stack are in heads/shared.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PredictionHeads(nn.Module):
    """Distributions of the next K tokens from one hidden state: a linear base head and K - 1
    additional heads."""

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int, base_bias: bool):
        super().__init__()
        if num_heads < 1:
            raise ValueError(
                f"num_heads includes the base head and must be at least 1, not {num_heads}"
            )
        self.num_heads = num_heads
        self.base = nn.Linear(hidden_size, vocab_size, bias=base_bias)

    def forward(self, hidden: Tensor, k: int | None = None, additional: bool = False) -> Tensor:
        """Return logits [..., k, vocabulary] of heads 1..k (default: all) for hidden [..., D].

        With `additional`, return those of the additional heads alone, each at states of its own:
        hidden [K - 1, n, D] -> [K - 1, n, vocabulary]. Training computes the two apart, because a
        tensor that joins them would be a copy as large as the logits; and by a call of the module,
        because ZeRO-3 gathers the parameters of modules that are called."""
        if additional:
            return self._each(hidden)
        k = self.num_heads if k is None else k
        if not 1 <= k <= self.num_heads:
            raise ValueError(f"{k} heads requested of a model that has {self.num_heads}")
        base = self.base(hidden).unsqueeze(-2)
        return base if k == 1 else torch.cat((base, self._additional(hidden, k)), dim=-2)

    def _additional(self, hidden: Tensor, k: int) -> Tensor:
        """Return logits [..., k - 1, vocabulary] of heads 2..k, k > 1, for hidden [..., D]."""
        raise NotImplementedError

    def _each(self, hidden: Tensor) -> Tensor:
        """Return logits [n, rows, vocabulary] of the first n additional heads for hidden [n,
        rows, D]."""
        raise NotImplementedError


class MultiTokenHeads(PredictionHeads):
    """Distributions of the next K tokens from one hidden state.

    Args:
        hidden_size: width D of the hidden states.
        vocab_size: output ids (speech codes and EOS).
        num_heads: K, base head included.
        blocks: residual blocks per additional head.
        share_blocks: apply one block `blocks` times, as Medusa's released code does by accident
            (`[block] * n`).
        zero_init: start the blocks' weights at zero (Medusa), so that every head begins near a
            linear one.
        base_bias: give the base head a bias, as some pretrained output layers have.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        blocks: int = 4,
        *,
        share_blocks: bool = False,
        zero_init: bool = True,
        base_bias: bool = False,
    ):
        super().__init__(hidden_size, vocab_size, num_heads, base_bias)
        extra, stored = num_heads - 1, 1 if share_blocks else blocks
        self.blocks, self.share_blocks, self.zero_init = blocks, share_blocks, zero_init
        # [block, head, in, out]
        self.block_weight = nn.Parameter(torch.empty(stored, extra, hidden_size, hidden_size))
        self.block_bias = nn.Parameter(torch.empty(stored, extra, 1, hidden_size))
        # [head, in, out]
        self.projection = nn.Parameter(torch.empty(extra, hidden_size, vocab_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.base.in_features)
        nn.init.uniform_(self.base.weight, -bound, bound)
        nn.init.uniform_(self.projection, -bound, bound)
        nn.init.uniform_(self.block_bias, -bound, bound)
        if self.zero_init:
            nn.init.zeros_(self.block_weight)
        else:
            nn.init.uniform_(self.block_weight, -bound, bound)

    @torch.no_grad()
    def start_outputs(self, rows: Tensor) -> None:
        """Initialise every additional head's projection with these output rows [n, D] of the ids
        0 … n - 1."""
        self.projection[:, :, : len(rows)] = rows.T

    def _additional(self, hidden: Tensor, k: int) -> Tensor:
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        extra = self._each(flat.expand(k - 1, -1, -1))  # [head, rows, vocabulary]
        return extra.transpose(0, 1).reshape(*hidden.shape[:-1], k - 1, -1)

    def _each(self, hidden: Tensor) -> Tensor:
        n, z = len(hidden), hidden
        parts: tuple[Tensor, ...] = self.block_bias, self.block_weight, self.projection
        if n < len(self.projection):
            parts = self.block_bias[:, :n], self.block_weight[:, :n], self.projection[:n]
        biases, weights, projection = parts
        # unbind, since the gradient of an index is a tensor of zeros as large as the whole
        stored = list(zip(biases.unbind(), weights.unbind(), strict=True))
        for bias, weight in stored * (self.blocks if self.share_blocks else 1):
            z = z + F.silu(torch.baddbmm(bias, z, weight))
        return torch.bmm(z, projection)
