"""VADUSA: trees of drafts, acceptance among tau samples, losslessness at tau = 1."""

import itertools
import random

import pytest
import torch
from tiny_decoders import states, tiny_decoder
from tiny_verifiers import FALSE_ALARM, goodness, sequence_distribution

from dcar.decoding import Prompt, decode
from dcar.decoding.tree import DraftTree
from dcar.sampling import SamplingConfig, sample
from eval.verifiers.vadusa import RankTree, Vadusa, accept, build_tree, expected_accepted

EOS = 12  # of tiny_decoder


@pytest.mark.parametrize("seed", range(6))
def test_greedy_construction_is_the_best_tree_of_its_size(seed):
    accuracy = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed)) / 2
    every = [*itertools.product(range(3)), *itertools.product(range(3), range(3))]
    for budget in (1, 2, 3, 4, 12):
        best = (
            max(
                (
                    expected_accepted(nodes, accuracy)
                    for nodes in itertools.combinations(every, budget)
                    if all(len(n) == 1 or n[:1] in nodes for n in nodes)
                ),
                default=None,
            )
            if budget < 5
            else None
        )
        tree = build_tree(accuracy, budget)
        assert len(tree.paths) == budget
        if best is not None:
            assert expected_accepted(tree.paths, accuracy) == pytest.approx(best)


def test_what_a_tree_is_worth():
    """The expected accepted length under independent depths, by enumerating which rank the base
    head draws."""
    accuracy = torch.tensor([[0.5, 0.2, 0.0], [0.4, 0.3, 0.1]])
    tree = build_tree(accuracy, 100)
    # the worthless rank is left out
    assert tree.paths == ((0,), (1,), *itertools.product((0, 1), (0, 1, 2)))
    small = RankTree(((0,), (1,), (0, 0)))
    misses = [1 - row.sum() for row in accuracy]
    total = 0.0
    for first, p in enumerate([*accuracy[0], misses[0]]):
        for second, q in enumerate([*accuracy[1], misses[1]]):
            length = (
                0 if (first,) not in small.paths else 2 if (first, second) in small.paths else 1
            )
            total += float(p * q) * length
    assert expected_accepted(small.paths, accuracy) == pytest.approx(total)


def one_node_distribution(q, children, tau, eos):
    """Distribution of the token behind a node, by enumerating all draws."""
    tree = DraftTree([-1] * len(children))
    draws = torch.tensor(list(itertools.product(range(len(q)), repeat=tau)))  # [N, tau]
    samples = draws[:, None].expand(-1, len(children) + 1, -1)
    unended = torch.zeros_like(samples[:, :, 0])  # children of one node lead equally far
    path, counts = accept(
        torch.tensor(children).expand(len(draws), -1), samples, tree, eos, unended
    )
    token = torch.where(counts > 0, torch.tensor(children)[path[:, 0]], draws[:, 0])
    weight = q[draws].prod(-1)
    return torch.zeros(len(q), dtype=torch.float64).index_add_(0, token, weight)


@pytest.mark.parametrize("tau", [1, 2, 3, 4])
@pytest.mark.parametrize("children", [[1, 3], [1, 4], [4, 1]])
def test_distribution_of_one_node(tau, children):
    """The closed form; tau = 1 is the base distribution whatever the candidates; the distance
    grows as the theory says."""
    q = torch.tensor([0.15, 0.3, 0.15, 0.02, 0.38], dtype=torch.float64)
    out = one_node_distribution(q, children, tau, eos=4)
    going = [c for c in children if c != 4]
    end, mass = float(q[4]), q[going].sum()
    expected = (1 - mass) ** (tau - 1) * q
    expected[4] = q[4]
    expected[going] = q[going] * (1 + (1 - end - mass) / mass * (1 - (1 - mass) ** (tau - 1)))
    assert torch.allclose(out, expected, atol=1e-12, rtol=0)
    distance = (1 - end - mass) * (1 - (1 - mass) ** (tau - 1))
    assert float((out - q).abs().sum() / 2) == pytest.approx(float(distance), abs=1e-12)
    if tau == 1:
        assert torch.allclose(out, q, atol=1e-12, rtol=0)


