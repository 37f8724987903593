"""Advantages of single decisions, in place of the paper's single advantage per rollout. Neither
part is in the paper.

Credit by place (`credit=decision`): errors have a position in time. Some rewards report where they
were lost: the characters of the text at which a recogniser finds wrong words, or finds the text
unlikely (dcar/recognition/ctc.py). Every place has a cost in each rollout of a group, whatever the
rollouts' lengths. A decision is responsible for the places in a window after it. Its advantage is
the group's mean cost at these places minus its own cost: a baseline as in GRPO.

Reward per pass (`tokens_per_pass`): a reward that only counts words gives nothing for speed, and
chunks grow shorter under it. The user sets the number of tokens per pass, and the reward for a long
chunk is adjusted until rollouts reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAST_STD = 1e-8  # below it, all rollouts of a group have equal costs


@dataclass(frozen=True)
class Located:
    """Costs of a rollout by place, for one reward.

    costs [m]: cost of every place, in the reward's unit; the places are the same in all rollouts of
    a group. places [n]: place that is spoken at each of the rollout's n tokens, non-decreasing.
    rate: places per token of the recording.
    """

    costs: np.ndarray
    places: np.ndarray
    rate: float = 1.0

    def times(self, weight: float) -> Located:
        return replace(self, costs=weight * self.costs)


@dataclass(frozen=True)
class Decisions:
    """Decisions of one rollout.

    located: its costs for each reward; empty if it has no tokens, or a reward is missing. starts:
    index of the token before which each decision was made.
    """

    located: Sequence[Located]
    starts: Sequence[int]


def decisions_of(
    records: Sequence[Any], failed: Sequence[bool], asked: Sequence[tuple[Any, float]]
) -> list[Decisions]:
    """Return the decisions of rollouts (`RolloutRecord`), with their costs for each reward in
    `asked` times its weight. `located` is empty for a rollout that failed, or that one of the
    rewards could not locate."""
    found = []
    for record, missing in zip(records, failed, strict=True):
        located: list[Located] = []
        if not missing and all(reward in record.located for reward, _ in asked):
            located = [record.located[reward].times(weight) for reward, weight in asked]
        first = record.result.prompt_length - 1
        starts = [position - first for position in record.result.decision_positions]
        found.append(Decisions(located, starts))
    return found


def decision_advantages(group: Sequence[Decisions], window: int, shortest: int) -> list[np.ndarray]:
    """Return the advantages of the decisions of every rollout of a group, summed over the rewards
    and scaled to unit deviation over the group; zeros for rollouts that were not located.

    window: tokens of the recording for which a decision is responsible. They are counted as places
    by `Located.rate`, at least one, so their number never depends on what the decision led to.
    shortest: tokens after a decision that are the same whatever it chooses: those of the smallest
    chunk, or none if it chooses among several candidates.
    """
    located = [d.located for d in group if d.located]
    found = [np.zeros(len(d.starts)) for d in group]
    if len(located) < 2:
        return found
    for reward, of_rollouts in enumerate(zip(*located, strict=True)):
        mean = np.mean([one.costs for one in of_rollouts], axis=0)
        for values, decisions in zip(found, group, strict=True):
            if decisions.located:
                values += _better(
                    decisions.located[reward], decisions.starts, mean, window, shortest
                )
    std = np.concatenate([v for v, d in zip(found, group, strict=True) if d.located]).std(ddof=1)
    return [v / std if std > LEAST_STD else np.zeros_like(v) for v in found]


def _better(
    one: Located, starts: Sequence[int], mean: np.ndarray, window: int, shortest: int
) -> np.ndarray:
    """Return the difference between the group's mean cost [m] and this rollout's cost at the
    places of every decision, averaged over its window."""
    better = np.concatenate(([0.0], np.cumsum(mean - one.costs)))
    first = one.places[np.minimum(np.asarray(starts, np.int64) + shortest, len(one.places) - 1)]
    end = np.minimum(first + max(1, round(window * one.rate)), len(mean))
    return (better[end] - better[first]) / (end - first)


# Sizes react to the reward, so a controller that only integrates the error oscillates: it needs a
# term proportional to the present error.
KEPT = 0.05  # share of a window's change that is integrated
MOST = 4.0  # largest absolute value


@dataclass
class LengthReward:
    """Proportional-integral controller of the tokens per pass.

    value: advantage, in standard deviations, of one standard deviation of chunk size; below 0, long
    chunks are penalised.
    """

    target: float  # tokens per pass
    gain: float = 1.0  # per token per pass below the target in the last window
    value: float = 0.0
    kept: float = 0.0  # integral term
    # micro-batch -> tokens and passes of all processes
    seen: dict[int, tuple[float, float]] = field(default_factory=dict)

    def advance(self) -> None:
        """Update `value` from the rollouts of the last window, before those of the next one."""
        tokens = sum(tokens for tokens, _ in self.seen.values())
        passes = sum(passes for _, passes in self.seen.values())
        if passes:
            now = self.gain * (self.target - tokens / passes)
            self.kept = min(MOST, max(-MOST, self.kept + KEPT * now))
            self.value = min(MOST, max(-MOST, self.kept + now))
        self.seen = {}

    def of_decisions(self, actions: Tensor, mask: Tensor) -> Tensor:
        """Return what is added to the advantages of decisions [R, M], given actions [R, M] in
        0..K-1 and mask [R, M].

        Each chunk is rewarded by its own size alone; the mean over the decisions of a batch is the
        baseline.
        """
        real = mask > 0
        sizes = actions[real].double()
        if len(sizes) < 2 or not (std := sizes.std()) > 0:
            return torch.zeros_like(mask)
        return torch.where(real, self.value * (actions - sizes.mean()) / std, 0.0).to(mask)

    def state(self) -> Tensor:
        """Return everything that changes, for a checkpoint: [1 + micro-batches, 2] float64."""
        return torch.tensor(
            [(self.value, self.kept), *(self.seen[i] for i in sorted(self.seen))],
            dtype=torch.float64,
        )

    def restore(self, state: Tensor) -> None:
        """Restore what `state` returned."""
        (self.value, self.kept), *seen = state.tolist()
        self.seen = {micro: (tokens, passes) for micro, (tokens, passes) in enumerate(seen)}
