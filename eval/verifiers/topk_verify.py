"""Top-k verification of Llasa+ (arXiv 2508.06262).

Accept x iff it is among the k most likely tokens of the base head; a rejected token is replaced by
a draw from it. The k most likely are those after top-k and top-p of the sampling: a token that
could not have been sampled is never accepted. EOS is judged by SD's rule, unless `eos`.
"""

from torch import Tensor

from dcar.decoding.declare import Style, decoding_method, option
from dcar.ties import rank
from eval.verifiers import sd
from eval.verifiers.relaxed import RelaxedVerifier


def among_likeliest(q: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Return whether x is one of the k most likely tokens (of equal ones, those with the lowest
    ids) and possible: q [..., V], tokens [...] -> bool."""
    return (rank(q, tokens) < k) & (sd.of(q, tokens) > 0)


@decoding_method("topk-verify", Style("top-k verify", "#74820a", "*", "k"), "topk-verify-50")
class TopKVerify(RelaxedVerifier):
    """Verifier `topk-verify-k`."""

    k: int = option(minimum=1)

    def plausible(self, q: Tensor, tokens: Tensor) -> Tensor:
        return among_likeliest(q, tokens, self.k)
