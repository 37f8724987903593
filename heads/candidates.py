"""Features of drawn chunks, from which a policy chooses where a chunk ends.

The K tokens x_1..x_K of a candidate are drawn from the heads before the end of the chunk is chosen.
`candidate_features` describes them, `EndScores` scores every possible end, and `joint_log_probs`
gives the distribution over candidate and end. A chunk should end on a likely token and before an
unlikely one, because the next hidden state is computed from its last token. Features are taken from
the decoder's distributions before temperature and top-k, so they do not depend on the sampling."""

import torch
from torch import Tensor, nn

from heads.layers import at

FEATURES = ("drawn", "best", "entropy")
"""Features of each drawn token: its log-probability, the log-probability of the most likely
token, and the entropy of the distribution; all in nats. A policy with a chunk scorer reads one
more: the token's contribution to the joint score (heads/chunk_scorer.py)."""
CHUNK_SCORE = len(FEATURES)
"""Index of the chunk scorer's feature."""
MIN_LOG_PROB = -8.0  # lower log-probabilities are clamped
GAIN = 8.0  # scale of the scores: the dozen weights have to move far in a few hundred updates


def candidate_features(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the features [..., K, 3], float32, of tokens [..., K] drawn from logits [..., K,
    V]. With N candidates, tokens [..., N, K], they are [..., N, K, 3]."""
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


def end_features(features: Tensor) -> Tensor:
    """Return the features [..., K, 4F + 3] of every end a = 1..K, given those of the tokens
    [..., K, F]: the F features of the last kept token and of the first dropped one (0 after the
    last, with a flag), means and sums (in eighths) over the kept tokens, and the length. The sum
    of the chunk scorer's feature is the log-ratio of the chunk."""
    k = features.shape[-2]
    size = torch.arange(1, k + 1, device=features.device, dtype=features.dtype).view(k, 1)
    dropped = nn.functional.pad(features[..., 1:, :], (0, 0, 0, 1))
    sums = features.cumsum(-2)  # [..., K, F]
    length = torch.cat((size / 8, size.log(), (size == k).to(size.dtype)), -1).expand(
        *features.shape[:-1], 3
    )
    return torch.cat((features, dropped, sums / size, sums / 8, length), dim=-1)


class EndScores(nn.Module):
    """Linear scores of the ends of a chunk: s_a = w f_a (`end_features`).

    All ends share the weights w, so a policy works for any number of heads. They start at 0, which
    is a uniform distribution. As f_a is affine in the features of the tokens, s_a is as well."""

    basis: Tensor  # [K, n F + 1, 4F + 3]: f_a of every feature, and of none

    def __init__(self, num_features: int, reach: int, num_actions: int):
        """Make scores of the ends 1..K, K = num_actions, of chunks of n = reach tokens with F =
        num_features features each."""
        super().__init__()
        self.num_features, self.reach, self.num_actions = num_features, reach, num_actions
        self.linear = nn.Linear(4 * num_features + 3, 1, bias=False)
        nn.init.zeros_(self.linear.weight)
        self.register_buffer("basis", None, persistent=False)
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Compute the basis."""
        n, numbers = self.reach, self.reach * self.num_features
        none = end_features(torch.zeros(1, n, self.num_features))
        each = end_features(torch.eye(numbers).view(numbers, n, -1)) - none
        basis = GAIN * torch.cat((each, none)).transpose(0, 1).contiguous()
        self.basis = nn.functional.pad(basis, (0, 0, 0, 0, 0, self.num_actions - n))

    def end_on_likely(self, nats: float = 2.0) -> None:
        """Initialise as a soft version of the rule `end-on-confident` (eval/verifiers/controls.py):
        a weight on the last kept token's log-probability."""
        with torch.no_grad():
            self.linear.weight[0, FEATURES.index("drawn")] = nats / GAIN

    def end_on_scored(self) -> None:
        """Initialise the weight of the chunk's log-ratio as 1."""
        with torch.no_grad():
            # the sums are in eighths
            self.linear.weight[0, 3 * self.num_features + CHUNK_SCORE] = 8 / GAIN

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return weight [K, n F] and bias [K] of the scores as an affine function of the features
        [n F] of a chunk; both are 0 above n."""
        affine = torch.linalg.vecdot(self.basis, self.linear.weight[0])
        return affine[:, :-1], affine[:, -1]


def resampling_log_weights(features: Tensor) -> Tensor:
    """Return log-weights [..., N, n] of importance resampling among N candidates [..., N, n, F]
    with a chunk scorer, for every size. The weight of a chunk of a tokens is its density ratio
    exp(r_a), normalised over the candidates."""
    return features[..., CHUNK_SCORE].cumsum(-1).log_softmax(-2)


def with_dial(scores: Tensor, dial: float) -> Tensor:
    """Add `dial` nats to the scores [..., K] for each token of a size: above 0, chunks become
    longer; below 0, shorter."""
    return (
        scores + dial * torch.arange(1, scores.shape[-1] + 1, device=scores.device)
        if dial
        else scores
    )


def joint_log_probs(scores: Tensor, features: Tensor) -> Tensor:
    """Return joint log-probabilities [..., N K] of candidate and size; column i K + a - 1 keeps a
    tokens of candidate i.

    They are proportional to exp(score) times the resampling weight of the candidate among chunks of
    a tokens. scores: [..., N, K] of the sizes in each candidate; features: of its tokens [...,
    N, n, F], n ≤ K. With one candidate, this is the distribution over sizes."""
    scores = scores.float()
    if scores.shape[-2] > 1:
        weights = resampling_log_weights(features)
        scores = scores + nn.functional.pad(weights, (0, scores.shape[-1] - weights.shape[-1]))
    return scores.flatten(-2).log_softmax(-1)


def select_candidate(chunks: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the entries [B, …] of the chosen candidate [B] (None: the first) among N candidates
    [B, N, …]."""
    return chunks[:, 0] if chosen is None else at(chunks, chosen)
