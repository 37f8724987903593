"""Dynamic chunking without training: keep an additional head's token while the head is sure of it.

    a = 1 + number of leading heads k = 2, 3, … with H(p_k(. | h)) <= h,    H in nats

The base head's token is always kept; the first head whose entropy exceeds the threshold ends the chunk. This is what a
learned policy must beat: it, too, adapts the chunk to the context, and it needs neither rewards nor training.

H is the entropy of the head's own distribution before warping. Temperature and top-k change what is drawn, not what the
head
knows: the threshold then belongs to the decoder and not to the sampling, and it keeps its meaning at temperature 0,
where every warped distribution has entropy 0. `entropy-0.8` names the threshold; `entropy@3.0` the tokens per pass that
it shall give, and takes the threshold that gave them on development data (statistics.py).

All heads are evaluated at every step, for the chunk's size depends on them; a policy decides before. That is the price
of the rule, and timings contain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from dcar.decoding import Choice, ChunkMethod, Draft, Kept, Method, Session
from dcar.decoding.chunks import draw_chunk
from dcar.errors import ConfigError
from dcar.model.draft import AnyDecoder
from eval.verifiers.statistics import VerifierStatistics, needed


def entropies(logits: Tensor) -> Tensor:
    """Entropy in nats of the distributions before warping: logits [..., V + 1] -> [...]."""
    log_probs = logits.float().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def chunk_sizes(entropy: Tensor, threshold: float) -> Tensor:
    """1 + the leading additional heads that are sure enough: entropy [..., K - 1] of heads 2..K -> sizes [...]."""
    return 1 + (entropy <= threshold).cumprod(-1).sum(-1)


class EntropyChunk:
    """Schedule of `ChunkMethod`: chunk sizes by the entropies of the additional heads, before the draw."""

    candidates = 0

    def __init__(self, threshold: float, name: str | None = None):
        if not threshold >= 0:
            raise ConfigError(f"the entropy threshold is in nats and at least 0, not {threshold}")
        self.threshold = threshold
        self.name = name or f"entropy-{threshold:g}"

    def begin(self, session: Session) -> None:
        if session.model.config.num_prediction_heads < 2:
            raise ConfigError("an entropy threshold chooses among additional heads, but this decoder has the base head "
                              "only; use a decoder trained with several heads")

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None = None) -> Choice:
        self.logits = session.model.heads(session.last_hidden)  # [B, K, V + 1]
        return Choice(chunk_sizes(entropies(self.logits[:, 1:]), self.threshold))

    def select(self, rows: Tensor) -> None:
        pass


class EntropyMethod(ChunkMethod):
    """`ChunkMethod` with an `EntropyChunk`, which draws from the logits that the schedule has computed already."""

    schedule: EntropyChunk

    def keep(self, session: Session, hidden: Tensor, counts: Tensor, draft: Draft | None) -> Kept:
        sizes = self.schedule.choose(session, hidden, counts).sizes
        tokens, _ = draw_chunk(session, self.schedule.logits[:, : int(sizes.max())])
        return Kept(tokens, sizes, actions=sizes)


def from_name(name: str, rest: str, decoder: AnyDecoder,
              statistics: VerifierStatistics | None) -> tuple[Callable[[], Method], dict[str, str]]:
    """`entropy-THRESHOLD` or `entropy@LENGTH` -> how to build it, and what its tokens depend on."""
    try:
        if rest[:1] not in ("-", "@"):
            raise ValueError
        number = float(rest[1:])
        if math.isnan(number) or number < 0:
            raise ValueError
    except ValueError as error:
        raise ConfigError(f"method '{name}': write entropy-0.8 (threshold in nats, at least 0) or entropy@3.0 (tokens "
                          "per pass on development data)") from error
    threshold = number if rest[0] == "-" else needed(statistics, name).threshold_for(number)
    if decoder.config.num_prediction_heads < 2:
        raise ConfigError(f"method '{name}' chooses among additional heads, but this decoder has the base head only")
    return lambda: EntropyMethod(EntropyChunk(threshold, name)), {"threshold": repr(threshold)}
