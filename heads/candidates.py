"""What the heads proposed at a decision, as a policy after the draw sees it: how likely, how certain, and where.

The heads' candidates x_1..x_K are drawn before the chunk's end is chosen. `candidate_features` describes them,
`EndScores` scores every end, `joint_log_probs` makes probabilities of chunk and end together. A chunk that ends on a
likely token, before an unlikely one, is a better chunk: what follows is read from a hidden state that rests on its last
token. Features are of the decoder's own distributions, before temperature and top-k, so that a policy says the same at
every sampling, temperature 0 included.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEATURES = ("drawn", "best", "entropy")
"""Of each candidate: log-probability of the drawn token, of the likeliest one, and entropy of the distribution; all in
nats. Behind them may stand what the token adds to the joint score of its chunk (heads/chunk_scorer.py)."""
CHUNK_SCORE = len(FEATURES)
"""Where that stands."""
UNLIKELY = -8.0  # log-probabilities below say the same
GAIN = 8.0  # the dozen weights have to move far in a few hundred updates, each of a learning rate


def candidate_features(logits: Tensor, tokens: Tensor) -> Tensor:
    """logits [..., K, V] of the heads and the tokens [..., K] drawn from them -> [..., K, 3] float32: FEATURES. Of
    several candidates, tokens [..., N, K], -> [..., N, K, 3]."""
    log_probs = logits.float().log_softmax(-1)
    # 0 log 0 = 0, for distributions with impossible tokens
    entropy = -torch.linalg.vecdot(log_probs.exp(), log_probs.clamp(min=torch.finfo(torch.float32).min))
    probs = torch.stack((log_probs.amax(-1), entropy), -1)  # [..., K, 2], the same for all draws
    several = tokens.dim() == logits.dim()
    drawn = log_probs.gather(-1, tokens.mT if several else tokens.unsqueeze(-1)).clamp(min=UNLIKELY)
    if not several:
        return torch.cat((drawn, probs), -1)
    return torch.cat((drawn.mT.unsqueeze(-1), probs.unsqueeze(-3).expand(*tokens.shape, 2)), -1)


def end_features(candidates: Tensor) -> Tensor:
    """About every end a = 1..K: [..., K, F] -> [..., K, 4F + 3]. The F features of the last kept token and of the first
    one that is dropped (0 behind the last, and a flag that says so), means and sums (in eighths) over what is kept, and
    the length itself. Sums are what a longer chunk adds, so a weight on one is `Confidence` (dcar/decoding/chunks.py),
    and the sum over the chunk scorer is the log-ratio of the chunk."""
    k = candidates.shape[-2]
    size = torch.arange(1, k + 1, device=candidates.device, dtype=candidates.dtype).view(k, 1)
    dropped = nn.functional.pad(candidates[..., 1:, :], (0, 0, 0, 1))
    sums = candidates.cumsum(-2)  # [..., K, F]
    length = torch.cat((size / 8, size.log(), (size == k).to(size.dtype)), -1).expand(*candidates.shape[:-1], 3)
    return torch.cat((candidates, dropped, sums / size, sums / 8, length), dim=-1)


class EndScores(nn.Module):
    """A score for every end of a chunk, linear in what is seen of it: s_a = w f_a.

    No weight belongs to one end, so a policy reads decoders of any number of heads. It begins at 0: all ends alike.
    """

    def __init__(self, features: int = len(FEATURES)):
        """features: F, of every candidate."""
        super().__init__()
        self.features = features
        self.linear = nn.Linear(4 * features + 3, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def end_on_likely(self, nats: float = 2.0) -> None:
        """Begin as a soft `end-on-confident` (dcar/decoding/chunks.py): so many nats for each of the last kept
        token's."""
        with torch.no_grad():
            self.linear.weight[0, FEATURES.index("drawn")] = nats / GAIN

    def end_on_scored(self) -> None:
        """Besides, a nat for each nat of the log-ratio of what is kept."""
        with torch.no_grad():
            self.linear.weight[0, 3 * self.features + CHUNK_SCORE] = 8 / GAIN  # the sums are in eighths

    def forward(self, candidates: Tensor) -> Tensor:
        """candidates [..., K, F] -> scores [..., K]."""
        return GAIN * self.linear(end_features(candidates)).squeeze(-1)


def resampled(candidates: Tensor) -> Tensor:
    """Log-share of each draw among those of its row, for every size: candidates [..., N, n, F] with their chunk scorer
    -> [..., N, n]. A chunk of a tokens weighs its density ratio, the exponential of its log-ratio r_a."""
    return candidates[..., CHUNK_SCORE].cumsum(-1).log_softmax(-2)


def dialled(scores: Tensor, dial: float) -> Tensor:
    """Scores [..., K] with `dial` nats added for each token of a size: the same policy, faster or more careful."""
    return scores + dial * torch.arange(1, scores.shape[-1] + 1, device=scores.device) if dial else scores


def joint_log_probs(scores: Tensor, candidates: Tensor) -> Tensor:
    """Log-probs of candidate and size together, [..., N K], column i K + a - 1 for a tokens of draw i: proportional to
    the exponential of the score times the draw's share among the chunks of a tokens. scores [..., N, K] of the sizes in
    each of N chunks that were drawn side by side, of which candidates [..., N, n, F] are known, n ≤ K. Of one chunk it
    is the distribution of its sizes."""
    scores = scores.float()
    if scores.shape[-2] > 1:
        scores = scores + nn.functional.pad(resampled(candidates), (0, scores.shape[-1] - candidates.shape[-2]))
    return scores.flatten(-2).log_softmax(-1)


def of_draw(chunks: Tensor, draw: Tensor | None) -> Tensor:
    """Of what belongs to chunks drawn side by side [B, N, …], that of the draw [B] that was chosen: [B, …]."""
    return chunks[:, 0] if draw is None else chunks[torch.arange(draw.shape[0], device=draw.device), draw]
