"""Language model of CosyVoice-300M, with the interface that `BackboneDecoder` expects of models of
`transformers`.

Text passes through its own encoder (six causal blocks and a linear layer), speech codes through a
table; both, with the symbols between them, are one causal sequence for fourteen Transformer blocks.
Attention uses relative positions only (Dai et al. 2019, arXiv 1901.02860, section 3.3), which suits
a ragged cache: columns need positions, not offsets. Decoding (dcar/decoding/language.py) calls the
parts of the blocks on such a cache.

Written after cosyvoice/llm/llm.py (TransformerLM), cosyvoice/transformer/encoder.py and
attention.py of FunAudioLLM/CosyVoice. The sizes come from the checkpoint. Facts that the weights do
not show come from its cosyvoice.yaml: Swish in the text encoder, ReLU in the language model,
positions attend to themselves and earlier ones (static_chunk_size 1).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MODEL_TYPE = "cosyvoice-lm"


class Distances(NamedTuple):
    """Relative positions for attention: row d of `table` [n, D] is for a key d positions before
    the query."""

    table: Tensor  # [n, D], sine and cosine in turn
    # int64 [B or 1, m, C], distance of key c from query m; 0 where the key comes after it (masked
    # anyway)
    behind: Tensor


def sinusoids(count: int, width: int, device: torch.device) -> Tensor:
    """Return alternating sine and cosine of the distances 0 .. count - 1: [count, width]
    float32."""
    frequency = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000.0) / width))
    angle = torch.arange(count, device=device)[:, None] * frequency
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)


def distances(positions: Tensor, width: int) -> Distances:
    """Return the distances in a sequence whose positions are [B or 1, S], below S."""
    index = (positions[..., None] - positions[:, None]).clamp(0, positions.shape[1] - 1)
    return Distances(sinusoids(positions.shape[1], width, positions.device), index)


class RelativeAttention(nn.Module):
    """Attention with score(i, j) = ((q_i + u) · k_j + (q_i + v) · W r_{i−j}) / √d, where r are
    the sinusoids of a distance."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.linear_q, self.linear_k = nn.Linear(width, width), nn.Linear(width, width)
        self.linear_v, self.linear_out = nn.Linear(width, width), nn.Linear(width, width)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, width // heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, width // heads))

    def forward(self, x: Tensor, relative: Distances, mask: Tensor) -> Tensor:
        """Apply attention to x [B, m, D]. mask: boolean [B or 1, 1, m, m], True = may attend."""
        q, k, v = (part.transpose(1, 2) for part in self.project(x))  # [B, H, m, d]
        bias = self.position_scores(q, relative).masked_fill(~mask, -torch.inf)
        return self.linear_out(self.attend(q, k, v, bias).transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, three times [..., H, d], of x [..., D]."""
        return (
            self.linear_q(x).unflatten(-1, (self.heads, -1)),
            self.linear_k(x).unflatten(-1, (self.heads, -1)),
            self.linear_v(x).unflatten(-1, (self.heads, -1)),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Attend with q [B, H, m, d], k and v [B, H, C, d] and bias [B, H, m, C]: scores of
        positions and, as -inf, the mask."""
        return F.scaled_dot_product_attention(q + self.pos_bias_u[:, None], k, v, attn_mask=bias)

    def position_scores(self, q: Tensor, relative: Distances) -> Tensor:
        """Return the share of positions in the scores of q [B, H, m, d]: [B, H, m, C]."""
        by_distance = self._by_distance(q + self.pos_bias_v[:, None], relative.table.to(q.dtype))
        index = relative.behind[:, None].expand(len(q), self.heads, -1, -1)
        return by_distance.gather(3, index) / math.sqrt(q.shape[-1])

    def _by_distance(self, q: Tensor, table: Tensor) -> Tensor:
        """Return q [B, H, m, d] · W r_n for every row of the table [n, D]: [B, H, m, n]."""
        (batch, heads, m, size), (n, width) = q.shape, table.shape
        # multiplications of the two orders, over D
        few = batch * m * (width + heads * n) < n * (width + batch * m)
        # decoding: the queries go to the table, not it to them
        if few and type(self.linear_pos) is nn.Linear:
            turned = torch.einsum(
                "bhmd,hdw->bhmw", q, self.linear_pos.weight.view(heads, size, width)
            )
            return turned @ table.T
        return torch.einsum("bhmd,nhd->bhmn", q, self.linear_pos(table).view(n, heads, size))


class FeedForward(nn.Module):
    def __init__(self, width: int, ffn_size: int, activation: str):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(width, ffn_size), nn.Linear(ffn_size, width)
        self.activation = {"relu": F.relu, "swish": F.silu}[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.activation(self.w_1(x)))


class Block(nn.Module):
    """Pre-norm attention and feed-forward block: x [B, m, D] -> [B, m, D]."""

    def __init__(self, width: int, heads: int, ffn_size: int, activation: str):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = RelativeAttention(width, heads)
        self.feed_forward = FeedForward(width, ffn_size, activation)

    def forward(self, x: Tensor, relative: Distances, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x), relative, mask)
        return x + self.feed_forward(self.norm2(x))


