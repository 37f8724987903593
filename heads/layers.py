"""Pre-norm Transformer layer with rotary positions, and the ragged KV cache.

Both the CAR decoder (dcar/model/car.py) and the chunk policy (heads/policy.py) are stacks of these layers. The cache
follows one protocol: `extend` writes the new rows behind each sequence's length, `truncate` moves lengths back
(O(1), nothing is copied), `gather` keeps the accepted path of a tree, `select` keeps or repeats whole sequences.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RotaryTable:
    """Cosine and sine of rotary position embedding (Su et al. 2021) for whole positions in [-reach, reach).

    Positions are multiplied by `scale` before the rotation, so that two streams of different rates (phonemes and
    speech tokens) can share one axis. The table is built once per device and only read after that.
    """

    def __init__(self, head_dim: int, scale: float = 1.0, reach: int = 8192, base: float = 10_000.0):
        self.head_dim, self.scale, self.reach, self.base = head_dim, scale, reach, base
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position, each [2 * reach, D] float32; row `reach` is position 0.

        Both halves of a row hold the same D/2 angles; the sine is negated in the first half, so that a rotation is
        x * cos + swapped(x) * sin (see `rotate`).
        """
        if device not in self._tables:
            with torch.inference_mode(False):  # training may read the table that decoding has built
                frequency = self.base ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
                angle = torch.arange(-self.reach, self.reach, dtype=torch.float64)[:, None] * self.scale * frequency
                cos, sin = angle.cos().float(), angle.sin().float()
                self._tables[device] = (torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device))
        return self._tables[device]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, S] int64 -> cosine and signed sine, each [B, 1, S, D] float32."""
        cos, sin = self.table(positions.device)
        index = positions + self.reach
        return cos[index].unsqueeze(1), sin[index].unsqueeze(1)

    def span(self, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same for positions start .. start + count - 1 of one row: views [1, 1, S, D], nothing is copied."""
        cos, sin = self.table(device)
        first = start + self.reach
        return cos[None, None, first : first + count], sin[None, None, first : first + count]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last axis of x [..., H, S, D] by angles from a `RotaryTable`: (a, b) becomes
    (a cos - b sin, b cos + a sin)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class KVCache:
    """Keys and values of every layer for a ragged batch, in one preallocated tensor [layers, B, columns, 2, H, D].

    Column c of row b holds speech position c - prefix of that row; the first `prefix` columns hold its text, padded.
    `lengths` [B] counts the valid columns behind the prefix. Whatever lies past a row's length is garbage that the
    attention mask hides and the next `extend` overwrites, so rolling back is a change of `lengths` alone.
    """

    def __init__(self, layers: int, batch: int, heads: int, capacity: int, head_dim: int, *, prefix: int = 0,
                 prefix_lengths: Tensor | None = None, device=None, dtype=torch.float32):
        self.kv = torch.zeros(layers, batch, prefix + capacity, 2, heads, head_dim, device=device, dtype=dtype)
        self.prefix = prefix
        self.prefix_lengths = (
            torch.zeros(batch, dtype=torch.long, device=device) if prefix_lengths is None else prefix_lengths
        )
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.origin = torch.zeros(batch, dtype=torch.long, device=device)  # speech position that is numbered 0
        self.longest = 0  # upper bound of max(lengths), kept on the host so that no step waits for the device
        self._columns: tuple[Tensor, int, Tensor] | None = None  # (lengths, new, index) of the last scatter

    def over(self, kv: Tensor, prefix: int | None = None) -> KVCache:
        """The same rows and lengths with other storage, [layers, B, columns, 2, H, D]; no keys or values are copied."""
        out = copy.copy(self)
        out.kv, out.prefix, out._columns = kv, self.prefix if prefix is None else prefix, None
        return out

    @property
    def batch(self) -> int:
        return self.kv.shape[1]

    @property
    def on_host(self) -> bool:
        """In host memory, where reading lengths is free."""
        return self.kv.device.type == "cpu"

    @property
    def single(self) -> bool:
        """One row in host memory: slices take the place of index tensors."""
        return self.kv.shape[1] == 1 and self.on_host

    @property
    def capacity(self) -> int:
        """Speech positions that a row can hold."""
        return self.kv.shape[2] - self.prefix

    def columns(self, new: int) -> int:
        """Columns that attention reads when `new` positions are appended; ValueError past the capacity."""
        if self.longest + new > self.capacity:
            self.tighten()  # rows of unequal chunks are shorter than the bound
        if self.longest + new > self.capacity:
            raise ValueError(
                f"KV cache full: {self.longest} + {new} positions exceed its capacity of {self.capacity}; "
                "decode with a larger capacity (SamplingConfig.max_tokens bounds it)"
            )
        return self.prefix + self.longest + new

    def mask(self, new: int, tree: Tensor | None = None) -> Tensor | None:
        """Boolean mask [B, 1, new, columns]: text, the row's own past, and causally the new positions; None = all.

        `tree` [B or 1, new, new] replaces causality among the new positions (row i may see column j), for tree
        attention; it must contain the diagonal.
        """
        total = self.columns(new)
        if tree is None and self.single and int(self.prefix_lengths) == self.prefix:  # no padding: the plain cases
            return None if new == 1 else torch.ones(new, total, dtype=torch.bool).tril(total - new)[None, None]
        column = torch.arange(total, device=self.lengths.device)
        text = column < self.prefix_lengths[:, None]  # [B, total]
        speech = column - self.prefix
        past = (speech >= 0) & (speech < self.lengths[:, None])  # [B, total]
        offset = speech[None] - self.lengths[:, None]  # [B, total] index among the new positions
        if tree is None:
            row = torch.arange(new, device=column.device)
            fresh = (offset[:, None] >= 0) & (offset[:, None] <= row[None, :, None])  # [B, new, total]
        else:
            inside = (offset >= 0) & (offset < new)
            index = offset.clamp(0, new - 1)[:, None].expand(-1, new, -1)
            fresh = tree.expand(self.batch, -1, -1).gather(2, index) & inside[:, None]
        return ((text | past)[:, None] | fresh)[:, None]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, new, D] behind each row's length; return all columns so far [B, H, C, D]."""
        new = keys.shape[2]
        total = self.columns(new)
        k, v = self.kv[layer, :, :, 0].transpose(1, 2), self.kv[layer, :, :, 1].transpose(1, 2)  # [B, H, columns, D]
        if self.single:  # a slice is cheaper than a scatter
            start = self.prefix + int(self.lengths)
            k.narrow(2, start, new).copy_(keys)
            v.narrow(2, start, new).copy_(values)
        else:
            if self._columns is None or self._columns[0] is not self.lengths or self._columns[1] != new:
                index = self.prefix + self.lengths[:, None] + torch.arange(new, device=keys.device)  # [B, new]
                self._columns = self.lengths, new, index  # the same for every layer of a pass
            index = self._columns[2][:, None, :, None].expand_as(keys)
            k.scatter_(2, index, keys.to(k.dtype))
            v.scatter_(2, index, values.to(v.dtype))
        return k.narrow(2, 0, total), v.narrow(2, 0, total)

    def advance(self, counts: Tensor, new: int) -> None:
        """Keep the first counts[b] of the `new` positions just written."""
        self.lengths = self.lengths + counts
        if self.on_host:
            self.tighten()
        else:  # an upper bound; `columns` tightens it where it exceeds the capacity
            self.longest = min(self.longest + new, self.capacity)

    def truncate(self, lengths: Tensor) -> None:
        """Drop everything beyond `lengths` [B] speech positions; O(1)."""
        if bool((lengths > self.lengths).any()):
            raise ValueError("truncate cannot lengthen a row of the cache")
        self.lengths = lengths.clone()
        self.tighten()

    def tighten(self) -> None:
        """Recompute the bound on the longest row (waits for the device)."""
        self.longest = int(self.lengths.max()) if self.batch else 0

    def gather(self, start: Tensor, path: Tensor, counts: Tensor) -> None:
        """Keep a tree's accepted path: move positions start + path[b, :counts[b]] to start, start + 1, ….

        start [B]: speech position of the first of the new columns; path [B, L]: offsets from start, ascending.
        """
        row = torch.arange(self.batch, device=path.device)[:, None]
        kept = self.kv[:, row, self.prefix + start[:, None] + path]  # [layers, B, L, 2, H, D]
        target = self.prefix + start[:, None] + torch.arange(path.shape[1], device=path.device)
        self.kv[:, row, target.clamp(max=self.kv.shape[2] - 1)] = kept
        self.lengths = start + counts
        self.tighten()

    def copy_rows(self, rows: Tensor, other: KVCache, sources: Tensor) -> None:
        """Rows [R] become copies of the rows [R] of another cache, whose text is no wider than this one's."""
        text, speech = other.prefix, other.prefix + other.longest
        self.kv[:, rows, :text] = other.kv[:, sources, :text]
        self.kv[:, rows, self.prefix : self.prefix + other.longest] = other.kv[:, sources, text:speech]

    def take(self, rows: Tensor) -> Tensor:
        """Storage with these rows [R] in this order. In host memory ascending rows are moved in place, as this cache is
        not used any more: a copy of mostly empty columns took a third of a rollout's time."""
        used = self.prefix + self.longest
        if self.on_host and bool((rows.diff() > 0).all()):
            for to, row in enumerate(rows.tolist()):
                if to != row:
                    self.kv[:, to, :used] = self.kv[:, row, :used]
            return self.kv[:, : len(rows)]
        layers, _, *shape = self.kv.shape
        out = self.kv.new_zeros(layers, len(rows), *shape)
        out[:, :, :used] = self.kv[:, :, :used].index_select(1, rows)
        return out

    def select(self, rows: Tensor, repeats: int = 1) -> KVCache:
        """A new cache of the given rows [R], each `repeats` times: a group shares the prefill of its utterance."""
        rows = rows.repeat_interleave(repeats)
        out = self.over(self.take(rows))
        out.prefix_lengths = self.prefix_lengths[rows]
        out.lengths = self.lengths[rows]
        out.origin = self.origin[rows]
        if out.on_host:
            out.tighten()  # `mask` relies on it for a batch of one
        return out


