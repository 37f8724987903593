"""Likelihood and alignment against every path there is, and where there is none (against NeMo's:
test_recognizers.py). What asks for them: test_encoder.py, test_tokens.py."""

import itertools

import numpy as np
import pytest
import torch

from dcar.recognition.base import ctc_collapse
from dcar.recognition.ctc import Target, alignments, frames_needed, likelihoods, viterbi

BLANK = 2


def probs(frames: int, symbols: int, seed: int) -> np.ndarray:
    logits = torch.randn(frames, symbols + 1, generator=torch.Generator().manual_seed(seed))
    return torch.log_softmax(2 * logits, -1).numpy()


def owners(path: tuple[int, ...]) -> list[int]:
    """Unit of every frame: a new one begins where a symbol does that is not the frame before."""
    new = [s != BLANK and (t == 0 or s != path[t - 1]) for t, s in enumerate(path)]
    return np.maximum(np.cumsum(new) - 1, 0).tolist()


@pytest.mark.parametrize("target", [[0], [0, 1], [1, 1], [0, 0, 1], [1, 0, 0, 0]])
@pytest.mark.parametrize("frames", [1, 2, 5, 7])
def test_texts_are_as_likely_as_all_their_paths_and_aligned_to_the_best(target, frames):
    for seed in range(5):
        log_probs = probs(frames, 2, 100 * frames + seed)
        paths = [
            p
            for p in itertools.product(range(3), repeat=frames)
            if ctc_collapse(p, (BLANK,)) == target
        ]
        assert bool(paths) == (frames >= frames_needed(target))
        told = [Target(0, torch.from_numpy(log_probs), target, len(target))]
        [found] = alignments(told, BLANK)
        assert likelihoods(told, BLANK) == [found.log_likelihood] and found.characters == len(
            target
        )
        costs, units = found.costs, found.units
        assert len(costs) == len(target) and len(units) == frames
        if not paths:
            assert np.isinf(costs).all() and (np.diff(units) >= 0).all() and units[-1] < len(target)
            assert found.log_likelihood == -np.inf
            continue
        scores = log_probs.astype(np.float64)[np.arange(frames), np.array(paths)].sum(-1)
        assert found.log_likelihood * len(target) == pytest.approx(
            np.logaddexp.reduce(scores), rel=1e-5
        )
        best = paths[int(scores.argmax())]
        assert costs.sum() == pytest.approx(-scores.max(), rel=1e-12)
        assert units.tolist() == owners(best)
        own = [
            -sum(float(log_probs[t, best[t]]) for t in range(frames) if units[t] == u)
            for u in range(len(target))
        ]
        assert costs == pytest.approx(own, rel=1e-6)


def test_blanks_belong_to_the_unit_before_them():
    path = [BLANK, BLANK, 0, BLANK, 1, 1, BLANK, BLANK]
    log_probs = np.log(np.full((8, 3), 0.1))
    log_probs[np.arange(8), path] = np.log(0.8)
    costs, units = viterbi(log_probs, [0, 1], BLANK)
    assert units.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert costs == pytest.approx([-4 * np.log(0.8)] * 2)


def test_what_is_impossible_has_no_path():
    log_probs = probs(6, 2, 0)
    log_probs[:, 1] = -np.inf
    costs, units = viterbi(log_probs, [0, 1], BLANK)
    assert np.isinf(costs).all() and units.tolist() == [0, 0, 0, 1, 1, 1]
