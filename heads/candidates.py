"""Features of the drawn candidates, from which a policy after the draw chooses where the chunk
ends.

The heads' candidates x_1..x_K are drawn before the chunk's end is chosen. `candidate_features`
describes them, `EndScores` scores every end, `joint_log_probs` gives the distribution over chunk
and end. A chunk should end on a likely token, before an unlikely one: the next hidden state is
computed from its last token. Features are of the decoder's distributions before temperature and
top-k, so that they do not depend on the sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads.layers import at

FEATURES = ("drawn", "best", "entropy")
"""Of each candidate: log-probability of the drawn token, of the likeliest one, and entropy of
the distribution; all in nats. A policy with a chunk scorer has one more: what the token adds to
the joint score (heads/chunk_scorer.py)."""
CHUNK_SCORE = len(FEATURES)
"""Index of that feature."""
MIN_LOG_PROB = -8.0  # lower log-probabilities are clamped
GAIN = 8.0  # scale of the scores: the dozen weights have to move far in a few hundred updates


def candidate_features(logits: Tensor, tokens: Tensor) -> Tensor:
    """logits [..., K, V] of the heads and the tokens [..., K] drawn from them -> FEATURES [...,
    K, 3], float32. With several candidates, tokens [..., N, K], -> [..., N, K, 3]."""
    log_probs = logits.float().log_softmax(-1)
    # 0 log 0 = 0, for distributions with impossible tokens
    entropy = -torch.linalg.vecdot(
        log_probs.exp(), log_probs.clamp(min=torch.finfo(torch.float32).min)
    )
    probs = torch.stack((log_probs.amax(-1), entropy), -1)  # [..., K, 2], the same for all draws
    several = tokens.dim() == logits.dim()
    drawn = log_probs.gather(-1, tokens.mT if several else tokens.unsqueeze(-1)).clamp(
        min=MIN_LOG_PROB
    )
    if not several:
        return torch.cat((drawn, probs), -1)
    return torch.cat((drawn.mT.unsqueeze(-1), probs.unsqueeze(-3).expand(*tokens.shape, 2)), -1)


def end_features(candidates: Tensor) -> Tensor:
    """Features of every end a = 1..K: [..., K, F] -> [..., K, 4F + 3]. The F features of the
    last kept token and of the first dropped one (0 after the last, with a flag), means and sums
    (in eighths) over the kept tokens, and the length. The sum of the chunk scorer's feature is
    the log-ratio of the chunk."""
    k = candidates.shape[-2]
    size = torch.arange(1, k + 1, device=candidates.device, dtype=candidates.dtype).view(k, 1)
    dropped = nn.functional.pad(candidates[..., 1:, :], (0, 0, 0, 1))
    sums = candidates.cumsum(-2)  # [..., K, F]
    length = torch.cat((size / 8, size.log(), (size == k).to(size.dtype)), -1).expand(
        *candidates.shape[:-1], 3
    )
    return torch.cat((candidates, dropped, sums / size, sums / 8, length), dim=-1)


class EndScores(nn.Module):
    """A score for every end of a chunk, linear in its features: s_a = w f_a.

    All ends share the weights, so a policy works for any number of heads. They start at 0: a
    uniform distribution.
    """

    def __init__(self, features: int = len(FEATURES)):
        """features: F, of every candidate."""
        super().__init__()
        self.features = features
        self.linear = nn.Linear(4 * features + 3, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def end_on_likely(self, nats: float = 2.0) -> None:
        """Initialise as a soft `end-on-confident` (dcar/decoding/chunks.py): weight of the last
        kept token's log-probability."""
        with torch.no_grad():
            self.linear.weight[0, FEATURES.index("drawn")] = nats / GAIN

    def end_on_scored(self) -> None:
        """Initialise the weight of the chunk's log-ratio as 1."""
        with torch.no_grad():
            # the sums are in eighths
            self.linear.weight[0, 3 * self.features + CHUNK_SCORE] = 8 / GAIN

    def forward(self, candidates: Tensor) -> Tensor:
        """candidates [..., K, F] -> scores [..., K]."""
        # not a matrix product, which a GPU may compute in TF32 and autocast in bfloat16
        return GAIN * torch.linalg.vecdot(end_features(candidates), self.linear.weight[0])


def resampling_log_weights(candidates: Tensor) -> Tensor:
    """Log-weights of importance resampling among the N draws, for every size: candidates [...,
    N, n, F] with a chunk scorer -> [..., N, n]. The weight of a chunk of a tokens is its density
    ratio exp(r_a), normalised over draws."""
    return candidates[..., CHUNK_SCORE].cumsum(-1).log_softmax(-2)


def with_dial(scores: Tensor, dial: float) -> Tensor:
    """Scores [..., K] with `dial` nats added for each token of a size: longer chunks (above 0)
    or shorter ones."""
    return (
        scores + dial * torch.arange(1, scores.shape[-1] + 1, device=scores.device)
        if dial
        else scores
    )


def joint_log_probs(scores: Tensor, candidates: Tensor) -> Tensor:
    """Joint log-probs of draw and size [..., N K], column i K + a - 1 for a tokens of draw i:
    proportional to exp(score) times the resampling weight of the draw among chunks of a tokens.
    scores [..., N, K] of the sizes in each of N draws, candidates [..., N, n, F] their features,
    n ≤ K. With one draw: the distribution over sizes."""
    scores = scores.float()
    if scores.shape[-2] > 1:
        weights = resampling_log_weights(candidates)
        scores = scores + nn.functional.pad(weights, (0, scores.shape[-1] - weights.shape[-1]))
    return scores.flatten(-2).log_softmax(-1)


def select_draw(chunks: Tensor, draw: Tensor | None) -> Tensor:
    """The entries of the chosen draw [B] (None: the first) out of N draws: [B, N, …] -> [B, …]."""
    return chunks[:, 0] if draw is None else at(chunks, draw)
