"""Advantages of single decisions, in place of the paper's single advantage per rollout. Neither
part is in the paper.

Credit by place (`credit=decision`): errors have a position in time. Some rewards report where they
were lost: the characters of the text at which a recogniser finds wrong words, or finds the text
unlikely (dcar/recognition/ctc.py). Every place has a cost in each rollout of a group, whatever the
rollouts' lengths. A decision is responsible for the places in a window after it. Its advantage is
the group's mean cost at these places minus its own cost: a baseline as in GRPO.

Reward for speed (`points_per_percent`): a reward that only counts words gives nothing for speed,
and chunks grow shorter under it. The time that a chunk saves is added at an exchange rate
(rl/pass_cost.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

LEAST_STD = 1e-8  # below it, all costs are equal


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


def located_costs(record: Any, asked: Sequence[tuple[Any, float]]) -> list[Located]:
    """Return the costs of a rollout (`RolloutRecord`) for each reward in `asked`, times its
    weight; empty if one of the rewards could not locate it."""
    if not all(reward in record.located for reward, _ in asked):
        return []
    return [record.located[reward].times(weight) for reward, weight in asked]


def decision_advantages(
    group: Sequence[Sequence[Located]], starts: Sequence[Sequence[int]], window: int, shortest: int
) -> list[np.ndarray]:
    """Return the advantages of the decisions of every rollout of a group, summed over the rewards
    and in their unit; NaN for rollouts that were not located, zeros if only one was.

    group: costs of every rollout for each reward, empty if it was not located. starts: indices of
    the tokens before which its decisions were made. window: tokens of the recording for which a
    decision is responsible. They are counted as places by `Located.rate`, at least one, so their
    number never depends on what the decision led to. shortest: tokens after a decision that are the
    same whatever it chooses: those of the smallest chunk, or none if it chooses among several
    candidates.
    """
    advantages = [
        np.full(len(of), 0.0 if one else math.nan) for one, of in zip(group, starts, strict=True)
    ]
    located = [rollout for rollout in zip(group, starts, advantages, strict=True) if rollout[0]]
    if not located:
        return advantages
    for reward in range(len(located[0][0])):
        mean = np.mean([one[reward].costs for one, _, _ in located], axis=0)
        for one, of, values in located:
            values += _better(one[reward], of, mean, window, shortest)
    return advantages


def std_of(advantages: Sequence[np.ndarray]) -> float:
    """Return the standard deviation of the decisions' advantages in all these rollouts; NaN is left
    out."""
    values = np.concatenate([*advantages])
    values = values[~np.isnan(values)]
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def scaled(
    advantages: Sequence[np.ndarray], group: int, everywhere: Sequence[np.ndarray] = ()
) -> list[np.ndarray]:
    """Return the advantages of the decisions divided by the standard deviation of their group of
    rollouts, with 0 for NaN, and where all costs are equal.

    everywhere: the advantages of the whole update on all processes. With these, the standard
    deviation of the update is the divisor, so that all groups have one exchange rate between words
    and time; only a group that varies more than the update is divided by its own. A rollout that
    goes astray makes its group vary twenty times as much as others, and would decide the update
    alone.
    """
    least = std_of(everywhere) if everywhere else 0.0
    out = []
    for first in range(0, len(advantages), group):
        members = advantages[first : first + group]
        std = max(std_of(members), least)
        divisor = std if std > LEAST_STD else math.inf
        out += [np.nan_to_num(values / divisor) for values in members]
    return out


def _better(
    one: Located, starts: Sequence[int], mean: np.ndarray, window: int, shortest: int
) -> np.ndarray:
    """Return the difference between the group's mean cost [m] and this rollout's cost at the
    places of every decision, averaged over its window."""
    better = np.concatenate(([0.0], np.cumsum(mean - one.costs)))
    first = one.places[np.minimum(np.asarray(starts, np.int64) + shortest, len(one.places) - 1)]
    end = np.minimum(first + max(1, round(window * one.rate)), len(mean))
    return (better[end] - better[first]) / (end - first)
