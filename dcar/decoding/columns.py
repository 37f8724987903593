"""Columns of a ragged KV cache that a pass writes and attends to, and rotary embeddings of its
positions.

`Columns` is flat, N = rows × new positions, so that layers can be run one by one or as one call of
C, for a decoder or a policy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.layers import KVCache, RotaryTable

STEP = 512
"""Number of positions by which rotary and mask tables grow, so that they are seldom rebuilt."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask (True = may attend) to an additive one, once instead of in every
    layer's attention."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


class Rotations(NamedTuple):
    """Cosines and signed sines of positions from `first` on, each [P, 3, 1, D/H]."""

    first: int
    cos: Tensor
    sin: Tensor


_GROWING = Lock()


class RotaryCache:
    """Cosines and sines for queries and keys, with the identity for values, so that all three
    are rotated at once. Threads may share it."""

    def __init__(self, table: RotaryTable, device: torch.device, dtype: torch.dtype):
        self._table, self._device, self._dtype = table, device, dtype
        empty = torch.empty(0, 3, 1, table.head_dim, device=device, dtype=dtype)
        self.rotations = Rotations(0, empty, empty)

    def cover(self, first: int, last: int) -> None:
        """Extend the table to positions first..last, which may be negative (a prompt before
        BOS). Raises ValueError for positions beyond the rotary table."""
        with _GROWING:
            start, end = self.rotations.first, self.rotations.first + len(self.rotations.cos) - 1
            if start <= first and last <= end:
                return
            most = self._table.reach
            if not -most <= first <= last < most:
                raise ValueError(
                    f"positions {first} to {last} exceed the {most} of the rotary table"
                )
            start = max(min(-round_up(-first, STEP), start), -most)
            end = min(max(round_up(last + 1, STEP) - 1, end), most - 1)
            cos, sin = self._table.span(start, end - start + 1, self._device)
            ones, zeros = torch.ones_like(cos[0, 0]), torch.zeros_like(cos[0, 0])
            cos = torch.stack((cos[0, 0], cos[0, 0], ones), 1)[:, :, None].to(self._dtype)
            sin = torch.stack((sin[0, 0], sin[0, 0], zeros), 1)[:, :, None].to(self._dtype)
            self.rotations = Rotations(start, cos, sin)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and signed sine, each [N, 3, 1, D/H], of positions [N]."""
        first, cos, sin = self.rotations
        index = positions - first
        return cos.index_select(0, index), sin.index_select(0, index)


class JoinedRotary(RotaryCache):
    """Two tables that do not grow any more as one, for a pass over positions of both: `first_of`
    and `second_of` return its positions for theirs."""

    def __init__(self, first: RotaryCache, second: RotaryCache):
        a, b = first.rotations, second.rotations
        self.rotations = Rotations(0, torch.cat((a.cos, b.cos)), torch.cat((a.sin, b.sin)))
        self._starts = -a.first, len(a.cos) - b.first

    def first_of(self, positions: Tensor) -> Tensor:
        return positions + self._starts[0]

    def second_of(self, positions: Tensor) -> Tensor:
        return positions + self._starts[1]


class CausalMask:
    """Causal mask of one row without padding, as a view of one table, so that nothing is
    computed in a step: new position i of `new` does not attend to the last new - 1 - i columns."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._table = torch.zeros(0, 0, device=device, dtype=dtype)

    def __call__(self, new: int, columns: int) -> Tensor | None:
        """Return an additive mask [1, 1, new, columns]; None for a single position, which
        attends to everything."""
        if new == 1:
            return None
        table = self._table  # another thread may replace it
        rows, width = table.shape
        if new > rows or columns > width:
            rows, width = max(new, rows, 8), max(round_up(columns, STEP), width)
            visible = torch.ones(rows, width, dtype=torch.bool, device=table.device).tril(
                width - rows
            )
            self._table = table = additive(visible, table.dtype)
        return table[None, None, rows - new :, width - columns :]


