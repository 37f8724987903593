"""Chunk policy of DCAR: decides how many of the heads' tokens to keep.

`forward(hidden, features=…)` returns the log-probabilities of the ends of the next chunk for
every position at once, as training needs them. `dcar.decoding.policy.PolicyReader` computes the
same step by step while utterances are decoded. `save_pretrained` and `from_pretrained` write and
read a policy.

The paper's policy (§4.2 and App. C.2, `reads` "hidden") is one causal Transformer layer over the
hidden states of the speech positions, followed by a linear layer over the actions 1..K; it decides
before tokens are drawn. Its layer is as wide as the decoder (`width=None`); a bottleneck (for
example 256) reads the same states through a projection at little cost.

A second kind, which is not in the paper, decides after the draw, from the candidates ("candidates",
heads/candidates.py). It may hold a chunk scorer (heads/chunk_scorer.py), trained before the policy,
that scores how well the tokens of a candidate fit together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcar.errors import CheckpointError
from heads.candidates import FEATURES, EndScores, joint_log_probs, with_dial
from heads.checkpoint import Checkpoint, CheckpointConfig, check_trained_for
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig, scored_features
from heads.layers import RotaryTable, TransformerLayer

READS = ("hidden", "candidates")
NEVER = -1e9
"""Score of a size that is masked out: its probability is 0, and the score is finite, so that
sums over distributions are finite too."""


@dataclass
class ChunkPolicyConfig(CheckpointConfig):
    """Shape of a policy and the identity of the base model that it was trained for."""

    hidden_size: int  # of the decoder
    num_actions: int  # K: keep 1..K tokens
    width: int | None = 256  # of the policy's layer; None = hidden_size, the paper's
    num_attention_heads: int = 8
    ffn_size: int | None = None  # None = 4 * width
    chunk_range: tuple[int, ...] = ()  # guidance range of the training run
    base_checksum: str = ""  # checksum of the decoder; empty = not bound to one
    tokenizer: str = ""  # name of the speech tokenizer
    reads: str = "hidden"  # one of READS
    sizes: tuple[int, ...] = ()  # chunk sizes that it chooses among; empty = all of 1..K
    chunk_scorer_width: int = 0  # of the chunk scorer that it holds; 0 = none
    chunk_scorer_embedding: int = 0
    chunk_scorer_ids: int = 0  # that the decoder's heads may draw

    def __post_init__(self) -> None:
        if self.reads not in READS:
            raise CheckpointError(f"policy: reads must be {' or '.join(READS)}, not '{self.reads}'")
        sizes = {
            "hidden_size": self.hidden_size,
            "num_actions": self.num_actions,
            "width": self.layer_width,
            "num_attention_heads": self.num_attention_heads,
            "ffn_size": self.ffn_size or 1,
        }
        if wrong := [f"{name} {size}" for name, size in sizes.items() if size < 1]:
            raise CheckpointError(f"policy: {', '.join(wrong)} must be at least 1")
        if (
            self.layer_width % self.num_attention_heads
            or self.layer_width // self.num_attention_heads % 2
        ):
            raise CheckpointError(
                f"policy: width {self.layer_width} must be num_attention_heads "
                f"{self.num_attention_heads} times an even number"
            )
        if self.chunk_scorer_width and not self.after_draw:
            raise CheckpointError(
                "policy: a chunk scorer needs candidates, but reads=hidden decides before they "
                "are drawn; set reads=candidates, or remove the chunk scorer"
            )
        if wrong := [
            str(size)
            for size in (*self.chunk_range, *self.sizes)
            if not 1 <= size <= self.num_actions
        ]:
            raise CheckpointError(
                f"policy: {self.num_actions} actions cannot keep {', '.join(wrong)} tokens"
            )

    @property
    def layer_width(self) -> int:
        return self.hidden_size if self.width is None else self.width

    @property
    def after_draw(self) -> bool:
        """True if the policy reads the candidates."""
        return self.reads != "hidden"

    @property
    def num_features(self) -> int:
        """Number of features that the policy reads of each token of a candidate."""
        return len(FEATURES) + (self.chunk_scorer_width > 0)

    @property
    def reach(self) -> int:
        """Longest chunk that the policy can choose."""
        return max(self.sizes, default=self.num_actions)


def shape_of(chunk_scorer: ChunkScorer | None) -> dict[str, int]:
    """Return the settings of a `ChunkPolicyConfig` that describe the policy's chunk scorer."""
    if chunk_scorer is None:
        return {}
    shape = chunk_scorer.config
    return {
        "chunk_scorer_width": shape.width,
        "chunk_scorer_embedding": shape.embedding_size,
        "chunk_scorer_ids": shape.vocab_size,
    }


