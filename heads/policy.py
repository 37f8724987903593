"""The chunk policy of DCAR: how many of the heads' tokens to keep, read from the decoder's hidden states.

Paper §4.2 and App. C.2: one causal Transformer layer over the hidden states of the speech positions, then a linear
layer over the actions 1..K. The paper's layer is as wide as the decoder (`width=None`); a bottleneck (for example
256) reads the same states through a projection and costs almost nothing (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcar.errors import CheckpointError
from heads.checkpoint import Checkpoint
from heads.layers import KVCache, RotaryTable, TransformerLayer, last_of


@dataclass
class ChunkPolicyConfig:
    """Shape of a policy and the identity of the base model that it was trained for."""

    hidden_size: int  # of the decoder
    num_actions: int  # K: keep 1..K tokens
    width: int | None = 256  # of the policy's layer; None = hidden_size, the paper's
    num_attention_heads: int = 8
    ffn_size: int | None = None  # None = 4 * width
    chunk_range: tuple[int, ...] = ()  # guidance range of the training run
    base_checksum: str = ""  # checksum of the decoder; empty = not bound to one
    tokenizer: str = ""  # name of the speech tokenizer

    def __post_init__(self) -> None:
        sizes = {"hidden_size": self.hidden_size, "num_actions": self.num_actions, "width": self.layer_width,
                 "num_attention_heads": self.num_attention_heads, "ffn_size": self.ffn_size or 1}
        if wrong := [f"{name} {size}" for name, size in sizes.items() if size < 1]:
            raise CheckpointError(f"a policy of {', '.join(wrong)}: must be at least 1")
        if self.layer_width % self.num_attention_heads or self.layer_width // self.num_attention_heads % 2:
            raise CheckpointError(f"a policy's width {self.layer_width} must be num_attention_heads "
                                  f"{self.num_attention_heads} times an even number")
        if wrong := [str(size) for size in self.chunk_range if not 1 <= size <= self.num_actions]:
            raise CheckpointError(f"a policy of {self.num_actions} actions cannot keep {', '.join(wrong)} tokens")

    @property
    def layer_width(self) -> int:
        return self.hidden_size if self.width is None else self.width


class ChunkPolicy(Checkpoint):
    """pi(a | h_1..h_t): logits over chunk sizes 1..K at every speech position; action a is column a - 1."""

    config_class = ChunkPolicyConfig
    model_type = "dcar-chunk-policy"

    def __init__(self, config: ChunkPolicyConfig):
        super().__init__()
        self.config = config
        width = config.layer_width
        self.input_norm = nn.LayerNorm(config.hidden_size)
        self.input = nn.Identity() if config.width is None else nn.Linear(config.hidden_size, width)
        self.layer = TransformerLayer(width, config.num_attention_heads, config.ffn_size or 4 * width)
        self.output_norm = nn.LayerNorm(width)
        self.rotary = RotaryTable(width // config.num_attention_heads)
        self.output = nn.Linear(width, config.num_actions)
        # Zero output: the untrained policy is uniform over the actions (entropy ln K).
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """All positions at once, causally: hidden [B, S, D] -> logits [B, S, K]. Padding may stand at the end."""
        x = self.input(self.input_norm(hidden))
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        x = self.layer(x, self.rotary(positions), None)
        return self.output(self.output_norm(x))

    def new_cache(self, batch: int, capacity: int, *, device=None, dtype=torch.float32) -> KVCache:
        heads = self.config.num_attention_heads
        return KVCache(1, batch, heads, capacity, self.rotary.head_dim, device=device, dtype=dtype)

    @torch.no_grad()
    def extend(self, cache: KVCache, hidden: Tensor, counts: Tensor) -> Tensor:
        """Read the next counts[b] hidden states of each row, hidden [B, m, D] -> logits [B, m, K].

        The incremental twin of `forward`: the same logits, position by position.
        """
        new = hidden.shape[1]
        x = self.input(self.input_norm(hidden))
        if cache.single:
            rotary = self.rotary.span(int(cache.lengths), new, x.device)
        else:
            rotary = self.rotary(cache.lengths[:, None] + torch.arange(new, device=x.device))
        x = self.layer(x, rotary, cache.mask(new), cache)
        cache.advance(counts, new)
        return self.output(self.output_norm(x))

    def check_base(self, checksum: str) -> None:
        """CheckpointError if the policy was trained for a decoder with another checksum."""
        bound = self.config.base_checksum
        if bound and bound != checksum:
            raise CheckpointError(
                f"this policy was trained for the decoder {bound[:12]}…, not for {checksum[:12]}…: load its own "
                "decoder, or train a policy for this one with `dcar train-policy`"
            )


class PolicyReader:
    """A policy that follows a batch of utterances as they are spoken: hidden states in, law of the next size out."""

    def __init__(self, policy: ChunkPolicy, hidden: Tensor, capacity: int):
        """hidden [B, …]: whose rows, device and dtype are used; capacity: most positions of a row, padding included."""
        self.policy = policy
        self.cache = policy.new_cache(len(hidden), capacity, device=hidden.device, dtype=hidden.dtype)

    def read(self, hidden: Tensor, counts: Tensor) -> Tensor:
        """hidden [B, m, D], of which counts [B] are new -> log-law [B, K] of the next size."""
        logits = self.policy.extend(self.cache, hidden, counts)
        return last_of(logits, counts).float().log_softmax(-1)

    def select(self, rows: Tensor) -> None:
        """Only these rows go on."""
        self.cache = self.cache.select(rows)