def blocks(shape: dict[str, Any], activation: str) -> nn.ModuleList:
    """Build the blocks of an encoder or language model, by the names that configurations of
    `transformers` use."""
    return nn.ModuleList(
        Block(
            shape["hidden_size"],
            shape["num_attention_heads"],
            shape["intermediate_size"],
            activation,
        )
        for _ in range(shape["num_hidden_layers"])
    )


class TextEncoder(nn.Module):
    """Encoder of text ids as vectors of the language model's width. It is causal, so padding
    after a text changes nothing before it."""

    def __init__(self, vocab_size: int, shape: dict[str, Any], output_size: int):
        super().__init__()
        width = shape["hidden_size"]
        self.embedding = nn.Embedding(vocab_size, shape["input_size"])
        self.input, self.input_norm = nn.Linear(shape["input_size"], width), nn.LayerNorm(width)
        self.layers, self.norm = blocks(shape, "swish"), nn.LayerNorm(width)
        self.output = nn.Linear(width, output_size)

    @property
    def weight(self) -> Tensor:
        """Embedding table, whose type is that of all vectors."""
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return vectors [..., N, D] of ids [..., N]."""
        x = self.input_norm(self.input(self.embedding(ids.view(-1, ids.shape[-1]))))
        x = x * math.sqrt(x.shape[-1])
        position = torch.arange(x.shape[1], device=x.device)[None]
        relative, mask = distances(position, x.shape[-1]), (position <= position.T)[None, None]
        for layer in self.layers:
            x = layer(x, relative, mask)
        return self.output(self.norm(x)).view(*ids.shape, -1)


class Hidden(NamedTuple):
    last_hidden_state: Tensor  # [B, m, D]


class CosyVoiceLM(nn.Module):
    """Language model without its output layer. `embed_tokens` is the whole text encoder."""

    def __init__(self, architecture: dict[str, Any]):
        super().__init__()
        width = architecture["hidden_size"]
        self.embed_tokens = TextEncoder(
            architecture["vocab_size"], architecture["text_encoder"], width
        )
        self.input, self.input_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.layers, self.norm = blocks(architecture, "relu"), nn.LayerNorm(width)
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self, settings: dict[str, Any]) -> None:
        """Enable checkpointing as models of `transformers` do; settings are passed to
        torch.utils.checkpoint."""
        self.gradient_checkpointing, self._checkpoint_settings = True, settings

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
    ) -> Hidden:
        """Return the hidden states of inputs_embeds [B, m, D] with their positions [B or 1, m]
        and mask [B, 1, m, m]; without the last two, of one plain sequence. use_cache must be
        False: `dcar.decoding.language` decodes with a cache."""
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        if attention_mask is None:
            attention_mask = (position_ids[:, None] <= position_ids[..., None])[:, None]
        x = F.relu(self.input_norm(self.input(inputs_embeds)))
        x = x * math.sqrt(x.shape[-1])
        relative = distances(position_ids, x.shape[-1])
        recompute = self.gradient_checkpointing and self.training
        for layer in self.layers:
            x = (
                checkpoint(layer, x, relative, attention_mask, **self._checkpoint_settings)
                if recompute
                else layer(x, relative, attention_mask)
            )
        return Hidden(self.norm(x))
