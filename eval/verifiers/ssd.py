"""SSD: speculative decoding with a tolerance (Interspeech 2025, Algorithm 1).

Accept x_i iff r < min(1, q(x_i) / p(x_i)) + beta; the rest as in SD. beta = 0 is SD, beta >= 1 is the draft alone. The
total variation of one step from the target equals the acceptance that beta adds.

The paper makes no exception for EOS: its rule is `ssd-β-eos`. By default EOS gets no tolerance here. Its probability is
still not kept: where q(EOS) > p(EOS) EOS needs the residual, and the other tokens' tolerance leaves less of it:
out(EOS) = min(p, q)(EOS) + refused mass * residual(EOS) <= q(EOS).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcar.errors import ConfigError
from eval.verifiers import sd
from eval.verifiers.chain import Uniforms
from eval.verifiers.drafters import Drafter


def acceptance(q_x: Tensor, p_x: Tensor, beta: float | Tensor) -> Tensor:
    """Probability of accepting x: min(1, min(1, q(x) / p(x)) + beta)."""
    return (sd.acceptance(q_x, p_x) + beta).clamp(max=1)


class TolerantDecoding(sd.SpeculativeDecoding):
    """`ssd-β`: no tolerance for EOS (`eos_strict`); `ssd-β-eos`: the paper's rule."""

    numbers, relaxes_end = (1,), True

    def __init__(self, name: str, drafter: Drafter, beta: float, eos_strict: bool = True):
        super().__init__(name, drafter)
        if not 0 <= beta < float("inf"):
            raise ConfigError(f"{name}: the tolerance beta must be a number >= 0, not {beta}; the paper "
                              "sweeps 0 to 0.4")
        self.beta, self.eos_strict = beta, eos_strict

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        beta = torch.where((tokens == eos) & self.eos_strict, 0.0, self.beta)
        return uniform("accept") < acceptance(sd.of(q, tokens), sd.of(p, tokens), beta)
