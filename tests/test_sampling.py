"""Warp and position-addressed randomness: laws checked against definitions, draws by statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcar.errors import ConfigError
from dcar.sampling import STREAMS, SamplingConfig, sample, uniform, utterance_keys, warp

LOGITS = torch.tensor([[1.0, 3.0, 3.0, 0.0, -1.0]])


def test_warp_is_softmax_by_default():
    assert torch.allclose(warp(LOGITS, SamplingConfig()), LOGITS.softmax(-1))


def test_temperature_zero_takes_the_lowest_of_the_best():
    assert warp(LOGITS, SamplingConfig(temperature=0)).tolist() == [[0, 1, 0, 0, 0]]


def test_top_k_and_temperature():
    law = warp(LOGITS, SamplingConfig(temperature=0.5, top_k=3))[0]
    expected = torch.tensor([math.exp(2), math.exp(6), math.exp(6), 0, 0])
    assert torch.allclose(law, expected / expected.sum())


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    law = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    assert torch.allclose(warp(law.log(), SamplingConfig(top_p=0.5)), torch.tensor([[1.0, 0, 0, 0]]))
    assert torch.allclose(warp(law.log(), SamplingConfig(top_p=0.6)), torch.tensor([[0.625, 0.375, 0, 0]]))


def test_forbidden_eos_has_no_mass():
    law = warp(LOGITS.expand(2, -1), SamplingConfig(), torch.tensor([True, False]), eos=1)
    assert law[0, 1] == 0 and law[1, 1] > 0 and torch.allclose(law.sum(-1), torch.ones(2))


@pytest.mark.parametrize("bad", [dict(temperature=-1.0), dict(top_p=0.0), dict(top_k=-1), dict(max_tokens=0)])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        SamplingConfig(**bad)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=9).filter(lambda x: sum(x) > 0.01),
       st.floats(0, 1, exclude_max=True))
def test_sample_inverts_the_cumulative_law_and_never_draws_zero_mass(weights, u):
    law = torch.tensor([weights], dtype=torch.float64)
    index = int(sample(law, torch.tensor([u], dtype=torch.float64)))
    assert weights[index] > 0
    below, total = sum(weights[:index]), sum(weights)
    assert below <= u * total * (1 + 1e-12) + 1e-12
    assert u * total <= (below + weights[index]) * (1 + 1e-12) + 1e-12


def test_sample_at_the_very_end_of_the_law():
    law = torch.tensor([[0.3, 0.7, 0.0]])
    assert int(sample(law, torch.tensor([1 - 2.0**-53], dtype=torch.float64))) == 1


def test_draws_are_a_function_of_their_address_only():
    keys = utterance_keys(7, ["a", "b", "c"])
    position = torch.arange(5).expand(3, -1)
    together = uniform(keys, "token", position)
    alone = torch.cat([uniform(keys[i : i + 1], "token", position[i : i + 1, j : j + 1]) for i in range(3)
                       for j in range(5)]).view(3, 5)
    assert torch.equal(together, alone)
    assert torch.equal(utterance_keys(7, ["b"]), keys[1:2])
    assert torch.equal(uniform(keys, "token", torch.tensor([4, 4, 4])), together[:, 4])


def test_streams_seeds_positions_and_draws_are_independent_and_uniform():
    """2 x 10^5 numbers a stream. Bounds are six standard errors: false alarm below 1e-7 in all checks together."""
    n = 200_000
    names = [f"utt{i}" for i in range(200)]
    position = torch.arange(1000).expand(200, -1)
    drawn = {stream: uniform(utterance_keys(0, names), stream, position).flatten() for stream in STREAMS}
    drawn["other seed"] = uniform(utterance_keys(1, names), "token", position).flatten()
    drawn["other draw"] = uniform(utterance_keys(0, names), "token", position, 1).flatten()
    for u in drawn.values():
        assert 0 <= u.min() and u.max() < 1
        assert abs(u.mean() - 0.5) < 6 / math.sqrt(12 * n)
        counts = torch.histc(u, 50, 0, 1)
        chi2 = float(((counts - n / 50) ** 2 / (n / 50)).sum())
        assert chi2 < 49 + 6 * math.sqrt(98)
        table = u.view(200, 1000)
        neighbours = torch.stack((table[:, :-1].flatten(), table[:, 1:].flatten()))
        assert abs(torch.corrcoef(neighbours)[0, 1]) < 6 / math.sqrt(n)
    correlation = torch.corrcoef(torch.stack(list(drawn.values()))).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(n)
