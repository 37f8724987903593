"""Credit by decision: a chunk's end answers for the second of speech behind it, not for the whole utterance.

Errors lie in time. Some rewards say where they were lost: the distance of tokens to the recording's, whose tokens are
the places (dcar/tokens/warping.py), and the likelihood of the text under a recogniser, whose characters or subwords are
(dcar/recognition/ctc.py). Every place has a cost in each rollout of a group, whatever the rollouts' lengths. A decision
is worth the mean cost of the places from the first token on that it decides about, over a window; its advantage is the
group's mean over the same places, minus that: a baseline as in GRPO. What a decision does behind its window is not
seen. Not the paper's, whose advantage is one number a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_STD = 1e-8  # a group whose rollouts cost the same everywhere teaches nothing


@dataclass(frozen=True)
class Located:
    """Where a rollout lost a reward. costs [m]: at every place, in the reward's unit; the places are the same in all
    rollouts of a group. places [n]: the place that is spoken at each of the rollout's n tokens, never falling. rate:
    places in a token of the recording."""

    costs: np.ndarray
    places: np.ndarray
    rate: float = 1.0


@dataclass(frozen=True)
class Decisions:
    """Of one rollout: where it lost each reward (nothing: it has no tokens, or no reward), and the index of the token
    before which every decision was made."""

    located: Sequence[Located]
    starts: Sequence[int]


def decision_advantages(group: Sequence[Decisions], window: int, shortest: int) -> list[np.ndarray]:
    """Advantages of the decisions of every rollout of a group, added over the rewards and scaled to unit deviation over
    the group; zeros where a rollout was not located.

    window: tokens of the recording that a decision answers for; they are counted as places by `Located.rate`, at least
    one, so how many they are never depends on what the decision led to. shortest: tokens behind a decision that are the
    same whatever it chooses, those of the smallest chunk; none where it chooses among several draws.
    """
    spoken = [d.located for d in group if d.located]
    found = [np.zeros(len(d.starts)) for d in group]
    if len(spoken) < 2:
        return found
    for reward, mean in enumerate(np.mean([one.costs for one in every], axis=0) for every in zip(*spoken, strict=True)):
        for values, decisions in zip(found, group, strict=True):
            if decisions.located:
                values += _better(decisions.located[reward], decisions.starts, mean, window, shortest)
    std = np.concatenate([v for v, d in zip(found, group, strict=True) if d.located]).std(ddof=1)
    return [v / std if std > LEAST_STD else np.zeros_like(v) for v in found]


def _better(one: Located, starts: Sequence[int], mean: np.ndarray, window: int, shortest: int) -> np.ndarray:
    """How much less than the group's mean [m] the places of every decision cost, on average over its window."""
    better = np.concatenate(([0.0], np.cumsum(mean - one.costs)))
    first = one.places[np.minimum(np.asarray(starts, np.int64) + shortest, len(one.places) - 1)]
    end = np.minimum(first + max(1, round(window * one.rate)), len(mean))
    return (better[end] - better[first]) / (end - first)