class TransformerLayer(nn.Module):
    """Pre-norm attention and feed-forward with rotary positions. x [B, S, D] -> [B, S, D]."""

    def __init__(self, hidden_size: int, num_heads: int, ffn_size: int, dropout: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.ffn_norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, ffn_size)
        self.down = nn.Linear(ffn_size, hidden_size)
        self.dropout = dropout

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None = None,
                layer: int = 0) -> Tensor:
        """mask: boolean, broadcast to [B, H, S, columns], True = may attend. None: without a cache causal over x, with
        one every column so far."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        (q, k), v = rotate(qkv[:2], *rotary), qkv[2]  # queries and keys in one go
        if cache is not None:
            k, v = cache.write(layer, k, v)
        # no dropout on the attention weights: it would forbid the fused kernels and double the time of a training step
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and cache is None)
        drop = self.dropout if self.training else 0.0
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), drop)
        y = self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))
        return x + F.dropout(y, drop)


def last_of(hidden: Tensor, counts: Tensor) -> Tensor:
    """Each row's last real entry: hidden [B, m, …], counts [B] -> [B, …] at index counts - 1."""
    if hidden.shape[1] == 1:
        return hidden[:, 0]
    if hidden.shape[0] == 1 and hidden.device.type == "cpu":
        return hidden[:, int(counts) - 1]
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), counts - 1]
