"""What additional heads cost, counted from their shapes: the arithmetic behind speed bounds and estimates."""

from __future__ import annotations

from dataclasses import dataclass

from heads.build import Heads
from heads.shared import SharedHeads


@dataclass(frozen=True)
class HeadCosts:
    """Of the heads behind the base head. Reading is in parameters, for one step with k heads: `once` where k > 1, and
    k - 1 times `each`. `multiplications` and `kept` (floats that a backward pass needs) are of one head and position,
    its logits left out of `kept`."""

    once: int
    each: int
    multiplications: int
    kept: int

    def read(self, k: float) -> float:
        """Parameters that a step with k heads reads beside the base head; k may be a mean above 1."""
        return (self.once if k > 1 else 0) + max(k - 1, 0) * self.each


def head_costs(heads: Heads) -> HeadCosts:
    """Costs of these heads, which may be on the meta device."""
    out, width = heads.base.weight.shape
    if isinstance(heads, SharedHeads):
        w, blocks = heads.width, heads.blocks
        stack = (*heads.up.parameters(), *heads.down.parameters(), *(() if heads.norm is None else
                                                                     heads.norm.parameters()))
        once = sum(p.numel() for p in stack) + (0 if heads.out is None else heads.out.weight.numel())
        return HeadCosts(once, width + 2 * blocks * w, 2 * blocks * width * w + width * out,
                         2 * width + blocks * (width + 3 * w))
    square = width * width
    return HeadCosts(0, heads.blocks * (square + width) + width * out, heads.blocks * square + width * out,
                     width * (1 + 2 * heads.blocks))
