"""Typical acceptance of Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3.1), on a chain.

Accept x iff q(x) > min(epsilon, delta * exp(-H(q))), H the entropy of q in nats. So the threshold falls where
the target itself is undecided. A refused token gives way to a draw from q. Not lossless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcar.errors import ConfigError
from eval.verifiers import sd
from eval.verifiers.drafters import Drafter
from eval.verifiers.relaxed import RelaxedVerifier

EPSILON, DELTA = 0.09, 0.3  # of Medusa's code; 0.3 is the square root of 0.09


def threshold(q: Tensor, epsilon: float, delta: float) -> Tensor:
    """min(epsilon, delta * exp(-H(q))): q [..., V] -> [...]."""
    entropy = torch.special.entr(q).sum(-1)
    return (delta * torch.exp(-entropy)).clamp(max=epsilon)


class TypicalAcceptance(RelaxedVerifier):
    """`typical`, `typical-ε-δ`."""

    numbers = (0, 2)

    def __init__(self, name: str, drafter: Drafter, epsilon: float = EPSILON, delta: float = DELTA,
                 eos_strict: bool = True):
        super().__init__(name, drafter, eos_strict)
        if not 0 < epsilon <= 1 or not 0 < delta < float("inf"):
            raise ConfigError(f"{name}: typical acceptance needs 0 < epsilon <= 1 and delta > 0, not {epsilon} and "
                              f"{delta}; Medusa uses {EPSILON} and {DELTA}")
        self.epsilon, self.delta = epsilon, delta

    def plausible(self, q: Tensor, tokens: Tensor) -> Tensor:
        return sd.of(q, tokens) > threshold(q, self.epsilon, self.delta)
