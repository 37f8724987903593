"""Order of equal values: the lowest id comes first, on every device.

torch.topk does not define it, so CPU and GPU would keep different ids of equal logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MaskOfLargest = Callable[[Tensor, int, Tensor | None, float], Tensor]
"""Function like `largest`."""


def likeliest(values: Tensor, k: int, ordered: bool = True) -> tuple[Tensor, Tensor]:
    """Return a stable top-k: the k largest of values [..., V] and their ids, both [..., k],
    descending. Of ties the lowest id comes first, and NaN counts as largest. Without `ordered`,
    return the same ids, with ties among them in any order.

    torch.topk does not define the order of ties, so it gets keys without ties: on the CPU only for
    rows with ties among their largest values, on a GPU for all rows, because a search for ties
    would synchronise.
    """
    size = min(k + 1, values.shape[-1])  # one more, to see a tie at the cut
    if values.dtype == torch.float64:
        best, ids = values.sort(dim=-1, descending=True, stable=True)
    elif values.device.type == "cpu" and not torch.compiler.is_compiling():
        best, ids = values.topk(size, dim=-1)
        same = best[..., 1:] == best[..., :-1]
        tied = same.any(-1) if ordered or size == k else same[..., -1]
        if bool(tied.any()):
            ids[tied] = first = first_of_equals(values[tied], size)
            best[tied] = values[tied].gather(-1, first)
    else:
        ids = first_of_equals(values, size)
        best = values.gather(-1, ids)
    return best[..., :k], ids[..., :k]


def largest(values: Tensor, k: int, weights: Tensor | None = None, p: float = 1.0) -> Tensor:
    """Return a mask [..., V] of the largest of values [..., V] in the order of `likeliest`: the
    first k (all if k is 0 and there are weights), of which, given weights [..., V], those whose
    predecessors weigh less than p."""
    none = torch.zeros_like(values, dtype=torch.bool)
    if weights is None:
        return none.scatter_(-1, likeliest(values, k, ordered=False)[1], True)
    order = values.sort(dim=-1, descending=True, stable=True)[1]
    ordered = weights.gather(-1, order)
    first = ordered.cumsum(-1) - ordered < p
    if k:
        first &= torch.arange(values.shape[-1], device=values.device) < k
    return none.scatter_(-1, order, first)


def first_of_equals(values: Tensor, size: int) -> Tensor:
    """Return ids [..., size] of the largest of values [..., V] of at most 32 bits, in the order
    of `likeliest`: value and id are packed into one integer, so there are no ties."""
    values = values.to(torch.float32)
    # one NaN, one zero
    bits = (values.masked_fill(values.isnan(), torch.nan) + 0.0).view(torch.int32)
    # whole numbers in the order of the values
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    last = values.shape[-1] - 1
    keys = (ordered << 32) | (last - torch.arange(last + 1, device=values.device))
    return last - (keys.topk(size, dim=-1).values & 0xFFFFFFFF)


def rank(values: Tensor, ids: Tensor) -> Tensor:
    """Return the ranks [...] of ids [...] in the order of `likeliest`, given values [..., V]."""
    mine = values.gather(-1, ids[..., None])
    earlier = torch.arange(values.shape[-1], device=values.device) < ids[..., None]
    return ((values > mine) | (values == mine) & earlier).sum(-1)
