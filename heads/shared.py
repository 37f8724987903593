"""Shared heads: one stack of residual blocks for all offsets, conditioned on how far ahead it
predicts.

    z_k = h + e_k;   for each block  z_k <- z_k + Down(SiLU(Up(z_k) (1 + s_k) + b_k))
    logits_k = Out(LayerNorm(z_k))

Head 1 (the base head) is a linear layer, as in `heads.multi_token`. Only e_k [D] and, in every
block, s_k and b_k [w] belong to one offset. A step reads all other weights once for all k tokens,
whereas independent heads have separate weights. Out is a separate layer, initialised from the base
head, or the base head itself (`tie`). The blocks start as the identity."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.multi_token import PredictionHeads


class SharedHeads(PredictionHeads):
    """Distributions of the next K tokens from one hidden state; the interface of `MultiTokenHeads`.

    Args:
        hidden_size: width D of the hidden states.
        vocab_size: output ids (speech codes and EOS).
        num_heads: K, base head included.
        blocks: residual blocks of the stack.
        width: width w inside of a block; 0 = twice D.
        tie: the base head is the output layer of the stack too.
        zero_init: Down starts at zero, so that every head begins near a linear one.
        base_bias: give the base head a bias, as some pretrained output layers have.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        blocks: int = 4,
        *,
        width: int = 0,
        tie: bool = False,
        zero_init: bool = True,
        base_bias: bool = False,
    ):
        super().__init__(hidden_size, vocab_size, num_heads, base_bias)
        extra, width = num_heads - 1, width or 2 * hidden_size
        blocks = blocks if extra else 0  # a base head alone needs no stack
        self.blocks, self.width, self.zero_init = blocks, width, zero_init
        self.offset = nn.Parameter(torch.empty(extra, hidden_size))  # e: [head, D]
        self.scale = nn.Parameter(torch.empty(blocks, extra, width))  # s: [block, head, w]
        # b: [block, head, w], the bias of Up too
        self.shift = nn.Parameter(torch.empty(blocks, extra, width))
        self.up = nn.ModuleList([nn.Linear(hidden_size, width, bias=False) for _ in range(blocks)])
        self.down = nn.ModuleList([nn.Linear(width, hidden_size) for _ in range(blocks)])
        self.norm = nn.LayerNorm(hidden_size) if extra else None
        # None: the base head
        self.out = nn.Linear(hidden_size, vocab_size, bias=False) if extra and not tie else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        down: Any
        up: Any
        bound = 1 / math.sqrt(self.base.in_features)
        nn.init.uniform_(self.base.weight, -bound, bound)
        nn.init.normal_(self.offset, std=0.1)
        nn.init.zeros_(self.scale)
        for shift, up, down in zip(self.shift, self.up, self.down, strict=True):
            nn.init.uniform_(up.weight, -bound, bound)
            with torch.no_grad():
                # the offsets differ by what they learn
                shift.copy_(torch.empty(self.width).uniform_(-bound, bound))
            nn.init.zeros_(down.bias)
            if self.zero_init:
                nn.init.zeros_(down.weight)
            else:
                nn.init.uniform_(down.weight, -1 / math.sqrt(self.width), 1 / math.sqrt(self.width))
        self.start_outputs(self.base.weight)

    @torch.no_grad()
    def start_outputs(self, rows: Tensor) -> None:
        """Initialise the output layer of the additional heads with these rows [n, D] of the ids
        0 … n - 1, unless it is tied to the base head."""
        if self.out is not None:
            self.out.weight[: len(rows)] = rows

    def _additional(self, hidden: Tensor, k: int) -> Tensor:
        return self._stack(
            hidden.unsqueeze(-2) + self.offset[: k - 1],
            self.scale[:, : k - 1],
            self.shift[:, : k - 1],
        )

    def _each(self, hidden: Tensor) -> Tensor:
        return self._stack(
            hidden + self.offset[:, None], self.scale[:, :, None], self.shift[:, :, None]
        )

    def _stack(self, z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Return logits [..., vocabulary] of states z [..., D] with their offsets; scale and
        shift: [block, ..., w]."""
        assert self.norm is not None
        for up, down, s, b in zip(self.up, self.down, scale.unbind(), shift.unbind(), strict=True):
            z = z + down(F.silu(up(z) * (1 + s) + b))
        return (self.base if self.out is None else self.out)(self.norm(z))
