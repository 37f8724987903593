"""Shared heads: one stack of residual blocks for all offsets, conditioned on how far ahead it
predicts.

    z_k = h + e_k;   for each block  z_k <- z_k + Down(SiLU(Up(z_k) (1 + s_k) + b_k))
    logits_k = Out(LayerNorm(z_k))

Head 1 (the base head) is a linear layer, as in `heads.multi_token`. Only e_k [D] and, in every
block, s_k and b_k [w] belong to one offset. A step reads all other weights once for all k tokens,
whereas independent heads have separate weights. Out is a separate layer, initialised from the base
head. The blocks start as the identity (Down is zero), so that every head begins near a linear one.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.multi_token import PredictionHeads


class SharedHeads(PredictionHeads):
    """Distributions of the next K tokens from one hidden state; the interface of `MultiTokenHeads`.

    Args:
        hidden_size: width D of the hidden states; a block is w = 2 D wide inside.
        vocab_size: output ids (speech codes and EOS).
        num_heads: K, base head included.
        blocks: residual blocks of the stack.
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
        extra, width = num_heads - 1, 2 * hidden_size
        blocks = blocks if extra else 0  # a base head alone needs no stack
        self.blocks, self.width = blocks, width
        self.offset = nn.Parameter(torch.empty(extra, hidden_size))  # e: [head, D]
        self.scale = nn.Parameter(torch.zeros(blocks, extra, width))  # s: [block, head, w]
        # b: [block, head, w], the bias of Up too
        self.shift = nn.Parameter(torch.empty(blocks, extra, width))
        self.up = nn.ModuleList([nn.Linear(hidden_size, width, bias=False) for _ in range(blocks)])
        self.down = nn.ModuleList([nn.Linear(width, hidden_size) for _ in range(blocks)])
        self.norm = nn.LayerNorm(hidden_size) if extra else None
        self.out = nn.Linear(hidden_size, vocab_size, bias=False) if extra else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        down: Any
        up: Any
        bound = 1 / math.sqrt(self.base.in_features)
        nn.init.uniform_(self.base.weight, -bound, bound)
        nn.init.normal_(self.offset, std=0.1)
        for shift, up, down in zip(self.shift, self.up, self.down, strict=True):
            nn.init.uniform_(up.weight, -bound, bound)
            with torch.no_grad():
                # the offsets differ by what they learn
                shift.copy_(torch.empty(self.width).uniform_(-bound, bound))
            nn.init.zeros_(down.bias)
            nn.init.zeros_(down.weight)
        self.start_outputs(self.base.weight)

    @torch.no_grad()
    def start_outputs(self, rows: Tensor) -> None:
        """Initialise the output layer of the additional heads with these rows [n, D] of the ids
        0 … n - 1."""
        if self.out is not None:
            self.out.weight[: len(rows)] = rows

    def forward(self, hidden: Tensor) -> Tensor:
        n = len(hidden)
        assert self.norm is not None
        assert self.out is not None
        z = hidden + self.offset[:n, None]
        scales, shifts = self.scale[:, :n, None].unbind(), self.shift[:, :n, None].unbind()
        for up, down, scale, shift in zip(self.up, self.down, scales, shifts, strict=True):
            z = z + down(F.silu(up(z) * (1 + scale) + shift))
        return self.out(self.norm(z))
