"""Relaxed rules: SSD's tolerance, Medusa's typical acceptance, top-k verification of Llasa+. None
is lossless.

An end of speech is judged by SD's rule unless `eos_strict` is false. Its probability is still not
preserved: a token that passes where the target would have ended delays it.

SSD (Interspeech 2025, Algorithm 1): accept x_i iff r < min(1, q(x_i) / p(x_i)) + beta; otherwise as
in SD. beta = 0 is SD; beta >= 1 is the draft alone. The total variation of one step from the target
equals the acceptance that beta adds. The paper makes no exception for EOS: its rule is `ssd-β-eos`.
Without tolerance for EOS, where q(EOS) > p(EOS), EOS needs the residual, and the tolerance for
other tokens leaves less of it: out(EOS) = min(p, q)(EOS) + rejected mass * residual(EOS) <= q(EOS).

Typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1), on a chain: accept x iff q(x)
> min(epsilon, delta * exp(-H(q))), where H is the entropy of q in nats. The threshold thus falls
where the target itself is uncertain. A rejected token is replaced by a draw from q.

Top-k verification (arXiv 2508.06262): accept x iff it is among the k most likely tokens of the base
head; a rejected token is replaced by a draw from it. The k most likely are those after top-k and
top-p of the sampling: a token that could not have been sampled is never accepted.
"""

import torch
from torch import Tensor

from dcar.ties import rank
from eval.verifiers import sd
from eval.verifiers.chain import Uniforms
from eval.verifiers.drafters import Drafter

EPSILON, DELTA = 0.09, 0.3  # of Medusa's code; 0.3 is the square root of 0.09


def tolerant(q_x: Tensor, p_x: Tensor, beta: float | Tensor) -> Tensor:
    """Return SSD's probability of accepting x: min(1, min(1, q(x) / p(x)) + beta)."""
    return (sd.acceptance(q_x, p_x) + beta).clamp(max=1)


def threshold(q: Tensor, epsilon: float, delta: float) -> Tensor:
    """Return the threshold [...] of typical acceptance, min(epsilon, delta * exp(-H(q))), for q
    [..., V]."""
    entropy = torch.special.entr(q).sum(-1)
    return (delta * torch.exp(-entropy)).clamp(max=epsilon)


def among_likeliest(q: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Return whether x is one of the k most likely tokens (of equal ones, those with the lowest
    ids) and possible: q [..., V], tokens [...] -> bool."""
    return (rank(q, tokens) < k) & (sd.of(q, tokens) > 0)


class TolerantDecoding(sd.SpeculativeDecoding):
    """Verifier `ssd-β`, without tolerance for EOS, or `ssd-β-eos`, the paper's rule."""

    def __init__(self, name: str, drafter: Drafter, beta: float, eos_strict: bool = True):
        super().__init__(name, drafter)
        self.beta, self.eos_strict = beta, eos_strict

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        beta = torch.where((tokens == eos) & self.eos_strict, 0.0, self.beta)
        return uniform("accept") < tolerant(sd.of(q, tokens), sd.of(p, tokens), beta)


class RelaxedVerifier(sd.SpeculativeDecoding):
    """Verifier that accepts by a yes-or-no rule on q; a rejected token is replaced by a draw from
    q.

    Such a rule would end utterances whenever the draft does, so EOS is judged by SD's rule,
    including the residual. After a rejected EOS it may still be drawn from q.
    """

    def __init__(self, name: str, drafter: Drafter, eos_strict: bool = True):
        super().__init__(name, drafter)
        self.eos_strict = eos_strict

    def plausible(self, q: Tensor, tokens: Tensor) -> Tensor:
        """Return which tokens pass the rule, bool [B, m], given q [B, m, V] and tokens [B, m]."""
        raise NotImplementedError

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        exact = super().accept(q, p, tokens, eos, uniform)
        return torch.where((tokens == eos) & self.eos_strict, exact, self.plausible(q, tokens))

    def replacement(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int) -> Tensor:
        strict = ((tokens == eos) & self.eos_strict)[:, None]
        return torch.where(strict, sd.residual(q, p), q)


class TypicalAcceptance(RelaxedVerifier):
    """Verifier `typical` or `typical-ε-δ`."""

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        epsilon: float = EPSILON,
        delta: float = DELTA,
        eos_strict: bool = True,
    ):
        super().__init__(name, drafter, eos_strict)
        self.epsilon, self.delta = epsilon, delta

    def plausible(self, q: Tensor, tokens: Tensor) -> Tensor:
        return sd.of(q, tokens) > threshold(q, self.epsilon, self.delta)


class TopKVerify(RelaxedVerifier):
    """Verifier `topk-verify-k`."""

    def __init__(self, name: str, drafter: Drafter, k: int, eos_strict: bool = True):
        super().__init__(name, drafter, eos_strict)
        self.k = k

    def plausible(self, q: Tensor, tokens: Tensor) -> Tensor:
        return among_likeliest(q, tokens, self.k)
