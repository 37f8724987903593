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
    and in their unit; NaN for rollouts that were not located, zeros if only one was.

    window: tokens of the recording for which a decision is responsible. They are counted as places
    by `Located.rate`, at least one, so their number never depends on what the decision led to.
    shortest: tokens after a decision that are the same whatever it chooses: those of the smallest
    chunk, or none if it chooses among several candidates.
    """
    located = [d.located for d in group if d.located]
    found = [np.full(len(d.starts), 0.0 if d.located else math.nan) for d in group]
    if len(located) < 2:
        return found
    for reward, of_rollouts in enumerate(zip(*located, strict=True)):
        mean = np.mean([one.costs for one in of_rollouts], axis=0)
        for values, decisions in zip(found, group, strict=True):
            if decisions.located:
                values += _better(
                    decisions.located[reward], decisions.starts, mean, window, shortest
                )
    return found


def scaled(advantages: Sequence[np.ndarray], like: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
    """Return advantages of the decisions of several rollouts divided by the standard deviation of
    all (or of those in `like`), with 0 for NaN."""
    known = np.concatenate([*(like or advantages)])
    known = known[~np.isnan(known)]
    std = known.std(ddof=1) if len(known) > 1 else 0.0
    return [
        np.nan_to_num(values / std) if std > LEAST_STD else np.zeros_like(values)
        for values in advantages
    ]


def _better(
    one: Located, starts: Sequence[int], mean: np.ndarray, window: int, shortest: int
) -> np.ndarray:
    """Return the difference between the group's mean cost [m] and this rollout's cost at the
    places of every decision, averaged over its window."""
    better = np.concatenate(([0.0], np.cumsum(mean - one.costs)))
    first = one.places[np.minimum(np.asarray(starts, np.int64) + shortest, len(one.places) - 1)]
    end = np.minimum(first + max(1, round(window * one.rate)), len(mean))
    return (better[end] - better[first]) / (end - first)
