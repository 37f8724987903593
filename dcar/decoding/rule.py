"""What a chunk rule of your own extends: a schedule of `ChunkMethod` whose only question is the size of a chunk."""

from __future__ import annotations

from torch import Tensor

from dcar.decoding.chunks import Choice, check_size
from dcar.decoding.loop import Session
from heads.candidates import candidate_features


class ChunkRule:
    """Decides how many of the heads' next tokens are kept. Override `choose`.

    `candidates`: how many tokens are drawn before it decides; 0 = it decides first, and only the kept ones are drawn.
    """

    name = "rule"
    candidates = 0
    num_candidates = 1

    def begin(self, session: Session) -> None:
        """Called once before decoding. ConfigError where the decoder has fewer heads than `candidates`."""
        if self.candidates:
            check_size(self.candidates, session)

    def see(self, session: Session, logits: Tensor, tokens: Tensor) -> Tensor:
        """What `choose` sees of the tokens [B, N, n] drawn from logits [B, n, V + 1]."""
        return candidate_features(logits, tokens)

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None) -> Choice:
        """Sizes [B] in 1..K of the next chunk of every row.

        candidates [B, 1, n, 3]: of each drawn token its log-probability, that of the likeliest token, and the entropy
        in nats, all at temperature 1; None where it decides first. session.last_hidden [B, D]: the decoder's state.
        """
        raise NotImplementedError

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of what the rule remembers; others have finished."""
