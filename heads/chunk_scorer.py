"""Chunk scorer: the density ratio between a chunk's joint distribution and the product of the
heads' distributions.

The heads draw the tokens of a chunk independently, given the hidden state, so a chunk may not be
plausible speech: a phoneme may be repeated or skipped. For every prefix x_1..x_a of a drawn chunk,

    r_a = log p(x_1..x_a | h) - sum_{j <= a} log q_j(x_j | h)

is the log-ratio of its probability in speech (p) and under the heads (q). A binary classifier that
separates recorded from drawn chunks learns this number as its logit: logistic regression on two
equally frequent classes estimates the ratio of their densities (Sugiyama et al., Density Ratio
Estimation in Machine Learning, 2012; for replaced tokens, ELECTRA, 2020). r_a is a sum over the
tokens, each of which is read with the few before it, so that all tokens of all candidates are
scored side by side. It is not part of the papers on CAR and DCAR."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.candidates import FEATURES, candidate_features
from heads.checkpoint import Checkpoint, check_trained_for


@dataclass
class ChunkScorerConfig:
    """Shape of a `ChunkScorer` and the identity of the decoder that it was trained for."""

    hidden_size: int  # of the decoder
    num_heads: int  # K: it reads chunks of at most K tokens
    vocab_size: int  # ids that heads may draw, the end of speech is the last one
    embedding_size: int = 64
    width: int = 128  # of the layers
    window: int = 2  # tokens that are read together: each one and those before it
    base_checksum: str = ""  # checksum of the decoder; empty = not bound to one
    tokenizer: str = ""  # name of the speech tokenizer


class ChunkScorer(Checkpoint):
    """Log-ratio r_a of every prefix of a chunk: the sum over its tokens of what two layers make of
    each, those before it, its place and the hidden state."""

    config_class, model_type = ChunkScorerConfig, "dcar-chunk-scorer"
    config: ChunkScorerConfig

    def __init__(self, config: ChunkScorerConfig):
        super().__init__()
        self.config, width = config, config.width
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.offset = nn.Parameter(torch.zeros(config.num_heads, width))
        self.tokens = nn.Linear(config.window * (config.embedding_size + len(FEATURES)), width)
        self.state = nn.Linear(config.hidden_size, width)
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

    def forward(self, hidden: Tensor, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the contribution [B, n], in nats, of each token to the log-ratio of its chunk; r_a
        is the sum of the first a.

        hidden: [B, D] before the chunk; tokens: [B, n], n ≤ K; features: [B, n, 3]
        (`candidate_features`). Tokens after the end of speech contribute nothing."""
        n, before = tokens.shape[1], self.config.window - 1
        dtype = self.offset.dtype
        inputs = torch.cat((self.embedding(tokens), features.to(dtype)), -1)
        padded = nn.functional.pad(inputs, (0, 0, before, 0))
        windows = torch.cat([padded[:, i : i + n] for i in range(before + 1)], -1)
        state = self.state(hidden.to(dtype)).unsqueeze(1)
        x = nn.functional.silu(self.tokens(windows) + state + self.offset[:n])
        added = self.output(nn.functional.silu(self.inner(x))).squeeze(-1)
        return added * before_end(tokens, self.config.vocab_size - 1)

    def check_base(self, checksum: str) -> None:
        """Raise CheckpointError if it was trained for a decoder with another checksum."""
        check_trained_for(
            self.config.base_checksum, checksum, "chunk_scorer", "dcar train-chunk-scorer"
        )


def before_end(tokens: Tensor, eos: int) -> Tensor:
    """Return a mask [..., n], 1 or 0, of the tokens [..., n] up to and including the first end
    of speech."""
    ends = (tokens == eos).to(torch.int32)
    return (ends.cumsum(-1) - ends == 0).float()


def scored_features(
    chunk_scorer: ChunkScorer | None, hidden: Tensor, logits: Tensor, tokens: Tensor
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
