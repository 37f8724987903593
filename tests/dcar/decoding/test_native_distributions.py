"""Distributions, draws, what is seen of candidates, and the distribution of a decision, in C: as the reference has
them, row by row alike, and given up where a row has no distribution."""

from __future__ import annotations

import os

import pytest
import torch

from dcar.decoding.fast import distributions as module
from dcar.decoding.fast.cpu.native import Kernels
from dcar.decoding.fast.distributions import MOST_KEPT, decision, features, native_probs, native_tokens, takes
from dcar.decoding.fast.policy import FusedEnds
from dcar.sampling import SamplingConfig, sample_several, warp
from heads.candidates import EndScores, candidate_features, dialled, joint_log_probs
from heads.policy import NEVER

IDS = 1025  # no multiple of the lanes
EOS = IDS - 1
# without AVX-512, too
VARIANTS = [(), ("-mno-avx512f",)] if os.uname().machine == "x86_64" else [()]
SAMPLINGS = [SamplingConfig(temperature, top_k) for temperature in (0.0, 0.4, 1.0, 1.3)
             for top_k in (0, 1, 10, MOST_KEPT, IDS, 4000)]


@pytest.fixture(params=VARIANTS, ids=lambda flags: " ".join(flags) or "native")
def own(request) -> Kernels:
    return Kernels(torch.float32, request.param)