class EveryDraw:
    """Part of a batch's state that VADUSA reads: a round behind a root, with a row for each
    combination of two values of every random number that is asked for; two codes, end 2."""

    eager, eos = True, 2
    sample, checked = staticmethod(sample), staticmethod(lambda samples: samples)

    def __init__(self, method, paths, probs):
        nodes = [(), *paths]
        numbers = (method.tau + 1) * len(nodes)
        self.values = torch.cartesian_prod(*[torch.tensor([0.25, 0.75])] * numbers).double()
        self.addresses: dict[tuple, int] = {}
        count = len(self.values)
        self.states = torch.stack([probs[node] for node in nodes]).expand(count, -1, -1)
        self.draft_tokens = torch.tensor([path[-1] for path in paths]).expand(count, -1)
        self.generated = self.draft_counts = torch.ones(count, dtype=torch.long)
        self.own = {"drawn_from": torch.zeros_like(self.states[:, 0])}
        self.shared, self.offsets = {"tree": method.tree}, torch.arange(len(nodes))

    def most(self, counts, bound):
        return bound

    def heads(self, states, count):
        return states[:, :, None]

    def probs(self, logits, positions):
        return logits

    def uniform(self, stream, positions):
        return self.further(stream, positions, 0)

    def further(self, stream, positions, number):
        asked = zip(
            positions[0].flatten().tolist(),
            torch.as_tensor(number).expand_as(positions[0]).flatten().tolist(),
            strict=True,
        )
        places = [self.addresses.setdefault((stream, *at), len(self.addresses)) for at in asked]
        return self.values[:, places].view(positions.shape)


def ends_in_a_round(paths, probs, tau):
    """Return, of each node of a tree of tokens that can be emitted, the probability that the end
    follows it, by enumerating all draws of a round."""
    method = Vadusa(tau, RankTree(paths))
    decision = method.keep(EveryDraw(method, paths, probs))
    found = {}
    for node in ((), *paths):
        emitted = decision.sizes > len(node)
        emitted &= (decision.tokens[:, : len(node)] == torch.tensor(node)).all(-1)
        if 2 not in node and emitted.any():
            found[node] = float((decision.tokens[emitted, len(node)] == 2).double().mean())
    return found


def halves(*tokens):
    """Return the distribution of which each of the tokens has half."""
    return torch.bincount(torch.tensor(tokens), minlength=3).double() / 2


SIBLINGS = ((0,), (1,), (0, 1), (1, 1))
SIBLINGS_AGAIN = ((0,), (1,), (0, 0), (1, 0))


@pytest.mark.parametrize("paths", [SIBLINGS, SIBLINGS_AGAIN])
def test_whether_a_sibling_leads_further_does_not_tell_whether_a_node_ends(paths):
    probs = {node: halves(0, 1) for node in [(), *paths]} | {(0,): halves(0, 2)}
    assert ends_in_a_round(paths, probs, 2)[0,] == 0.5


@pytest.mark.parametrize("seed", range(60))
def test_the_end_keeps_its_distribution_behind_every_node(seed):
    """The branch that leads furthest is chosen as if none ended: to prefer what goes on would
    starve the end."""
    rng = random.Random(seed)
    paths = [(), (0,), (1,)]
    while len(paths) < 5:
        longer = (*rng.choice(paths), rng.randrange(3))
        if 2 not in longer[:-1] and longer not in paths:
            paths.append(longer)
    paths = tuple(sorted(paths[1:], key=lambda path: (len(path), path)))
    probs = {node: halves(*rng.choice([(0, 1), (0, 2), (1, 2)])) for node in [(), *paths]}
    for node, ended in ends_in_a_round(paths, probs, 2).items():
        assert ended == probs[node][2], node


def test_tolerance_has_the_distribution_of_one_node():
    """tau = 3 on 6000 sampled pairs, among the three likeliest candidates for the second token."""
    model, tau = tiny_decoder(heads=2, seed=3), 3
    prompt, sampling = Prompt("u", (1, 2, 3), (4,)), SamplingConfig(max_tokens=2, temperature=1.5)
    children = model.heads.logits(states(model, prompt)[-1], 2)[-1].topk(3).indices.tolist()
    expected = sequence_distribution(
        model,
        prompt,
        sampling,
        2,
        lambda q, prompt, tokens: one_node_distribution(q, children, tau, EOS) if tokens else q,
    )
    drawn = decode(
        model,
        [prompt],
        Vadusa(tau, RankTree(((0,), (1,), (2,)))),
        sampling,
        seed=1,
        group_size=6000,
    )
    assert goodness(drawn, expected, EOS) > FALSE_ALARM
    assert sum(p * len(drawn) >= 10 for p in expected.values()) > 50
