"""What additional heads cost, counted from their shapes: the arithmetic behind speed bounds."""

from __future__ import annotations

from dataclasses import dataclass

from heads.build import Heads
from heads.shared import SharedHeads


@dataclass(frozen=True)
class HeadCosts:
    """Parameters of the heads behind the base head that a step with k heads reads: `once` where k > 1, and k - 1 times
    `each`."""

    once: int
    each: int

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
        return HeadCosts(once, width + 2 * blocks * w)
    return HeadCosts(0, heads.blocks * (width * width + width) + width * out)
