"""Lossless speculative decoding (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Accept x_i with probability min(1, q(x_i) / p(x_i)); put a draw from norm(max(0, q - p)) in the place of the first
refused token; draw a bonus token from q_{m+1} if none was. The output has the law of next-token decoding with the same
weights and sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcar.sampling import sample
from eval.verifiers.chain import ChainVerifier, Draws


def acceptance(q_x: Tensor, p_x: Tensor) -> Tensor:
    """Probability of accepting x: min(1, q(x) / p(x)). Shapes alike; p(x) > 0 for every token that was drawn."""
    return (q_x / p_x).clamp(max=1)


def residual(q: Tensor, p: Tensor) -> Tensor:
    """The law behind a refusal, norm(max(0, q - p)): [..., V]. Where rounding leaves nothing of it, q itself."""
    excess = (q - p).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, q)


def of(law: Tensor, tokens: Tensor) -> Tensor:
    """The probabilities of tokens [...] under law [..., V]."""
    return law.gather(-1, tokens[..., None])[..., 0]


class SpeculativeDecoding(ChainVerifier):
    """`sd`: the output law is exactly that of the target."""

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, draws: Draws) -> Tensor:
        return draws("accept") < acceptance(of(q, tokens), of(p, tokens))

    def replace(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, draws: Draws) -> Tensor:
        return sample(residual(q, p), draws("residual"))
