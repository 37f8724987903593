"""What must stay finite in training, and how an error names it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """[N] for N tensors: whether all values of each are finite, on their device. Empty ones are."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]  # FSDP: this process's part
    if not local:
        return torch.ones(0, dtype=torch.bool)
    # the largest magnitude, not the usual norm, whose squares overflow where all values are finite
    whole = [t if t.numel() else t.new_zeros(1) for t in (t.detach() for t in local)]
    return torch.stack([n.float() for n in torch._foreach_norm(whole, float("inf"))]).isfinite()


def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the tensors that hold NaN or infinity."""
    pairs = [(name, t) for name, t in named if t.is_floating_point()]
    good = all_finite(t for _, t in pairs).tolist()
    return [name for (name, _), fine in zip(pairs, good, strict=True) if not fine]


def some(names: Sequence[str]) -> str:
    """A few names for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
