"""Pre-norm Transformer layer with rotary positions, and the ragged KV cache.

Both the CAR decoder (dcar/model/car.py) and the chunk policy (heads/policy.py) are stacks of these
layers. The cache follows one protocol: a pass writes the new positions after each row's length, a
change of `lengths` rolls back, and `gather` keeps the accepted path of a tree."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcar.errors import ConfigError


class RotaryTable:
    """Cosine and sine of rotary position embedding (Su et al. 2021) for integer positions in
    [-reach, reach).

    Positions are multiplied by `scale` before the rotation, so that two streams of different rates
    (phonemes and speech tokens) can share one axis. The table is built once per device and only
    read after that."""

    def __init__(
        self, head_dim: int, scale: float = 1.0, reach: int = 8192, base: float = 10_000.0
    ):
        self.head_dim, self.scale, self.reach, self.base = head_dim, scale, reach, base
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position, each [2 * reach, D] float32; row `reach` is position
        0.

        Both halves of a row hold the same D/2 angles; the sine is negated in the first half, so
        that a rotation is x * cos + swapped(x) * sin (see `rotate`).
        """
        if device not in self._tables:
            with torch.inference_mode(False):  # training may read the table that decoding has built
                frequency = self.base ** (
                    -torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
                )
                angle = (
                    torch.arange(-self.reach, self.reach, dtype=torch.float64)[:, None]
                    * self.scale
                    * frequency
                )
                cos, sin = angle.cos().float(), angle.sin().float()
                self._tables[device] = (
                    torch.cat((cos, cos), -1).to(device),
                    torch.cat((-sin, sin), -1).to(device),
                )
        return self._tables[device]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and signed sine, each [B, 1, S, D] float32, of positions [B, S] int64."""
        cos, sin = self.table(positions.device)
        index = positions + self.reach
        return cos[index].unsqueeze(1), sin[index].unsqueeze(1)

    def span(self, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosine and signed sine of positions start .. start + count - 1 of one row, as
        views [1, 1, S, D] without a copy."""
        cos, sin = self.table(device)
        first = start + self.reach
        return cos[None, None, first : first + count], sin[None, None, first : first + count]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last axis of x [..., H, S, D] by angles from a `RotaryTable`:
    (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def at(values: Tensor, index: Tensor) -> Tensor:
    """Take the entry at one index of each row: values [B, m, …], index [B] -> [B, …]."""
    where = index.view(-1, *[1] * (values.dim() - 1)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, where)[:, 0]


class KVCache:
    """Keys and values of every layer for a ragged batch, preallocated.

    Layout: `kv[layer]` is one contiguous tensor [rows × row_columns, 2, H, d]. Row r, column c is
    at index r × row_columns + c, its keys before its values. Layers do not share storage, and a
    write is one `index_put_` on the first axis: a compiler can then do it in place, where it would
    copy a slice of a larger tensor whole.

    Column c of row r holds speech position c - prefix of that row; the first `prefix` columns hold
    its text, padded. `lengths` [B] counts the valid columns after the prefix. Whatever lies past a
    row's length is garbage that the attention mask hides and the next pass overwrites, so rolling
    back is a change of `lengths` alone.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        capacity: int,
        head_dim: int,
        *,
        prefix: int = 0,
        prefix_lengths: Tensor | None = None,
        device=None,
        dtype=torch.float32,
        allocate: Callable[[int, tuple[int, ...]], list[Tensor]] | None = None,
    ):
        """Make an empty cache. allocate: returns the tensors of so many layers, of this shape, from
        shared memory."""
        self.row_columns = prefix + capacity
        shape = batch * self.row_columns, 2, heads, head_dim
        if allocate is None:
            self.kv = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        else:
            self.kv = allocate(layers, shape)
        self.prefix = prefix
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        self.prefix_lengths = zeros if prefix_lengths is None else prefix_lengths
        self.lengths = zeros.clone()
        self.origin = zeros.clone()  # speech position that is numbered 0
        self.dtype = dtype
        self.eager = zeros.device.type == "cpu"  # reading a value is free

    def each(self, change: Callable[[Tensor], Tensor]) -> KVCache:
        """Return the cache with every tensor changed, given with its rows first."""
        out = copy.copy(self)
        out.kv = [change(layer).flatten(0, 1) for layer in self.by_row()]
        out.prefix_lengths = change(self.prefix_lengths)
        out.lengths = change(self.lengths)
        out.origin = change(self.origin)
        return out

    def by_row(self) -> list[Tensor]:
        """Return the same storage as [B, row_columns, 2, H, d] for each layer."""
        return [layer.unflatten(0, (self.batch, self.row_columns)) for layer in self.kv]

    def without_prefix(self) -> KVCache:
        """Return the same storage, empty, with the columns of the text as speech positions."""
        out = copy.copy(self)
        out.prefix = 0
        out.prefix_lengths = torch.zeros_like(self.prefix_lengths)
        return out

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Number of speech positions that a row can hold."""
        return self.row_columns - self.prefix

    @property
    def unpadded(self) -> bool:
        """True if there is a single row without padding, as far as that is known without a read
        from the device."""
        return self.eager and self.batch == 1 and int(self.prefix_lengths) == self.prefix

    def columns(self, longest: int, new: int) -> int:
        """Return the number of columns that attention reads when `new` positions are appended to
        rows of at most `longest`. Raises ValueError past the capacity."""
        if longest + new > self.capacity:
            raise ValueError(
                f"KV cache full: {longest} + {new} positions exceed its capacity of "
                f"{self.capacity}; decode with a larger capacity (SamplingConfig.max_tokens "
                "bounds it)"
            )
        return self.prefix + longest + new

    def mask(self, longest: int, new: int, tree: Tensor | None = None) -> Tensor:
        """Return a boolean mask [B, 1, new, columns(longest, new)]: text, the row's own past, and,
        causally, the new positions.

        `tree` [B or 1, new, new] replaces causality among the new positions (row i may attend to
        column j), for tree attention; it must contain the diagonal."""
        column = torch.arange(self.columns(longest, new), device=self.lengths.device)
        text = column < self.prefix_lengths[:, None]  # [B, total]
        speech = column - self.prefix
        past = (speech >= 0) & (speech < self.lengths[:, None])  # [B, total]
        offset = speech[None] - self.lengths[:, None]  # [B, total] index among the new positions
        if tree is None:
            row = torch.arange(new, device=column.device)
            # [B, new, total]
            fresh = (offset[:, None] >= 0) & (offset[:, None] <= row[None, :, None])
        else:
            inside = (offset >= 0) & (offset < new)
            index = offset.clamp(0, new - 1)[:, None].expand(-1, new, -1)
            fresh = tree.expand(self.batch, -1, -1).gather(2, index) & inside[:, None]
        return ((text | past)[:, None] | fresh)[:, None]

    def gather(self, start: Tensor, path: Tensor) -> None:
        """Keep a tree's path: move positions start + path[b] to start, start + 1, ….

        start [B]: speech position of the first of the new columns; path [B, L]: offsets from start,
        ascending.
        """
        sources = self.index(start[:, None] + path)
        targets = self.index(start[:, None] + torch.arange(path.shape[1], device=path.device))
        for layer in self.kv:
            layer.index_put_((targets,), layer.index_select(0, sources))

    def index(self, positions: Tensor) -> Tensor:
        """Return the indices [B n] into `kv` of speech positions [B, n]; those beyond the capacity
        are taken to be the last one."""
        width = self.row_columns
        first = torch.arange(0, self.batch * width, width, device=positions.device)
        return (first[:, None] + (self.prefix + positions).clamp(max=width - 1)).view(-1)

    def copy_rows(self, rows: Tensor, other: KVCache, sources: Tensor) -> None:
        """Make rows [R] copies of the rows [R] of another cache, whose text and speech fit into
        this one."""
        for mine, theirs in (
            (self.lengths, other.lengths),
            (self.prefix_lengths, other.prefix_lengths),
            (self.origin, other.origin),
        ):
            mine[rows] = theirs[sources]
        text, speech = min(self.prefix, other.prefix), min(self.capacity, other.capacity)
        for into, source in zip(self.by_row(), other.by_row(), strict=True):
            into[rows, :text] = source[:, :text][sources]
            new = source[:, other.prefix : other.prefix + speech]
            into[rows, self.prefix : self.prefix + speech] = new[sources]


def check_width(hidden_size: int, num_attention_heads: int) -> None:
    """Raise ConfigError if layers of this width cannot have this number of attention heads."""
    each, rest = divmod(hidden_size, max(1, num_attention_heads))
    if num_attention_heads < 1 or each < 1 or each % 2 or rest:
        raise ConfigError(
            f"hidden_size {hidden_size} must be num_attention_heads {num_attention_heads} times an "
            "even number, because rotary positions rotate pairs of dimensions"
        )


class TransformerLayer(nn.Module):
    """Pre-norm attention and feed-forward layer with rotary positions: x [B, S, D] -> [B, S, D]."""

    def __init__(self, hidden_size: int, num_heads: int, ffn_size: int, dropout: float = 0.0):
        super().__init__()
        check_width(hidden_size, num_heads)
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.ffn_norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, ffn_size)
        self.down = nn.Linear(ffn_size, hidden_size)
        self.dropout = dropout

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values before their rotation: [3, B, H, S, d]."""
        qkv = self.qkv(self.attention_norm(x)).view(*x.shape[:2], 3, self.num_heads, -1)
        return qkv.permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Apply the layer. mask: boolean, broadcast to [B, H, S, S], True = may attend; None:
        causal."""
        batch, length, width = x.shape
        qkv = self.project(x)
        v = qkv[2]
        # the compiler of torch 2.13 wants the strides of one batch in all of them
        if torch.compiler.is_compiling():
            q, k = rotate(qkv[0], *rotary), rotate(qkv[1], *rotary)
        else:
            q, k = rotate(qkv[:2], *rotary)  # in one go
        # no dropout on the attention weights: it would forbid the fused kernels and double the time
        # of a training step
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        drop = self.dropout if self.training else 0.0
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), drop)
        y = self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))
        return x + F.dropout(y, drop)
