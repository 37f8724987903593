"""What typical acceptance and top-k verification share: a rule on the target's probabilities alone."""

from __future__ import annotations

import torch
from torch import Tensor

from dcar.sampling import sample
from eval.verifiers import sd
from eval.verifiers.chain import ChainVerifier, Uniforms
from eval.verifiers.drafters import Drafter


class RelaxedVerifier(ChainVerifier):
    """Accept by a yes-or-no rule on q; a refused token gives way to a draw from q.

    EOS is judged by SD's rule (`eos_strict`), residual included: a rule that says "plausible" would end utterances
    whenever the draft does. The probability of the end is still not kept: a token that passes where the target would
    have ended delays it, and behind a refused one it may be drawn from q once more.
    """

    relaxes_end = True

    def __init__(self, name: str, drafter: Drafter, eos_strict: bool = True):
        super().__init__(name, drafter)
        self.eos_strict = eos_strict

    def plausible(self, q: Tensor, tokens: Tensor) -> Tensor:
        """q [B, m, V], tokens [B, m] -> bool [B, m]."""
        raise NotImplementedError

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        exact = uniform("accept") < sd.acceptance(sd.of(q, tokens), sd.of(p, tokens))
        return torch.where((tokens == eos) & self.eos_strict, exact, self.plausible(q, tokens))

    def replace(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        strict = ((tokens == eos) & self.eos_strict)[:, None]
        return sample(torch.where(strict, sd.residual(q, p), q), uniform("residual"))
