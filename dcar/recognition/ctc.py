"""Forced alignment: which unit of a text is spoken in each frame of a CTC recogniser, and what it costs there. Frames
are of sound (characters or subwords: dcar/recognition/nemo.py) or speech tokens (phonemes: dcar/recognition/tokens.py).

Viterbi on the lattice of Graves et al. (2006): the units with a blank before, between and behind them; from frame to
frame a path stays, goes one state on, or leaves out a blank between two units that differ. NeMo's `viterbi_decoding`
finds the same paths (a test holds them equal), but tells neither what they cost nor that there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Alignment:
    """The likeliest path of a text. A blank belongs to the unit before it, blanks at the beginning to the first.

    costs [U]: −log-probability of every unit's frames, nats; they add up to that of the path. Where there is none
    (fewer frames than the text needs, or a probability of 0) all are inf. units [T]: the unit of every frame, never
    falling; spread evenly where there is no path. log_likelihood: of the text over all paths, nats per character.
    characters: of the text. A text of phonemes has phonemes for characters.
    """

    costs: np.ndarray
    units: np.ndarray
    log_likelihood: float
    characters: int


def viterbi(log_probs: np.ndarray, target: Sequence[int], blank: int) -> tuple[np.ndarray, np.ndarray]:
    """(costs [U], units [T]) of a text of U ≥ 1 symbols in T ≥ 1 frames [T, symbols + 1]; see `Alignment`."""
    states = np.full(2 * len(target) + 1, blank)
    states[1::2] = target
    skips = np.zeros(len(states), bool)  # whether a state may be entered from two before it
    skips[3::2] = states[3::2] != states[1:-2:2]
    emitted = log_probs.astype(np.float64)[:, states]  # [T, S]
    ways = np.full((3, len(states)), -np.inf)  # to stay, to go on, to leave out a blank
    came = np.zeros(emitted.shape, np.int64)
    best = np.full(len(states), -np.inf)
    best[:2] = emitted[0, :2]
    for t in range(1, len(emitted)):
        ways[0], ways[1, 1:], ways[2, 2:] = best, best[:-1], np.where(skips[2:], best[:-2], -np.inf)
        came[t] = ways.argmax(0)
        best = ways.max(0) + emitted[t]
    state = len(states) - 1 - int(best[-2] > best[-1])
    frames = np.arange(len(emitted))
    if not np.isfinite(best[state]):
        return np.full(len(target), np.inf), frames * len(target) // len(frames)
    path = np.zeros(len(emitted), np.int64)
    for t in frames[::-1]:
        path[t] = state
        state -= int(came[t, state])
    units = np.maximum(path - 1, 0) // 2
    return -np.bincount(units, emitted[frames, path], minlength=len(target)), units
