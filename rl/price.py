"""The price of a pass: what holds the chunks of a policy in training at a length.

A reward of words alone pays nothing for speed, and chunks grow shorter under it. Instead of weighing seconds against
words by hand, the user says how many tokens a pass shall bring; the price moves until rollouts do. Not the paper's,
whose speed follows from its guidance range.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# Sizes move with the price, so a price that only adds up what is missing swings: it must answer to what is missing now.
KEPT = 0.05  # share of a window's price that stays
MOST = 4.0


@dataclass
class Price:
    """value: standard deviations of advantage that one standard deviation of chunk size is worth; below 0 a long chunk
    is charged for."""

    target: float  # tokens a pass
    gain: float = 1.0  # price for each token that the last window's chunks were too short
    value: float = 0.0
    kept: float = 0.0  # what stayed of the prices so far
    seen: dict[int, tuple[float, float]] = field(default_factory=dict)  # micro-batch -> tokens, passes of all processes

    def advance(self) -> None:
        """Before the rollouts of another window: move by what the ones before kept."""
        tokens, passes = (sum(counts) for counts in zip(*self.seen.values(), strict=True)) if self.seen else (0, 0)
        if passes:
            short = self.target - tokens / passes
            now = self.gain * short
            self.kept = min(MOST, max(-MOST, self.kept + KEPT * now))
            self.value = min(MOST, max(-MOST, self.kept + now))
        self.seen = {}

    def of_decisions(self, actions: Tensor, mask: Tensor) -> Tensor:
        """What is added to the advantages of decisions: actions [R, M] in 0..K-1, mask [R, M] -> [R, M].

        A chunk pays for itself alone; the mean over the decisions of a batch is its baseline."""
        real = mask > 0
        sizes = actions[real].double()
        if len(sizes) < 2 or not (std := sizes.std()) > 0:
            return torch.zeros_like(mask)
        return torch.where(real, self.value * (actions - sizes.mean()) / std, 0.0).to(mask)

    def state(self) -> Tensor:
        """Everything that changes, for a checkpoint: [1 + micro-batches, 2] float64."""
        return torch.tensor([(self.value, self.kept), *(self.seen[i] for i in sorted(self.seen))], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """What `state` gave."""
        first, *seen = state.tolist()
        (self.value, self.kept), self.seen = first, dict(enumerate((tokens, passes) for tokens, passes in seen))
