"""Chunk scorer: the density ratio between a chunk's joint distribution and the product of the
heads' distributions.

The heads draw the tokens of a chunk independently, given the hidden state, so a chunk may not be
plausible speech: a phoneme may be repeated or skipped. For every prefix x_1..x_a of a drawn chunk,

    r_a = log p(x_1..x_a | h) - sum_{j <= a} log q_j(x_j | h)

is the log-ratio of its probability in speech (p) and under the heads (q). A binary classifier that
separates recorded from drawn chunks learns this number as its logit: logistic regression on two
equally frequent classes estimates the ratio of their densities (Sugiyama et al., Density Ratio
Estimation in Machine Learning, 2012; for replaced tokens, ELECTRA, 2020). It reads embeddings of
the drawn tokens, which the heads do not, and costs a recurrent layer over at most K tokens, while
verification by the decoder costs a pass. It is not part of the papers on CAR and DCAR."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcar.errors import CheckpointError
from heads.candidates import FEATURES, candidate_features
from heads.checkpoint import Checkpoint, check_trained_for


@dataclass
class ChunkScorerConfig:
    """Shape of a `ChunkScorer` and the identity of the decoder that it was trained for."""

    hidden_size: int  # of the decoder
    num_heads: int  # K: it reads chunks of at most K tokens
    vocab_size: int  # ids that heads may draw, the end of speech is the last one
    embedding_size: int = 64
    width: int = 128  # of the recurrent layer
    base_checksum: str = ""  # checksum of the decoder; empty = not bound to one
    tokenizer: str = ""  # name of the speech tokenizer

    def __post_init__(self) -> None:
        sizes = {
            name: getattr(self, name)
            for name in ("hidden_size", "num_heads", "vocab_size", "embedding_size", "width")
        }
        if wrong := [f"{name} {size}" for name, size in sizes.items() if size < 1]:
            raise CheckpointError(f"chunk scorer with {', '.join(wrong)}: must be at least 1")


@contextmanager
def ieee_products(device: torch.device) -> Iterator[None]:
    """Compute float32 products and recurrent layers on a GPU in full precision, whatever the
    process is set to.

    cuDNN's recurrent layers use TF32 by default, and commands that decode enable it for products.
    That moves the scores by 5e-4 nats (measured), and they decide where chunks end; for so small a
    network, full precision costs nothing. The settings are restored at the end.
    `torch.backends.cudnn.flags` is not used, because PyTorch refuses it if recurrent layers and
    convolutions differ, and other libraries set them."""
    if device.type != "cuda":
        yield
        return
    settings: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


class ChunkScorer(Checkpoint):
    """Log-ratio r_a of every prefix of a chunk: a GRU over its tokens that starts from the
    hidden state."""

    config_class, model_type = ChunkScorerConfig, "dcar-chunk-scorer"
    config: ChunkScorerConfig

    def __init__(self, config: ChunkScorerConfig):
        super().__init__()
        self.config, width = config, config.width
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.offset = nn.Parameter(torch.zeros(config.num_heads, width))
        self.token = nn.Linear(config.embedding_size + len(FEATURES), width)
        self.state = nn.Linear(config.hidden_size, width)
        self.start = nn.Linear(config.hidden_size, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.inner, self.output = nn.Linear(width, width), nn.Linear(width, 1)

    @torch.no_grad()
    def start_embedding(self, embedding: Tensor) -> None:
        """Initialise with the principal components of the decoder's token embeddings [≥ V, D],
        with standard deviation 1."""
        rows = embedding[: self.config.vocab_size].float()
        left, scales, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
        size = min(self.config.embedding_size, left.shape[1])
        main = left[:, :size] * scales[:size]
        self.embedding.weight[:, :size] = main / main.std()

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        features: Tensor,
        recurrent: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return the contribution [B, n], in nats, of each token to the log-ratio of its chunk; r_a
        is the sum of the first a.

        hidden: [B, D] before the chunk; tokens: [B, n], n ≤ K; features: [B, n, 3]
        (`candidate_features`). Tokens after the end of speech contribute nothing. recurrent: the
        weights of the recurrent layer, for `torch.compile`, which does not support such layers."""
        n = tokens.shape[1]
        inputs = torch.cat((self.embedding(tokens), features.to(self.offset.dtype)), -1)
        hidden = hidden.to(self.offset.dtype)
        weights = recurrent if torch.compiler.is_compiling() else None
        # compiled: as the process is set to
        with ieee_products(hidden.device) if weights is None else nullcontext():
            x = nn.functional.silu(
                self.token(inputs) + self.state(hidden).unsqueeze(1) + self.offset[:n]
            )
            start = torch.tanh(self.start(hidden))
            y = (
                self.layer(x, start.unsqueeze(0))[0]
                if weights is None
                else unrolled(weights, x, start)
            )
            added = self.output(nn.functional.silu(self.inner(y))).squeeze(-1)
        return added * before_end(tokens, self.config.vocab_size - 1)

    def check_base(self, checksum: str) -> None:
        """Raise CheckpointError if it was trained for a decoder with another checksum."""
        check_trained_for(
            self.config.base_checksum, checksum, "chunk_scorer", "dcar train-chunk-scorer"
        )


def unrolled(weights: Sequence[Tensor], x: Tensor, state: Tensor) -> Tensor:
    """Compute a one-layer GRU with these weights (`all_weights`) in plain operators: x [B, n,
    width], state [B, width] -> [B, n, width]."""
    of_input, of_state, input_bias, state_bias = weights
    states = []
    for given in nn.functional.linear(x, of_input, input_bias).unbind(1):
        reset, update, new = given.chunk(3, -1)
        of_reset, of_update, of_new = nn.functional.linear(state, of_state, state_bias).chunk(3, -1)
        gate = torch.sigmoid(update + of_update)
        state = torch.lerp(torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new), state, gate)
        states.append(state)
    return torch.stack(states, 1)


def before_end(tokens: Tensor, eos: int) -> Tensor:
    """Return a mask [..., n], 1 or 0, of the tokens [..., n] up to and including the first end
    of speech."""
    ends = (tokens == eos).to(torch.int32)
    return (ends.cumsum(-1) - ends == 0).float()


LogRatios = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`ChunkScorer.forward`, or a function that computes the same."""


def scored_features(
    chunk_scorer: LogRatios | None, hidden: Tensor, logits: Tensor, tokens: Tensor
) -> Tensor:
    """Return the features [..., n, F], float32, of the tokens [..., n] drawn from logits [...,
    n, V]: those of `candidate_features` and, with a chunk scorer, the contribution of each
    token, given hidden [..., D]; F is 3 or 4. With N candidates, tokens [..., N, n], they are
    [..., N, n, F]."""
    features = candidate_features(logits, tokens)
    if chunk_scorer is None:
        return features
    chunks = tokens.reshape(-1, tokens.shape[-1])
    if tokens.dim() == logits.dim():
        hidden = hidden.unsqueeze(-2).expand(*tokens.shape[:-1], -1)
    added = chunk_scorer(
        hidden.reshape(-1, hidden.shape[-1]), chunks, features.reshape(*chunks.shape, len(FEATURES))
    )
    return torch.cat((features, added.view(*tokens.shape, 1).float()), -1)
