"""Credit by decision: a chunk's end answers for the second of speech behind it, not for the whole utterance.

Errors lie in time. Where the spoken tokens are warped to the recording's (dcar/tokens/warping.py), every place of the
recording has a cost in each rollout of a group, whatever the rollouts' lengths. A decision is worth the mean cost of
the places from the first token on that it decides about, over a window; its advantage is the group's mean over the same
places, minus that: a baseline as in GRPO. What a decision does behind its window is not seen. Not the paper's, whose
advantage is one number a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcar.tokens.warping import Warping

LEAST_STD = 1e-8  # a group whose rollouts cost the same everywhere teaches nothing


@dataclass(frozen=True)
class Decisions:
    """Of one rollout: how its tokens were warped to the recording (None: it has no tokens), and the index of the token
    before which every decision was made."""

    warping: Warping | None
    starts: Sequence[int]


def decision_advantages(group: Sequence[Decisions], window: int, shortest: int) -> list[np.ndarray]:
    """Advantages of the decisions of every rollout of a group, scaled to unit deviation over the group; zeros where a
    rollout has no tokens.

    window: places of the recording (tokens) that a decision answers for. shortest: the smallest chunk; as many tokens
    behind a decision are the same whatever it chooses.
    """
    spoken = [d.warping for d in group if d.warping is not None]
    found = [np.zeros(len(d.starts)) for d in group]
    if len(spoken) < 2:
        return found
    mean = np.mean([w.costs for w in spoken], axis=0)
    for values, decisions in zip(found, group, strict=True):
        if (warping := decisions.warping) is None:
            continue
        better = np.concatenate(([0.0], np.cumsum(mean - warping.costs)))
        last = len(warping.places) - 1
        first = warping.places[np.minimum(np.asarray(decisions.starts, np.int64) + shortest, last)]
        end = np.minimum(first + window, len(mean))
        values[:] = (better[end] - better[first]) / (end - first)
    every = np.concatenate([v for v, d in zip(found, group, strict=True) if d.warping is not None])
    std = every.std(ddof=1) if len(every) > 1 else 0.0
    return [v / std if std > LEAST_STD else np.zeros_like(v) for v in found]
