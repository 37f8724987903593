"""Typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1), on a chain.

Accept x iff q(x) > min(epsilon, delta * exp(-H(q))), where H is the entropy of q in nats. The
threshold thus falls where the target itself is uncertain. A rejected token is replaced by a draw
from q; EOS is judged by SD's rule, unless `eos`.
"""

import torch
from torch import Tensor

from dcar.decoding.declare import Style, decoding_method, option
from eval.verifiers import sd
from eval.verifiers.relaxed import RelaxedVerifier

EPSILON, DELTA = 0.09, 0.3  # of Medusa's code; 0.3 is the square root of 0.09


def threshold(q: Tensor, epsilon: float, delta: float) -> Tensor:
    """Return the threshold [...] of typical acceptance, min(epsilon, delta * exp(-H(q))), for q
    [..., V]."""
    entropy = torch.special.entr(q).sum(-1)
    return (delta * torch.exp(-entropy)).clamp(max=epsilon)


@decoding_method("typical", Style("typical", "#8a5a2b", "P"))
class TypicalAcceptance(RelaxedVerifier):
    """Verifier `typical` or `typical-ε-δ`."""

    epsilon: float = option(EPSILON, above=0, maximum=1)
    delta: float = option(DELTA, above=0)

    def plausible(self, q: Tensor, tokens: Tensor) -> Tensor:
        return sd.of(q, tokens) > threshold(q, self.epsilon, self.delta)
