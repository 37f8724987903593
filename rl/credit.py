"""Advantages of single decisions, where the paper has one number a rollout. Neither part is the
paper's.

Credit by place (`credit=decision`): errors lie in time. Some rewards say where they were lost: at
which characters of the text a recogniser finds wrong words, or finds the text unlikely
(dcar/recognition/ctc.py). Every place has a cost in each rollout of a group, whatever the rollouts'
lengths. A decision answers for the places of a window behind it. Its advantage is the group's mean
cost at these places minus its own: a baseline as in GRPO.

Cost per pass (`tokens_per_pass`): a reward of words alone pays nothing for speed, and chunks grow
shorter under it. The user says how many tokens a pass shall bring, and what a long chunk is paid
moves until rollouts bring as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAST_STD = 1e-8  # a group whose rollouts cost the same everywhere teaches nothing


@dataclass(frozen=True)
class Located:
    """Where a rollout lost a reward. costs [m]: at every place, in the reward's unit; the places
    are the same in all rollouts of a group. places [n]: the place that is spoken at each of the
    rollout's n tokens, never falling. rate: places in a token of the recording."""

    costs: np.ndarray
    places: np.ndarray
    rate: float = 1.0

    def times(self, weight: float) -> Located:
        return replace(self, costs=weight * self.costs)


@dataclass(frozen=True)
class Decisions:
    """Of one rollout: where it lost each reward (nothing: it has no tokens, or no reward), and
    the index of the token before which every decision was made."""

    located: Sequence[Located]
    starts: Sequence[int]


def decisions_of(
    records: Sequence[Any], failed: Sequence[bool], asked: Sequence[tuple[Any, float]]
) -> list[Decisions]:
    """Decisions of rollouts (`RolloutRecord`), and where they lost the rewards that are asked,
    times their weights; nothing where a rollout failed or one of the rewards could not say."""
    found = []
    for record, missing in zip(records, failed, strict=True):
        missing = missing or any(reward not in record.located for reward, _ in asked)
        found.append(
            Decisions(
                [] if missing else [record.located[r].times(w) for r, w in asked],
                [p - (record.result.prompt_length - 1) for p in record.result.decision_positions],
            )
        )
    return found


def decision_advantages(group: Sequence[Decisions], window: int, shortest: int) -> list[np.ndarray]:
    """Advantages of the decisions of every rollout of a group, added over the rewards and scaled to
    unit deviation over the group; zeros where a rollout was not located.

    window: tokens of the recording that a decision answers for; they are counted as places by
    `Located.rate`, at least one, so how many they are never depends on what the decision led to.
    shortest: tokens behind a decision that are the same whatever it chooses, those of the smallest
    chunk; none where it chooses among several candidates.
    """
    spoken = [d.located for d in group if d.located]
    found = [np.zeros(len(d.starts)) for d in group]
    if len(spoken) < 2:
        return found
    for reward, mean in enumerate(
        np.mean([one.costs for one in every], axis=0) for every in zip(*spoken, strict=True)
    ):
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
    """How much less than the group's mean [m] the places of every decision cost, on average over
    its window."""
    better = np.concatenate(([0.0], np.cumsum(mean - one.costs)))
    first = one.places[np.minimum(np.asarray(starts, np.int64) + shortest, len(one.places) - 1)]
    end = np.minimum(first + max(1, round(window * one.rate)), len(mean))
    return (better[end] - better[first]) / (end - first)


# Sizes move with what is paid, so a controller that only adds up what is missing swings: it must
# answer to what is missing now.
KEPT = 0.05  # share of what a window added that stays
MOST = 4.0


@dataclass
class LengthReward:
    """A proportional and integral controller of the tokens that a pass brings.

    value: standard deviations of advantage that one standard deviation of chunk size is worth;
    below 0 a long chunk costs.
    """

    target: float  # tokens a pass
    gain: float = 1.0  # for each token that the last window's chunks were too short
    value: float = 0.0
    kept: float = 0.0  # what stayed of the values so far
    # micro-batch -> tokens, passes of all processes
    seen: dict[int, tuple[float, float]] = field(default_factory=dict)

    def advance(self) -> None:
        """Before the rollouts of another window: move by what the last ones brought."""
        tokens, passes = (
            (sum(counts) for counts in zip(*self.seen.values(), strict=True))
            if self.seen
            else (0, 0)
        )
        if passes:
            now = self.gain * (self.target - tokens / passes)
            self.kept = min(MOST, max(-MOST, self.kept + KEPT * now))
            self.value = min(MOST, max(-MOST, self.kept + now))
        self.seen = {}

    def of_decisions(self, actions: Tensor, mask: Tensor) -> Tensor:
        """What is added to the advantages of decisions: actions [R, M] in 0..K-1, mask [R, M] ->
        [R, M].

        A chunk pays for itself alone; the mean over the decisions of a batch is its baseline."""
        real = mask > 0
        sizes = actions[real].double()
        if len(sizes) < 2 or not (std := sizes.std()) > 0:
            return torch.zeros_like(mask)
        return torch.where(real, self.value * (actions - sizes.mean()) / std, 0.0).to(mask)

    def state(self) -> Tensor:
        """Everything that changes, for a checkpoint: [1 + micro-batches, 2] float64."""
        return torch.tensor(
            [(self.value, self.kept), *(self.seen[i] for i in sorted(self.seen))],
            dtype=torch.float64,
        )

    def restore(self, state: Tensor) -> None:
        """What `state` gave."""
        first, *seen = state.tolist()
        (self.value, self.kept), self.seen = (
            first,
            dict(enumerate((tokens, passes) for tokens, passes in seen)),
        )
