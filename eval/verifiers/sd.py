"""Lossless speculative decoding (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318).

Accept x_i with probability min(1, q(x_i) / p(x_i)). Replace the first refused token by a draw from
norm(max(0, q - p)). The output has the distribution of next-token decoding with the same weights
and sampling.
"""

import torch
from torch import Tensor

from dcar.decoding.declare import Style, decoding_method
from eval.verifiers.chain import ChainVerifier, Uniforms


def acceptance(q_x: Tensor, p_x: Tensor) -> Tensor:
    """Return the probability of accepting x, min(1, q(x) / p(x)). Shapes agree; p(x) > 0 for
    every token that was drawn."""
    return (q_x / p_x).clamp(max=1)


def residual(q: Tensor, p: Tensor) -> Tensor:
    """Return the probabilities after a rejection, norm(max(0, q - p)): [..., V]. If rounding
    leaves none, return q itself."""
    excess = (q - p).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, q)


def of(probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the probabilities [...] of tokens [...] among probs [..., V]."""
    return probs.gather(-1, tokens[..., None])[..., 0]


@decoding_method("sd", Style("SD", "#5b2a86", "X"))
class SpeculativeDecoding(ChainVerifier):
    """Verifier `sd`: the output has exactly the target's distribution."""

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        return uniform("accept") < acceptance(of(q, tokens), of(p, tokens))

    def replacement(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int) -> Tensor:
        return residual(q, p)
