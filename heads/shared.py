"""One light head for all offsets: a stack that all additional heads share and that is told how far ahead it predicts.

    z_k = h + e_k;   for each block  z_k <- z_k + Down(SiLU(Up(z_k) (1 + s_k) + b_k));   logits_k = Out(LayerNorm(z_k))

Head 1 (the base head) is a linear layer, as in `heads.multi_token`. Of what stands behind it, only e_k [D] and, in
every block, s_k and b_k [w] belong to one offset; whatever else a step reads, it reads once for all k tokens, where
independent heads are read one after the other. Out is a layer of its own, which begins as the base head, or the base
head itself. The blocks begin as the identity.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SharedHeads(nn.Module):
    """Laws of the next K tokens from one hidden state; the interface of `MultiTokenHeads`.

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

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int, blocks: int = 4, *, width: int = 0,
                 tie: bool = False, zero_init: bool = True, base_bias: bool = False):
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads counts the base head too and must be at least 1, not {num_heads}")
        extra, width = num_heads - 1, width or 2 * hidden_size
        own = blocks if extra else 0  # a base head alone needs no stack
        self.num_heads, self.blocks, self.width, self.zero_init = num_heads, own, width, zero_init
        self.base = nn.Linear(hidden_size, vocab_size, bias=base_bias)
        self.offset = nn.Parameter(torch.empty(extra, hidden_size))  # e: [head, D]
        self.scale = nn.Parameter(torch.empty(own, extra, width))  # s: [block, head, w]
        self.shift = nn.Parameter(torch.empty(own, extra, width))  # b: [block, head, w], the bias of Up too
        self.up = nn.ModuleList([nn.Linear(hidden_size, width, bias=False) for _ in range(own)])
        self.down = nn.ModuleList([nn.Linear(width, hidden_size) for _ in range(own)])
        self.norm = nn.LayerNorm(hidden_size) if extra else None
        self.out = nn.Linear(hidden_size, vocab_size, bias=False) if extra and not tie else None  # None: the base head
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
                shift.copy_(torch.empty(self.width).uniform_(-bound, bound))  # the offsets differ by what they learn
            nn.init.zeros_(down.bias)
            if self.zero_init:
                nn.init.zeros_(down.weight)
            else:
                nn.init.uniform_(down.weight, -1 / math.sqrt(self.width), 1 / math.sqrt(self.width))
        self.start_outputs(self.base.weight)

    @torch.no_grad()
    def start_outputs(self, rows: Tensor) -> None:
        """Start the output layer of the additional heads from these rows [n, D], of the ids 0 … n - 1; one that is tied
        to the base head is the base head's already."""
        if self.out is not None:
            self.out.weight[: len(rows)] = rows

    def forward(self, hidden: Tensor, k: int | None = None, only: int | None = None) -> Tensor:
        """Logits of heads 1..k (default all): hidden [..., D] -> [..., k, vocabulary]; with `only`, of that head
        (1-based) alone, [..., vocabulary]."""
        if only is not None:
            return self.single(hidden, only)
        k = self.num_heads if k is None else k
        if not 1 <= k <= self.num_heads:
            raise ValueError(f"asked for {k} heads of a model that has {self.num_heads}")
        base = self.base(hidden).unsqueeze(-2)
        if k == 1:
            return base
        return torch.cat((base, self._further(hidden.unsqueeze(-2), slice(k - 1))), dim=-2)

    def single(self, hidden: Tensor, head: int) -> Tensor:
        """Logits of one head (1-based): hidden [..., D] -> [..., vocabulary].

        Training asks for it as `heads(hidden, only=head)`: ZeRO-3 gathers the parameters of modules that are called.
        """
        return self.base(hidden) if head == 1 else self._further(hidden, head - 2)

    def _further(self, hidden: Tensor, which: int | slice) -> Tensor:
        """Of additional heads: `which` of the parameters by offset, broadcast against the hidden states."""
        assert self.norm is not None
        z = hidden + self.offset[which]
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            z = z + down(F.silu(up(z) * (1 + self.scale[i, which]) + self.shift[i, which]))
        return (self.base if self.out is None else self.out)(self.norm(z))
