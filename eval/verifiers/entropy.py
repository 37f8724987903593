"""Dynamic chunking without training: keep an additional head's token as long as the head is
certain.

    a = 1 + number of leading heads k = 2, 3, … with H(p_k(. | h)) <= h,    H in nats

The base head's token is always kept; the first head whose entropy exceeds the threshold ends the
chunk. This is the baseline for a learned policy: it also adapts the chunk to the context, and it
needs neither rewards nor training.

H is the entropy of the head's own distribution before warping. Temperature and top-k change the
draw, not the certainty of the head: the threshold therefore belongs to the decoder and not to the
sampling, and it keeps its meaning at temperature 0, where every warped distribution has entropy 0.
`entropy-0.8` names the threshold. `entropy@3` names the desired tokens per pass, and uses the
threshold that yielded them on development data (statistics.py).

All heads are evaluated at every step, because the size of the chunk depends on them, whereas a
policy decides before. That is the price of the rule, and timings include it.
"""

from torch import Tensor

from dcar.decoding import BatchState, ChunkRule, Decision, Method
from dcar.errors import ConfigError
from dcar.model.draft import AnyDecoder
from eval.verifiers.statistics import VerifierStatistics, needed
from heads.candidates import FEATURES, candidate_features

ENTROPY = FEATURES.index("entropy")


def entropies(logits: Tensor) -> Tensor:
    """Return the entropies [..., K], in nats, of the distributions before warping, given logits
    [..., K, V + 1]."""
    return candidate_features(logits, logits.argmax(-1))[..., ENTROPY]


def chunk_sizes(entropy: Tensor, threshold: float) -> Tensor:
    """Return sizes [...]: 1 + the number of leading additional heads whose entropy is at most
    the threshold, given the entropies [..., K - 1] of heads 2..K."""
    return 1 + (entropy <= threshold).cumprod(-1).sum(-1)


class EntropyChunk(ChunkRule):
    """Chunk rule: sizes by the entropies of the additional heads."""

    after_draw = True

    def __init__(self, threshold: float, name: str | None = None):
        self.threshold = threshold
        self.name = name or f"entropy-{threshold:g}"

    def choose(self, state: BatchState, features: Tensor | None) -> Decision:
        assert features is not None
        return Decision(chunk_sizes(features[:, 0, 1:, ENTROPY], self.threshold))


def from_settings(
    name: str,
    decoder: AnyDecoder,
    statistics: VerifierStatistics | None,
    threshold: float | None,
    tokens_per_pass: float | None,
) -> tuple[Method, dict[str, str]]:
    """Return the method with one of these settings, and the facts that its tokens depend on.

    threshold: in nats; tokens_per_pass: on development data.
    """
    if (threshold is None) == (tokens_per_pass is None):
        raise ConfigError(
            f"method '{name}': write entropy-0.8 (threshold in nats, at least 0) or entropy@3 "
            "(tokens_per_pass on development data)"
        )
    limit = (
        threshold
        if tokens_per_pass is None
        else needed(statistics, name).threshold_for(tokens_per_pass)
    )
    assert limit is not None
    if decoder.config.num_prediction_heads < 2:
        raise ConfigError(
            f"method '{name}' needs additional heads, but this decoder has only the base head"
        )
    return EntropyChunk(limit, name), {"threshold": repr(limit)}
