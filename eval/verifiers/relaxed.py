"""Verifiers that accept by a yes-or-no rule on q: the part that typical acceptance and top-k
verification share. None is lossless."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dcar.decoding.declare import option
from eval.verifiers import sd
from eval.verifiers.chain import Uniforms


@dataclass(eq=False, repr=False)
class RelaxedVerifier(sd.SpeculativeDecoding):
    """Verifier that accepts by a yes-or-no rule on q; a rejected token is replaced by a draw from
    q.

    Such a rule would end utterances whenever the draft does, so EOS is judged by SD's rule,
    including the residual, unless `eos`. After a rejected EOS it may still be drawn from q.
    """

    eos: bool = option(False, "-eos", word="eos", kw_only=True)

    def plausible(self, q: Tensor, tokens: Tensor) -> Tensor:
        """Return which tokens pass the rule, bool [B, m], given q [B, m, V] and tokens [B, m]."""
        raise NotImplementedError

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        exact = super().accept(q, p, tokens, eos, uniform)
        strict = (tokens == eos) & (not self.eos)
        return torch.where(strict, exact, self.plausible(q, tokens))

    def replacement(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int) -> Tensor:
        strict = ((tokens == eos) & (not self.eos))[:, None]
        return torch.where(strict, sd.residual(q, p), q)
