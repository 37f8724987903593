"""MTP with Viterbi: the best path against all paths, transitions, end of speech."""

import math

import pytest
import torch
from oracle import best_path

from eval.verifiers.mtp_viterbi import Transitions, choose, count_bigrams

UTTERANCES = [[0, 1, 1, 2], [0, 1, 0], [3]]


def transitions(alpha=0.01, codes=4):
    return Transitions(*count_bigrams(UTTERANCES, codes), codes + 2, alpha)


def matrix(table):
    """Q of all states, from row to column."""
    return table.log_prob(torch.arange(table.states)[None], torch.arange(table.states - 1)[None])[
        0
    ].exp()


def test_bigrams_with_ends_and_starts_counted_by_hand():
    keys, counts = count_bigrams(UTTERANCES, 4)
    found = {(int(k) // 6, int(k) % 6): int(c) for k, c in zip(keys, counts, strict=True)}
    assert found == {
        (5, 0): 2,
        (5, 3): 1,
        (0, 1): 2,
        (1, 1): 1,
        (1, 2): 1,
        (1, 0): 1,
        (0, 4): 1,
        (2, 4): 1,
        (3, 4): 1,
    }


def test_smoothed_rows_are_distributions_and_the_formula_holds():
    alpha = 0.2
    q = matrix(transitions(alpha))
    assert torch.allclose(q.sum(-1), torch.ones(6), atol=1e-6)
    assert q[4].tolist() == [0, 0, 0, 0, 1]  # behind the end only the end
    for i, (row, total) in {
        0: ([0, 2, 0, 0, 1], 3),
        5: ([2, 0, 0, 1, 0], 3),
        1: ([1, 1, 1, 0, 0], 3),
    }.items():
        expected = (torch.tensor(row) + alpha) / (total + alpha * 5)
        assert torch.allclose(q[i], expected, atol=1e-6)


def all_probs(n, vocabulary, seed):
    probs = torch.rand(2, n, vocabulary, generator=torch.Generator().manual_seed(seed)) ** 3
    return probs / probs.sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("n", "k"), [(1, 2), (3, 1), (3, 2), (2, 5), (4, 3)])
def test_choice_equals_brute_force_over_the_union(n, k, seed):
    table, probs = transitions(0.3), all_probs(n, 5, seed)
    probs[:, :, 4] *= [0.02, 1, 3, 0][seed % 4]  # ends: hardly, sometimes, often, never
    tokens, score = choose(probs, probs.topk(k).indices, table)
    for b in range(2):
        path, weight, _ = best_path(
            probs[b].tolist(), matrix(table)[:5].tolist(), probs[b].topk(k).indices.tolist()
        )
        assert math.exp(float(score[b])) == pytest.approx(weight, rel=1e-4)
        assert tokens[b].tolist() == path
