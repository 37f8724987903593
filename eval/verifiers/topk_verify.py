"""Top-k verification of Llasa+ (arXiv 2508.06262): accept x iff it is among the k likeliest tokens of the base head.

A refused token gives way to a draw from the base head. Not lossless. The k likeliest are those after sampling's top-k
and top-p: a token that could not have been sampled is never accepted.
"""

from __future__ import annotations

from torch import Tensor

from dcar.errors import ConfigError
from dcar.sampling import rank
from eval.verifiers import sd
from eval.verifiers.drafters import Drafter
from eval.verifiers.relaxed import RelaxedVerifier


def among_likeliest(q: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Whether x is one of the k likeliest (of equals the lowest ids) and possible: q [..., V], tokens [...] -> bool."""
    return (rank(q, tokens) < k) & (sd.of(q, tokens) > 0)


class TopKVerify(RelaxedVerifier):
    """`topk-verify-k`."""

    numbers = (1,)

    def __init__(self, name: str, drafter: Drafter, k: float, eos_strict: bool = True):
        super().__init__(name, drafter, eos_strict)
        if k < 1 or k != int(k):
            raise ConfigError(f"{name}: k is a whole number, at least 1, not {k:g}; write topk-verify-50, as in Llasa+")
        self.k = int(k)

    def plausible(self, q: Tensor, tokens: Tensor) -> Tensor:
        return among_likeliest(q, tokens, self.k)