def given(seed: int = 0, ties: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [3, 16, V], of which some are minus infinity; where the end is forbidden; numbers of four candidates."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, 16, IDS, generator=generator)
    if ties:  # among the largest, too
        logits = logits.round()
    logits[0, 0, ::2], logits[1, 2, EOS], logits[2, 3, :-1] = -torch.inf, 40.0, -torch.inf
    forbidden = torch.rand(3, 16, generator=generator) < 0.3
    forbidden[1, 2] = forbidden[2, 3] = True  # the likeliest, and the only one
    u = torch.rand(3, 16, 4, generator=generator, dtype=torch.float64)
    u[0, :, 0] = 0.0
    return logits, forbidden, u


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("config", SAMPLINGS, ids=lambda c: f"{c.temperature}-{c.top_k}")
def test_distributions_and_draws_are_those_of_the_reference(own, config, ties):
    logits, forbidden, u = given(ties=ties)
    for where in (None, forbidden):
        probs, wanted = native_probs(own, logits, config, where, EOS), warp(logits, config, where, EOS)
        assert probs is not None and probs.shape == wanted.shape
        assert torch.allclose(probs, wanted, atol=1e-6, rtol=1e-6)
        assert not bool(((probs > 0) != (wanted > 0))[wanted > 1e-30].any())  # the same ids are kept, also among equals
        assert torch.equal(native_tokens(own, logits, u, config, where, EOS), sample_several(wanted, u))


@pytest.mark.parametrize("config", SAMPLINGS, ids=lambda c: f"{c.temperature}-{c.top_k}")
def test_the_last_number_draws_one_of_the_last_ids_with_mass(own, config):
    logits, forbidden, u = given()
    token = native_tokens(own, logits, torch.full_like(u, 1 - 2**-53), config, forbidden, EOS)[..., :1]
    probs = warp(logits, config, forbidden, EOS).double()
    behind = probs.flip(-1).cumsum(-1).flip(-1) - probs
    assert bool((probs.gather(-1, token) > 0).all()) and behind.gather(-1, token).max() < 1e-14


def test_draws_have_the_distribution(own):
    """Chi-square of 40,000 candidates from a distribution of ten."""
    config = SamplingConfig(0.7, 10)
    logits = 2 * torch.randn(1, IDS, generator=torch.Generator().manual_seed(3))
    u = torch.rand(1, 40_000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    count = native_tokens(own, logits, u, config, None, EOS)[0].bincount(minlength=IDS)
    expected = 40_000 * warp(logits, config)[0]
    kept = expected > 0
    assert kept.sum() == 10 and count[~kept].sum() == 0
    assert ((count - expected)[kept] ** 2 / expected[kept]).sum() < 27.9  # p = 0.001 at nine degrees of freedom


@pytest.mark.parametrize("config", [SamplingConfig(0.4, 10), SamplingConfig(1.0), SamplingConfig(0.0)],
                         ids=lambda c: f"{c.temperature}-{c.top_k}")
def test_a_row_does_not_depend_on_its_company(own, config, monkeypatch):
    logits, forbidden, u = given()
    tokens = native_tokens(own, logits, u, config, forbidden, EOS).mT.contiguous()
    together = native_probs(own, logits, config, forbidden, EOS), tokens.mT, features(own, logits, tokens)
    for b in range(3):
        one, banned = logits[b : b + 1], forbidden[b : b + 1]
        assert torch.equal(native_probs(own, one, config, banned, EOS)[0], together[0][b])
        assert torch.equal(native_tokens(own, one, u[b : b + 1], config, banned, EOS)[0], together[1][b])
        assert torch.equal(features(own, one, tokens[b : b + 1])[0], together[2][b])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    many = logits.repeat(8, 1, 1), forbidden.repeat(8, 1), u.repeat(8, 1, 1)  # more than stays on one thread
    assert torch.equal(native_tokens(own, many[0], many[2], config, many[1], EOS)[-3:], together[1])
    assert torch.equal(features(own, many[0], tokens.repeat(8, 1, 1))[-3:], together[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("several", [1, 4])
def test_what_is_seen_of_candidates(several, dtype):
    generator = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(3, 16, IDS, generator=generator)).to(dtype)
    logits[0, 0, 1:] = -torch.inf  # one token alone: no entropy
    logits[0, 1, ::3] = -torch.inf
    tokens = torch.randint(0, IDS, (3, several, 16), generator=generator)
    seen = features(Kernels(dtype), logits, tokens)
    assert seen.dtype == torch.float32
    assert torch.allclose(seen, candidate_features(logits, tokens), atol=5e-6, rtol=1e-5)
    assert seen[..., 0].min() == -8 and seen[0, 0, 0, 2].abs() < 1e-6  # unlikely ones say the same


def test_distributions_of_bfloat16():
    own, (logits, forbidden, u) = Kernels(torch.bfloat16), given()
    logits = logits.bfloat16()  # which has many equals
    for config in SAMPLINGS[6:12]:
        wanted = warp(logits, config, forbidden, EOS)
        assert torch.allclose(native_probs(own, logits, config, forbidden, EOS), wanted, atol=1e-6, rtol=1e-6)
        assert torch.equal(native_tokens(own, logits, u, config, forbidden, EOS), sample_several(wanted, u))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_is_left_to_the_reference(own, wrong, monkeypatch):
    logits, _, u = given()
    logits[1, 3, 7] = wrong
    tokens = torch.zeros(3, 4, 16, dtype=torch.long)
    config = SamplingConfig(0.4, 10)
    assert native_probs(own, logits, config, None, EOS) is None
    assert native_tokens(own, logits, u, config, None, EOS) is None
    assert features(own, logits, tokens) is None
    assert features(own, torch.zeros(3, 16, IDS), tokens + IDS) is None  # no id
    monkeypatch.setattr(module, "kernels", lambda dtype: own)
    drawn, probs = module.tokens_of(logits, u, config, None, EOS)
    assert probs is not None and not probs[1, 3].sum() > 0 and torch.equal(drawn, sample_several(probs, u))
    assert torch.equal(module.probs_of(logits, config, None, EOS).isnan(), probs.isnan())
    assert torch.equal(module.features_of(logits, tokens).isnan(), candidate_features(logits, tokens).isnan())


@pytest.mark.parametrize("config", [SamplingConfig(1.0, 0, 0.9), SamplingConfig(1.0, MOST_KEPT + 1),
                                    SamplingConfig(1.0, repetition_window=10)], ids=["top-p", "top-k", "window"])
def test_samplings_that_are_left_to_the_reference(config):
    logits, forbidden, _ = given()
    assert not takes(config, IDS) and module.kernels_of(logits, config) is None
    history = torch.full((3, 16, 10), -1)
    assert torch.equal(module.probs_of(logits, config, forbidden, EOS, history),
                       warp(logits, config, forbidden, EOS, history))
    assert takes(SamplingConfig(1.0, MOST_KEPT + 1), MOST_KEPT)  # all are kept


@pytest.mark.parametrize("dial", [0.0, -0.7])
@pytest.mark.parametrize(("several", "reach"), [(1, 16), (4, 16), (3, 9)])
def test_the_distribution_of_a_decision(own, several, reach, dial, monkeypatch):
    torch.manual_seed(several)
    actions, scores = 16, EndScores(4)
    torch.nn.init.normal_(scores.linear.weight, std=0.2)
    unused = torch.tensor([size < 3 or size > reach for size in range(1, actions + 1)])
    ends = FusedEnds(scores, unused, reach)
    ends.load(scores)
    candidates = torch.randn(5, several, reach, 4)
    made = torch.nn.functional.pad(scores(candidates), (0, actions - reach), value=NEVER).masked_fill(unused, NEVER)
    wanted = joint_log_probs(dialled(made, dial), candidates)
    got = decision(own, candidates, ends._weight, ends._bias, actions, dial)
    possible = ~unused.repeat(several)
    assert torch.allclose(got[:, possible], wanted[:, possible], atol=2e-5) and bool((got[:, ~possible] < -1e8).all())
    asked: list[int] = []
    monkeypatch.setattr("dcar.decoding.fast.policy.decision",
                        lambda *given: asked.append(1) or decision(*given))
    assert torch.allclose(ends.log_probs(candidates, dial)[:, possible], wanted[:, possible], atol=2e-5) and asked
    candidates[2, 0, 1, 0] = torch.nan  # one score that is no number leaves no distribution
    got = decision(own, candidates, ends._weight, ends._bias, actions, dial)
    assert bool(got[2].isnan().all()) and not bool(got[[0, 1, 3, 4]].isnan().any())
