"""SSD: speculative decoding with tolerance (Interspeech 2025, Algorithm 1).

Accept x_i iff r < min(1, q(x_i) / p(x_i)) + beta; otherwise as in SD. beta = 0 is SD; beta >= 1 is
the draft alone. The total variation of one step from the target equals the acceptance that beta
adds.

The paper makes no exception for the end of speech: its rule is `ssd-β-eos`. `ssd-β` judges EOS by
SD's rule. Its probability is still not preserved: a token that passes where the target would have
ended delays it. Without tolerance for EOS, where q(EOS) > p(EOS), EOS needs the residual, and the
tolerance for other tokens leaves less of it: out(EOS) = min(p, q)(EOS) + rejected mass *
residual(EOS) <= q(EOS).
"""

import torch
from torch import Tensor

from dcar.decoding.declare import Style, decoding_method, option
from eval.verifiers import sd
from eval.verifiers.chain import Uniforms


def tolerant(q_x: Tensor, p_x: Tensor, beta: float | Tensor) -> Tensor:
    """Return SSD's probability of accepting x: min(1, min(1, q(x) / p(x)) + beta)."""
    return (sd.acceptance(q_x, p_x) + beta).clamp(max=1)


@decoding_method("ssd", Style("SSD", "#8d5fc0", ">", "β"), example="ssd-0.4")
class TolerantDecoding(sd.SpeculativeDecoding):
    """Verifier `ssd-β`, without tolerance for EOS, or `ssd-β-eos`, the paper's rule."""

    beta: float = option(minimum=0)
    eos: bool = option(False, "-eos", word="eos")

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        strict = (tokens == eos) & (not self.eos)
        beta = torch.where(strict, 0.0, self.beta)
        return uniform("accept") < tolerant(sd.of(q, tokens), sd.of(p, tokens), beta)
