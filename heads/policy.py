"""Chunk policies of DCAR: decide how many of the heads' tokens to keep.

`HiddenPolicy` is the paper's (§4.2 and App. C.2) and decides before tokens are drawn.
`CandidatePolicy`, which is not in the paper, decides after the draw (heads/candidates.py). Their
`log_probs` is the decision itself, in training, in the decoding step and in exported programs;
`forward` returns it at all decisions of utterances, as training needs it.
`ChunkPolicy.from_pretrained` loads either."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self, cast

import torch
from torch import Tensor, nn

from dcar.errors import CheckpointError
from heads.candidates import FEATURES, EndScores, joint_log_probs, with_dial
from heads.checkpoint import CONFIG, Checkpoint, CheckpointConfig, check_trained_for, read_config
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig, scored_features
from heads.layers import RotaryTable, TransformerLayer

NEVER = -1e9
"""Score of a forbidden size: its probability is 0, and the score is finite, so that sums over
distributions are finite too."""


@dataclass
class ChunkPolicyConfig(CheckpointConfig):
    """Actions of a policy and the identity of the decoder that it was trained for."""

    hidden_size: int  # of the decoder
    num_actions: int  # K: keep 1..K tokens
    sizes: tuple[int, ...] = ()  # chunk sizes that it chooses among; empty = all of 1..K
    chunk_range: tuple[int, ...] = ()  # guidance range of the training run
    base_checksum: str = ""  # checksum of the decoder; empty = not bound to one
    tokenizer: str = ""  # name of the speech tokenizer

    def __post_init__(self) -> None:
        listed = (*self.chunk_range, *self.sizes)
        if wrong := [str(size) for size in listed if not 1 <= size <= self.num_actions]:
            raise CheckpointError(
                f"policy: {self.num_actions} actions cannot keep {', '.join(wrong)} tokens"
            )


class ChunkPolicy(Checkpoint):
    """Base of the two policies: a distribution over chunk sizes 1..K; column a - 1 keeps a
    tokens."""

    config: ChunkPolicyConfig
    after_draw: ClassVar[bool]
    """True if the policy reads drawn candidates."""
    forbidden_sizes: Tensor  # bool [K], True for the sizes that are never chosen

    def __init__(self, config: ChunkPolicyConfig):
        super().__init__()
        self.config = config
        self.chunk_scorer: ChunkScorer | None = None
        self.register_buffer("forbidden_sizes", None, persistent=False)
        ChunkPolicy.restore_buffers(self)

    def restore_buffers(self) -> None:
        every = range(1, self.config.num_actions + 1)
        allowed = self.config.sizes or every
        self.forbidden_sizes = torch.tensor([size not in allowed for size in every])

    @classmethod
    def from_pretrained(cls, directory: str | Path, device: str | torch.device = "cpu") -> Self:
        """Load a policy in eval mode; `ChunkPolicy` loads the kind that config.json names. Raises
        CheckpointError for another model or a damaged one."""
        if cls is not ChunkPolicy:
            return super().from_pretrained(directory, device)
        kind = read_config(directory).get("model_type")
        for policy in (HiddenPolicy, CandidatePolicy):
            if policy.model_type == kind:
                return cast(Self, policy.from_pretrained(directory, device))
        raise CheckpointError(
            f"{Path(directory) / CONFIG}: a '{kind}' checkpoint, not a policy; give a folder that "
            "`dcar train-policy` or `dcar export` wrote"
        )

    def check_base(self, checksum: str) -> None:
        """Raise CheckpointError if the policy was trained for a decoder with another checksum."""
        check_trained_for(self.config.base_checksum, checksum, "policy", "dcar train-policy")


@dataclass
class HiddenPolicyConfig(ChunkPolicyConfig):
    """Shape of a `HiddenPolicy`."""

    width: int | None = 256  # of the policy's layer; None = hidden_size, the paper's
    num_attention_heads: int = 8

    @property
    def layer_width(self) -> int:
        return self.hidden_size if self.width is None else self.width


class HiddenPolicy(ChunkPolicy):
    """Policy pi(a | h_1..h_t), before the draw: one causal Transformer layer over the hidden
    states of the speech positions, and a linear layer over the actions.

    The paper's layer is as wide as the decoder (`width=None`); a bottleneck (for example 256) reads
    the same states through a projection at little cost. An untrained policy is uniform."""

    config_class = HiddenPolicyConfig
    model_type = "dcar-hidden-policy"
    config: HiddenPolicyConfig
    after_draw = False

    def __init__(self, config: HiddenPolicyConfig):
        super().__init__(config)
        width, heads = config.layer_width, config.num_attention_heads
        self.input_norm = nn.LayerNorm(config.hidden_size)
        self.input = nn.Identity() if config.width is None else nn.Linear(config.hidden_size, width)
        self.layer = TransformerLayer(width, heads, 4 * width)
        self.output_norm = nn.LayerNorm(width)
        self.rotary = RotaryTable(width // heads)
        self.output = nn.Linear(width, config.num_actions)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return log-probabilities [B, M, K] at the decision positions [B, M] (None: at all), given
        hidden states [B, S, D] of the speech positions (prompt first), padded at the end."""
        x = self.input(self.input_norm(hidden))
        every = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        x = self.layer(x, self.rotary(every), None)
        if positions is not None:
            x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.log_probs(self.output(self.output_norm(x)))

    def log_probs(self, action_logits: Tensor, dial: float = 0.0) -> Tensor:
        """Return log-probabilities [..., K], float32, of the sizes, given the action logits [...,
        K] of the layer. dial: see `with_dial`."""
        scores = action_logits.float()
        if self.config.sizes:
            scores = scores.masked_fill(self.forbidden_sizes, NEVER)
        return with_dial(scores, dial).log_softmax(-1)


