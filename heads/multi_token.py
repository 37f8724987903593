"""Multi-token heads of CAR: one hidden state predicts the next K tokens (DCAR paper §3.1 and App.
C.1).

Head 1 (the base head) is a linear layer. Each of the K - 1 additional heads has its own stack of
residual blocks z <- z + SiLU(W z + b) and a bias-free projection. The heads share no parameter:
they are slices of stacked tensors, so that evaluating the first k heads costs as many kernel
launches as evaluating one. Additional heads that share one stack are in heads/shared.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PredictionHeads(nn.Module):
    """Distributions of the next K tokens from one hidden state: a linear base head and K - 1
    additional heads.

    Decoding reads the first k heads at the same hidden states (`logits`). Training calls `base` and
    this module apart, because a tensor that joins their logits would be a copy as large as they
    are; and it calls modules, because ZeRO-3 gathers the parameters of modules that are called.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int, base_bias: bool):
        super().__init__()
        self.num_heads = num_heads
        self.base = nn.Linear(hidden_size, vocab_size, bias=base_bias)

    def logits(self, hidden: Tensor, k: int | None = None, first: int = 1) -> Tensor:
        """Return logits [..., k + 1 - first, vocabulary] of heads first..k (default: all) for
        hidden [..., D]; first: 1, or 2 without the base head."""
        k = self.num_heads if k is None else k
        if k == 1:
            return self.base(hidden).unsqueeze(-2)
        rows = hidden.reshape(1, -1, hidden.shape[-1]).expand(k - 1, -1, -1)
        others = self(rows).transpose(0, 1).reshape(*hidden.shape[:-1], k - 1, -1)
        if first == 2:
            return others
        return torch.cat((self.base(hidden).unsqueeze(-2), others), dim=-2)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [n, P, vocabulary] of the first n additional heads, each at hidden states
        of its own [n, P, D]."""
        raise NotImplementedError


class MultiTokenHeads(PredictionHeads):
    """Distributions of the next K tokens from one hidden state.

    Args:
        hidden_size: width D of the hidden states.
        vocab_size: output ids (speech codes and EOS).
        num_heads: K, base head included.
        blocks: residual blocks per additional head. Their weights start at zero (Medusa), so that
            every head begins near a linear one.
        base_bias: give the base head a bias, as some pretrained output layers have.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        blocks: int = 4,
        base_bias: bool = False,
    ):
        super().__init__(hidden_size, vocab_size, num_heads, base_bias)
        self.blocks, extra = blocks, num_heads - 1
        # [block, head, out, in]
        self.block_weight = nn.Parameter(torch.zeros(blocks, extra, hidden_size, hidden_size))
        self.block_bias = nn.Parameter(torch.empty(blocks, extra, 1, hidden_size))
        # [head, out, in], aligned whatever the vocabulary
        self.projection = nn.Parameter(torch.empty(extra, vocab_size, hidden_size))
        bound = 1 / math.sqrt(hidden_size)
        for parameter in (self.base.weight, self.projection, self.block_bias):
            nn.init.uniform_(parameter, -bound, bound)

    @torch.no_grad()
    def start_outputs(self, rows: Tensor) -> None:
        """Initialise every additional head's projection with these output rows [n, D] of the ids
        0 … n - 1."""
        self.projection[:, : len(rows)] = rows

    def forward(self, hidden: Tensor) -> Tensor:
        n, z = len(hidden), hidden
        parts: tuple[Tensor, ...] = self.block_bias, self.block_weight, self.projection
        if n < len(self.projection):
            parts = self.block_bias[:, :n], self.block_weight[:, :n], self.projection[:n]
        biases, weights, projection = parts
        # unbind, since the gradient of an index is a tensor of zeros as large as the whole
        for bias, weight in zip(biases.unbind(), weights.unbind(), strict=True):
            z = z + F.silu(torch.bmm(z, weight.mT) + bias)
        return torch.bmm(z, projection.mT)