@dataclass
class Columns:
    """Columns for the keys and values of N new positions in a cache, and the columns that these
    positions attend to.

    They are `new` positions of each of `rows` rows, or the `real` ones among these. A position
    attends to its row's text and past, and among the new positions to itself and earlier ones; in
    a tree, to those that `tree` allows.
    """

    cache: KVCache
    index: Tensor  # [N] into its layers: row × columns of a row + column
    rows: int
    new: int
    last: int  # columns that attention reads
    # for attention layer by layer, additive: [B or 1, 1, new, last]
    mask: Callable[[], Tensor | None]
    unpadded: bool  # there is one row, and it is known that its text has no padding
    tree: Tensor | None = None  # bool [B or 1, new, new]
    real: Tensor | None = None  # [N] which of the rows × new positions these are; None: all
    # [B] of the N: the only positions with a query, where there is one layer
    ends: Tensor | None = None
    # the last layer ends with its keys and values, and the result means nothing
    writes_only: bool = False

    @property
    def kv(self) -> list[Tensor]:
        """Keys and values of each layer, [rows × columns of a row, 2, H, d]."""
        return self.cache.kv

    def padding(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the columns [B] from and up to which each row's text is padding, if there is
        any."""
        if self.unpadded or not self.cache.prefix or self.tree is not None:
            return None, None
        lengths = self.cache.prefix_lengths
        return lengths, torch.full_like(lengths, self.cache.prefix)

    def mask_of_tree(self) -> Tensor | None:
        """Return the additive mask [N, last] of a tree."""
        if self.tree is None or (mask := self.mask()) is None:
            return None
        mask = mask.reshape(-1, self.last)
        return mask if self.real is None else mask.index_select(0, self.real)

    def write(self, layer: int, keys_values: Tensor) -> None:
        """Write keys and values [N, 2, H, D/H]."""
        self.kv[layer].index_put_((self.index,), keys_values)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, last, D/H]."""
        return window(self.kv[layer], self.rows, self.last)

    def fold(self, queries: Tensor) -> Tensor:
        """Arrange queries by row, for attention: [N, H, D/H] -> [B, H, new, D/H]; with `ends`
        [B, H, D/H] -> [B, H, 1, D/H]."""
        if self.ends is not None:
            return queries[:, :, None]
        if self.real is not None:
            padded = queries.new_zeros(self.rows * self.new, *queries.shape[1:])
            queries = padded.index_copy_(0, self.real, queries)
        return queries.unflatten(0, (self.rows, self.new)).transpose(1, 2)

    def flat(self, attended: Tensor) -> Tensor:
        """Undo `fold`: [B, H, new, D/H] -> [N, D]."""
        y = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        return y if self.real is None or self.ends is not None else y.index_select(0, self.real)


def window(kv: Tensor, rows: int, last: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, H, last, d] of the first columns of a layer's cache."""
    columns = kv.unflatten(0, (rows, -1))[:, :last]
    return columns[:, :, 0].transpose(1, 2), columns[:, :, 1].transpose(1, 2)


def real_positions(counts: Tensor, new: int) -> Tensor:
    """Return the indices of those of the rows × new positions that are not padding, given counts
    [B] of each row. Their number depends on the data: only for a CPU."""
    return (torch.arange(new) < counts[:, None]).view(-1).nonzero()[:, 0]


def columns_of(
    cache: KVCache,
    longest: int,
    new: int,
    causal: CausalMask,
    *,
    tree: Tensor | None = None,
    real: Tensor | None = None,
    ends: Tensor | None = None,
    counts: Tensor | None = None,
    part: Callable[..., Any] = lambda function: function,
) -> Columns:
    """Place `new` positions after each row's past of at most `longest`. tree [B or 1, new, new]:
    attention among them, in place of a chain.

    `ends` [B] with `counts` [B]: counts[b] positions are real, and only each row's last one has a
    query. part: see `Backend.part`.
    """
    index = part(index_of)(cache, new)
    if real is not None:
        index = index.index_select(0, real)
    total, unpadded = cache.columns(longest, new), cache.unpadded

    def mask() -> Tensor | None:
        if unpadded and tree is None and ends is None:
            return causal(new, total)
        return part(mask_of)(cache, longest, new, tree, counts)

    return Columns(
        cache, index, cache.batch, new, total, mask, unpadded, tree=tree, real=real, ends=ends
    )


def index_of(cache: KVCache, new: int) -> Tensor:
    """Return the index [N] of the `new` columns after each row's past; see `KVCache`."""
    device, width = cache.lengths.device, cache.row_columns
    index = cache.lengths[:, None] + torch.arange(cache.prefix, cache.prefix + new, device=device)
    if cache.batch > 1:
        index = index + torch.arange(0, cache.batch * width, width, device=device)[:, None]
    return index.view(-1)


def mask_of(
    cache: KVCache, longest: int, new: int, tree: Tensor | None, counts: Tensor | None
) -> Tensor:
    """Return the additive mask [B, 1, new, last] of new positions, or [B, 1, 1, last] of the last
    one of counts [B]."""
    if counts is None:
        return additive(cache.mask(longest, new, tree), cache.dtype)
    column = torch.arange(cache.columns(longest, new), device=counts.device)
    visible = column < (cache.prefix + cache.lengths + counts)[:, None]
    return additive(visible[:, None, None], cache.dtype)