@dataclass
class CandidatePolicyConfig(ChunkPolicyConfig):
    """Shape of a `CandidatePolicy`."""

    chunk_scorer: ChunkScorerConfig | None = None  # of the one that it holds

    def __post_init__(self) -> None:
        if isinstance(self.chunk_scorer, dict):  # as config.json has it
            self.chunk_scorer = ChunkScorerConfig(**self.chunk_scorer)
        super().__post_init__()

    @property
    def reach(self) -> int:
        """Number n of tokens of a candidate: the longest chunk that the policy can choose."""
        return max(self.sizes, default=self.num_actions)

    @property
    def num_features(self) -> int:
        """Number of features that the policy reads of each token of a candidate."""
        return len(FEATURES) + (self.chunk_scorer is not None)


class CandidatePolicy(ChunkPolicy):
    """Policy pi(i, a | candidates), after the draw: chooses a candidate i of N and its size a,
    given the features of the n tokens of each.

    It may hold a chunk scorer (heads/chunk_scorer.py), trained before the policy, that scores how
    well the tokens of a candidate fit together; more than one candidate needs it. An untrained
    policy is uniform over the sizes."""

    config_class = CandidatePolicyConfig
    model_type = "dcar-candidate-policy"
    config: CandidatePolicyConfig
    after_draw = True

    def __init__(self, config: CandidatePolicyConfig):
        super().__init__(config)
        self.scores = EndScores(config.num_features, config.reach, config.num_actions)
        if config.chunk_scorer is not None:
            self.chunk_scorer = ChunkScorer(config.chunk_scorer)
            self.chunk_scorer.requires_grad_(False)  # it learns from recordings, not from rewards

    def restore_buffers(self) -> None:
        super().restore_buffers()
        self.scores.restore_buffers()

    def candidate_features(self, hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the policy's features [..., N, n, F] of the candidates [..., N, n] drawn from
        logits [..., n, V] after the hidden states [..., D]."""
        return scored_features(self.chunk_scorer, hidden, logits, tokens)

    def forward(self, features: Tensor) -> Tensor:
        """Return log-probabilities [B, M, N K] at M decisions, given the features [B, M, N, n, F]
        of their candidates."""
        return self.log_probs(features)

    def log_probs(self, features: Tensor, dial: float = 0.0) -> Tensor:
        """Return log-probabilities [..., N K], float32, of candidate and size together
        (`joint_log_probs`), given the features [..., N, n, F]. dial: see `with_dial`."""
        # products in float64, because a GPU may compute others in TF32, and autocast in bfloat16
        weight, bias = (part.double() for part in self.end_scores())
        scores = nn.functional.linear(features.flatten(-2).double(), weight, bias)
        return joint_log_probs(with_dial(scores, dial), features)

    def end_scores(self) -> tuple[Tensor, Tensor]:
        """Return weight [K, n F] and bias [K] of the ends' scores as an affine function of the
        features [n F] of a candidate; forbidden sizes have the score NEVER."""
        weight, bias = self.scores()
        return weight, bias.masked_fill(self.forbidden_sizes, NEVER)