class ChunkPolicy(Checkpoint):
    """Policy pi(a | h_1..h_t) or pi(a | candidates): logits of chunk sizes 1..K at every speech
    position; action a is column a - 1."""

    config_class = ChunkPolicyConfig
    model_type = "dcar-chunk-policy"
    unused: Tensor

    def __init__(self, config: ChunkPolicyConfig):
        super().__init__()
        self.config = config
        self.scores = EndScores(config.num_features) if config.after_draw else None
        self.chunk_scorer: ChunkScorer | None = None
        if config.chunk_scorer_width:
            self.chunk_scorer = ChunkScorer(
                ChunkScorerConfig(
                    config.hidden_size,
                    config.num_actions,
                    config.chunk_scorer_ids,
                    config.chunk_scorer_embedding,
                    config.chunk_scorer_width,
                )
            )
            self.chunk_scorer.requires_grad_(False)  # it learns from recordings, not from rewards
        self.register_buffer(
            "unused", torch.ones(config.num_actions, dtype=torch.bool), persistent=False
        )
        self.restore_buffers()
        self.layer: TransformerLayer | None = None
        if config.reads == "candidates":
            return
        width = config.layer_width
        self.input_norm = nn.LayerNorm(config.hidden_size)
        self.input = nn.Identity() if config.width is None else nn.Linear(config.hidden_size, width)
        self.layer = TransformerLayer(
            width, config.num_attention_heads, config.ffn_size or 4 * width
        )
        self.output_norm = nn.LayerNorm(width)
        self.rotary = RotaryTable(width // config.num_attention_heads)
        self.output = nn.Linear(width, config.num_actions)
        # Zero output: the untrained policy is uniform over the actions (entropy ln K).
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def candidate_features(self, hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the policy's features [..., n, F] of the tokens [..., n] drawn from logits
        [..., n, V] after the hidden states [..., D]."""
        return scored_features(self.chunk_scorer, hidden, logits, tokens)

    def forward(
        self, hidden: Tensor, positions: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Return log-probabilities of the ends of a chunk, float32; column a - 1 keeps a tokens.

        hidden [B, S, D] of the speech positions -> [B, S, K], where each position attends to those
        before it; with the positions [B, M] of decisions -> [B, M, K]. A policy that reads
        candidates needs their `candidate_features` at every decision: [B, M, n, F], or, for N
        candidates, [B, M, N, n, F] -> [B, M, N, K], joint log-probabilities of candidate and end.
        Rows may be padded at the end. Raises ValueError without candidates."""
        scores = self.end_scores(hidden, positions, features)
        several = features is not None and features.dim() == 5
        return log_probs_of_scores(scores, features if several else None).view_as(scores)

    def end_scores(
        self, hidden: Tensor, positions: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Return the scores that `forward` normalises, of the same shape, without the resampling
        weights of the chunk scorer."""
        action_logits = None
        if self.layer is not None:
            x = self.input(self.input_norm(hidden))
            every = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
            action_logits = self.output(self.output_norm(self.layer(x, self.rotary(every), None)))
            if positions is not None:
                action_logits = action_logits.gather(
                    1, positions.unsqueeze(-1).expand(-1, -1, action_logits.shape[-1])
                )
        return self.score(action_logits, features)

    def score(self, action_logits: Tensor | None, features: Tensor | None = None) -> Tensor:
        """Return scores [..., K]: the layer's own action logits [..., K], or those of the
        candidates [..., n, F], of which there may be fewer than K (longer chunks are never
        chosen)."""
        if self.scores is None:
            assert action_logits is not None
            scores = action_logits
        else:
            if features is None:
                raise ValueError(f"a policy with reads={self.config.reads} needs features")
            scores = self.scores(features.to(self.scores.linear.weight.dtype))
            scores = nn.functional.pad(
                scores, (0, self.config.num_actions - scores.shape[-1]), value=NEVER
            )
        return scores.masked_fill(self.unused, NEVER) if self.config.sizes else scores

    def log_probs(
        self, action_logits: Tensor | None, features: Tensor | None = None, dial: float = 0.0
    ) -> Tensor:
        """Return log-probabilities of the next size [B, K], float32, given the action logits of
        the layer; with N candidates [B, N, n, F], of candidate and size together [B, N K]
        (`joint_log_probs`). dial: see `with_dial`."""
        return log_probs_of_scores(
            with_dial(self.score(action_logits, features).float(), dial), features
        )

    def restore_buffers(self) -> None:
        """Recompute the mask [K] of sizes that are never chosen."""
        chosen = self.config.sizes or range(1, self.config.num_actions + 1)
        self.unused = torch.tensor(
            [size not in chosen for size in range(1, self.config.num_actions + 1)]
        )

    def check_base(self, checksum: str) -> None:
        """Raise CheckpointError if the policy was trained for a decoder with another checksum."""
        check_trained_for(self.config.base_checksum, checksum, "policy", "dcar train-policy")


def log_probs_of_scores(scores: Tensor, features: Tensor | None) -> Tensor:
    """Return log-probabilities, float32, of sizes, scores [..., K] -> [..., K], or, with
    candidates [..., N, n, F], of candidate and size together, scores [..., N, K] -> [..., N K]."""
    return scores.float().log_softmax(-1) if features is None else joint_log_probs(scores, features)
