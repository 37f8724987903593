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

All heads are evaluated at every step, because the size of the chunk depends on them. That is the
price of the rule, and timings include it.
"""

from torch import Tensor

from dcar.decoding import BatchState, Choice, ChunkRule
from dcar.decoding.declare import Style, decoding_method, option
from dcar.errors import ConfigError
from dcar.model.models import Borrowed
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


@decoding_method("entropy", Style("entropy", "#c98a00", "h", "h"), example="entropy-0.8")
class EntropyChunk(ChunkRule):
    """Chunk rule: sizes by the entropies of the additional heads."""

    threshold: float | None = option(None, minimum=0)
    tokens_per_pass: float | None = option(None, "@", minimum=0)
    after_draw = True

    def bind(self, models: Borrowed) -> None:
        if (self.threshold is None) == (self.tokens_per_pass is None):
            raise ConfigError(
                "write entropy-0.8 (threshold in nats, at least 0) or entropy@3 (tokens_per_pass "
                "on development data)"
            )
        if models.heads < 2:
            raise ConfigError("needs additional heads, but this decoder has only the base head")
        if self.tokens_per_pass is not None:
            curve = models.statistics("entropy_thresholds", "entropy_lengths")
            self.threshold = curve.threshold_for(self.tokens_per_pass)

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        assert features is not None
        assert self.threshold is not None
        return Choice(chunk_sizes(features[:, 0, 1:, ENTROPY], self.threshold))
