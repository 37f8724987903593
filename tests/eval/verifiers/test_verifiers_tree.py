"""VADUSA: trees of drafts, acceptance among tau samples, losslessness at tau = 1."""

import itertools

import pytest
import torch
from tiny_decoders import states, tiny_decoder
from tiny_verifiers import FALSE_ALARM, goodness, sequence_distribution

from dcar.decoding import Prompt, decode
from dcar.decoding.tree import DraftTree
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from eval.verifiers.vadusa import RankTree, Vadusa, accept, build_tree, expected_accepted

EOS = 12  # of tiny_decoder


# --------------------------------------------------------------------------------------------------


def test_tree_shapes_that_cannot_be():
    for parents in ([], [0], [-1, 2, 0], [-2]):
        with pytest.raises(ValueError, match="node|parent"):
            DraftTree(parents)


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


# --------------------------------------------------------------------------------------------------


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


DEEP = ((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1))
OTHER_DEEP = ((0,), (1,), (2,), (0, 2), (0, 1), (1, 1))  # with the end, 2, among the candidates


def ends_in_a_round(paths, all_probs, tau):
    """Probability that each node of a tree of tokens is emitted, and that the end follows it, by
    enumerating all draws of a round: two codes, end 2, distributions by the tokens before."""
    tree = DraftTree([paths.index(p[:-1]) if p[:-1] else -1 for p in paths])
    nodes, options = [(), *paths], []
    for node in nodes:
        probs = all_probs[node]
        if any(p[:-1] == node for p in paths):
            rows = [
                (*s, u, probs[list(s)].prod() * probs[u] / probs[:2].sum())
                for s in itertools.product(range(3), repeat=tau)
                for u in range(2)
            ]
        else:  # nothing is compared with its samples; the first is the next root
            rows = [(*[s] * tau, 0, probs[s]) for s in range(3)]
        options.append(torch.tensor(rows, dtype=torch.float64))
    index = torch.cartesian_prod(*[torch.arange(len(o)) for o in options])
    # [N, 1 + m, tau + 2]
    draws = torch.stack([o[i] for o, i in zip(options, index.T, strict=True)], dim=1)
    weight = draws[..., -1].prod(-1)
    samples = draws[..., :tau].long()
    unended = draws[..., tau].long()
    tokens = torch.tensor([p[-1] for p in paths])
    path, counts = accept(tokens.expand(len(index), -1), samples, tree, 2, unended)
    found = {}
    for node in nodes:
        place = nodes.index(node)
        on_path = (
            counts >= len(node)
            if not node
            else (counts >= len(node)) & (path[:, len(node) - 1] == place - 1)
        )
        if not (2 in node or on_path.sum() == 0):
            child = tokens[path[:, min(len(node), tree.depth - 1)]]
            following = torch.where(counts > len(node), child, samples[:, place, 0])
            found[node] = (
                float(weight[on_path].sum()),
                float(weight[on_path & (following == 2)].sum()),
            )
    return found


@pytest.mark.parametrize("paths", [DEEP, OTHER_DEEP])
def test_the_end_keeps_its_distribution_behind_every_node_of_a_deep_tree(paths):
    """The branch that leads furthest is chosen as if none ended: to prefer what goes on would
    starve the end."""
    rng = torch.Generator().manual_seed(0)
    all_probs = {
        node: 0.1 + torch.rand(3, dtype=torch.float64, generator=rng) for node in [(), *paths]
    }
    all_probs |= {(0, 0): torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)}
    all_probs = {node: probs / probs.sum() for node, probs in all_probs.items()}
    found = ends_in_a_round(paths, all_probs, 2)
    assert len(found) == sum(2 not in p for p in paths) + 1
    for node, (reached, ended) in found.items():
        assert ended / reached == pytest.approx(float(all_probs[node][2]), abs=1e-12), node


# --------------------------------------------------------------------------------------------------


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


def test_a_tree_of_worthless_ranks_is_refused():
    with pytest.raises(ConfigError, match="rank .*accuracy 0"):
        build_tree(torch.zeros(2, 2), 3)
