"""What a pass writes and sees of a ragged cache, and the angles of its positions, however it is read.

`Columns` says it flat, N = rows × new positions, so that a stack of layers can go through it layer by layer or in one
call of C, whether the rows are those of the decoding loop, of the static engine, or of a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.layers import KVCache, RotaryTable

STEP = 512
"""Tables of angles and masks grow by so many positions, so that they are made anew seldom."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True = may attend) as what is added to the scores: made once, not by every layer's attention."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


class Rotation:
    """Rotary angles of queries and keys, with the identity for values, so that all three are turned in one go."""

    def __init__(self, table: RotaryTable, device: torch.device, dtype: torch.dtype):
        self.first, self.last = 0, -1  # positions that there are angles for
        self._table, self._device, self._dtype = table, device, dtype

    def reach(self, first: int, last: int) -> bool:
        """Have angles for positions first..last, which may be negative (a prompt before BOS); whether they had to be
        made, at other addresses. ValueError for positions that the rotary table does not know."""
        if self.first <= first and last <= self.last:
            return False
        most = self._table.reach
        if not -most <= first <= last < most:
            raise ValueError(f"positions {first} to {last} exceed the {most} of the rotary table")
        self.first = max(min(-round_up(-first, STEP), self.first), -most)
        self.last = min(max(round_up(last + 1, STEP) - 1, self.last), most - 1)
        cos, sin = self._table.span(self.first, self.last - self.first + 1, self._device)
        ones, zeros = torch.ones_like(cos[0, 0]), torch.zeros_like(cos[0, 0])
        self.cos = torch.stack((cos[0, 0], cos[0, 0], ones), 1)[:, :, None].to(self._dtype)  # [P, 3, 1, D/H]
        self.sin = torch.stack((sin[0, 0], sin[0, 0], zeros), 1)[:, :, None].to(self._dtype)
        return True

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [N] -> cosine and signed sine, each [N, 3, 1, D/H]."""
        index = positions - self.first
        return self.cos.index_select(0, index), self.sin.index_select(0, index)


class CausalMask:
    """What one row without padding may see, as a view of one table: new position i of `new` does not see the last
    new - 1 - i columns. Nothing is computed in a step."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._table = torch.zeros(0, 0, device=device, dtype=dtype)

    def __call__(self, new: int, columns: int) -> Tensor | None:
        """Added to the scores of `new` positions: [1, 1, new, columns]; None where a single one sees everything."""
        if new == 1:
            return None
        rows, width = self._table.shape
        if new > rows or columns > width:
            rows, width = max(new, rows, 8), max(round_up(columns, STEP), width)
            seen = torch.ones(rows, width, dtype=torch.bool, device=self._table.device).tril(width - rows)
            self._table = additive(seen, self._table.dtype)
        return self._table[None, None, rows - new :, width - columns :]


@dataclass
class Columns:
    """Where the keys and values of N new positions belong in a cache, and what these positions see.

    They are `new` positions of each of `rows` rows, or the `real` ones among these. A position sees its row's columns
    up to its own, but for those from hole_from to hole_to (the padding of its text); in a tree, what `tree` says.
    """

    kv: Tensor  # [layers, rows or more, columns, 2, H, D/H]: the whole storage
    index: Tensor  # [N] flat columns: row × columns of a row + column
    rows: int
    new: int
    last: int  # columns that attention reads
    mask: Callable[[], Tensor | None]  # for attention layer by layer, added to the scores: [B or 1, 1, new, last]
    hole_from: Tensor | None = None  # [B]
    hole_to: Tensor | None = None  # [B]; None: no holes
    tree: Tensor | None = None  # [N, last], added to the scores
    real: Tensor | None = None  # [N] which of the rows × new positions these are; None: all
    ends: Tensor | None = None  # [B] of the N: behind the keys and values of the last layer only these go on

    def write(self, layer: int, keys_values: Tensor) -> None:
        """Store [N, 2, H, D/H]."""
        kv = self.kv[layer]
        kv.view(-1, *kv.shape[2:]).index_copy_(0, self.index, keys_values)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, last, D/H]."""
        window = self.kv[layer, : self.rows, : self.last]
        return window[:, :, 0].transpose(1, 2), window[:, :, 1].transpose(1, 2)

    def fold(self, queries: Tensor) -> Tensor:
        """Queries by row, for attention: [N, H, D/H] -> [B, H, new, D/H]; with `ends` [B, H, D/H] -> [B, H, 1, D/H]."""
        if self.ends is not None:
            return queries[:, :, None]
        if self.real is not None:
            padded = queries.new_zeros(self.rows * self.new, *queries.shape[1:])
            queries = padded.index_copy_(0, self.real, queries)
        return queries.unflatten(0, (self.rows, self.new)).transpose(1, 2)

    def flat(self, attended: Tensor) -> Tensor:
        """The way back: [B, H, new, D/H] -> [N, D]."""
        y = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        return y if self.real is None or self.ends is not None else y.index_select(0, self.real)


def real_positions(counts: Tensor, new: int) -> Tensor | None:
    """Which of the rows × new positions are real ones, counts [B] of each row; None where there is no padding to leave
    out, or where asking would wait for a device."""
    if counts.device.type != "cpu" or len(counts) == 1 or new == 1:
        return None
    return (torch.arange(new) < counts[:, None]).view(-1).nonzero()[:, 0]


def columns_of(cache: KVCache, new: int, causal: CausalMask, *, tree: Tensor | None = None, real: Tensor | None = None,
               ends: Tensor | None = None, counts: Tensor | None = None) -> Columns:
    """`new` positions behind each row's past. tree [B or 1, new, new]: who sees whom, in place of a chain.

    `ends` [B] with `counts` [B]: of the positions counts[b] are real, and only each row's last one asks what it sees.
    """
    kv, total, width = cache.kv, cache.columns(new), cache.kv.shape[2]
    index = cache.lengths[:, None] + torch.arange(cache.prefix, cache.prefix + new, device=kv.device)
    if cache.batch > 1:
        index = index + torch.arange(0, cache.batch * width, width, device=kv.device)[:, None]
    index = index.view(-1) if real is None else index.view(-1).index_select(0, real)
    dtype, whole = kv.dtype, cache.single and int(cache.prefix_lengths) == cache.prefix

    def mask() -> Tensor | None:
        if ends is not None and counts is not None:
            own = torch.arange(total, device=kv.device) < (cache.prefix + cache.lengths + counts)[:, None]
            return additive(own[:, None, None], dtype)
        if whole and tree is None:
            return causal(new, total)
        seen = cache.mask(new, tree)
        return None if seen is None else additive(seen, dtype)

    out = Columns(kv, index, cache.batch, new, total, mask, real=real, ends=ends)
    if tree is not None:
        added = mask()
        out.mask = lambda: added
        out.tree = added if added is None else added.reshape(-1, total)
        if out.tree is not None and real is not None:
            out.tree = out.tree.index_select(0, real)
    elif cache.prefix and not whole:
        out.hole_from, out.hole_to = cache.prefix_lengths, torch.full_like(cache.prefix_lengths, cache.prefix)
    return out
