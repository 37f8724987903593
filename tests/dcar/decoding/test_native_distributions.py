"""Distributions, draws and whole decisions in C: as the reference has them, row by row alike, and given up where a row
has no distribution."""

import pytest
import torch

from dcar.decoding.cpu.backend import MOST_KEPT, CPUBackend
from dcar.decoding.cpu.native import Kernels
from dcar.decoding.policy import PolicyReader
from dcar.sampling import SamplingConfig, sample_several, warp
from heads.policy import ChunkPolicy, ChunkPolicyConfig

IDS = 1025  # no multiple of the lanes
EOS = IDS - 1
SAMPLINGS = [SamplingConfig(temperature, top_k) for temperature in (0.0, 0.4, 1.0, 1.3)
             for top_k in (0, 1, 10, MOST_KEPT, IDS, 4000)]


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


def draw(own: Kernels, *what) -> torch.Tensor | None:
    """Probabilities, or tokens with numbers, by the kernels; None where they leave it to the reference."""
    return CPUBackend(own)._draw(*what)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("config", SAMPLINGS, ids=lambda c: f"{c.temperature}-{c.top_k}")
def test_distributions_and_draws_are_those_of_the_reference(own32, config, ties):
    logits, forbidden, u = given(ties=ties)
    for where in (None, forbidden):
        probs, wanted = draw(own32, logits, config, where, EOS), warp(logits, config, where, EOS)
        assert probs is not None and probs.shape == wanted.shape
        assert torch.allclose(probs, wanted, atol=1e-6, rtol=1e-6)
        assert not bool(((probs > 0) != (wanted > 0))[wanted > 1e-30].any())  # the same ids are kept, also among equals
        assert torch.equal(draw(own32, logits, config, where, EOS, u), sample_several(wanted, u))


@pytest.mark.parametrize("config", SAMPLINGS, ids=lambda c: f"{c.temperature}-{c.top_k}")
def test_the_last_number_draws_one_of_the_last_ids_with_mass(own32, config):
    logits, forbidden, u = given()
    token = draw(own32, logits, config, forbidden, EOS, torch.full_like(u, 1 - 2**-53))[..., :1]
    probs = warp(logits, config, forbidden, EOS).double()
    behind = probs.flip(-1).cumsum(-1).flip(-1) - probs
    assert bool((probs.gather(-1, token) > 0).all()) and behind.gather(-1, token).max() < 1e-14


def test_draws_have_the_distribution(own32):
    """Chi-square of 40,000 candidates from a distribution of ten."""
    config = SamplingConfig(0.7, 10)
    logits = 2 * torch.randn(1, IDS, generator=torch.Generator().manual_seed(3))
    u = torch.rand(1, 40_000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    count = draw(own32, logits, config, None, EOS, u)[0].bincount(minlength=IDS)
    expected = 40_000 * warp(logits, config)[0]
    kept = expected > 0
    assert kept.sum() == 10 and count[~kept].sum() == 0
    assert ((count - expected)[kept] ** 2 / expected[kept]).sum() < 27.9  # p = 0.001 at nine degrees of freedom


@pytest.mark.parametrize("config", [SamplingConfig(0.4, 10), SamplingConfig(1.0), SamplingConfig(0.0)],
                         ids=lambda c: f"{c.temperature}-{c.top_k}")
def test_a_row_does_not_depend_on_its_company(own32, config, monkeypatch):
    logits, forbidden, u = given()
    together = [draw(own32, logits, config, forbidden, EOS),
                draw(own32, logits, config, forbidden, EOS, u)]
    for b in range(3):
        one, banned = logits[b : b + 1], forbidden[b : b + 1]
        assert torch.equal(draw(own32, one, config, banned, EOS)[0], together[0][b])
        assert torch.equal(draw(own32, one, config, banned, EOS, u[b : b + 1])[0], together[1][b])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    many = logits.repeat(8, 1, 1), forbidden.repeat(8, 1), u.repeat(8, 1, 1)  # more than stays on one thread
    assert torch.equal(draw(own32, many[0], config, many[1], EOS, many[2])[-3:], together[1])


def test_distributions_of_bfloat16():
    own, (logits, forbidden, u) = Kernels(torch.bfloat16), given()
    logits = logits.bfloat16()  # which has many equals
    for config in SAMPLINGS[6:12]:
        wanted = warp(logits, config, forbidden, EOS)
        assert torch.allclose(draw(own, logits, config, forbidden, EOS), wanted, atol=1e-6, rtol=1e-6)
        assert torch.equal(draw(own, logits, config, forbidden, EOS, u), sample_several(wanted, u))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_is_left_to_the_reference(own32, wrong, monkeypatch):
    logits, _, u = given()
    logits[1, 3, 7] = wrong
    config = SamplingConfig(0.4, 10)
    assert draw(own32, logits, config, None, EOS) is None
    assert draw(own32, logits, config, None, EOS, u) is None
    backend, wanted = CPUBackend(own32), sample_several(warp(logits, config), u)
    drawn, valid = backend.tokens(logits, u, config, None, EOS)
    assert not valid and torch.equal(drawn, wanted) and (drawn[1, 3] > EOS).all()
    assert backend.probs(logits, config, None, EOS)[1, 3].isnan().any()
    policy = policy_of(backend, 4, 16)
    hidden = torch.randn(3, SIZE)
    assert policy.decide(hidden, logits, u, config, None, EOS, 0.0) is None
    logits[1, 3, 7] = 0.0
    assert policy.decide(hidden, logits, u, config, None, EOS, 0.0) is not None
    hidden[1, 0] = wrong  # and what the chunk scorer makes of it
    assert policy.decide(hidden, logits, u, config, None, EOS, 0.0) is None


@pytest.mark.parametrize("config", [SamplingConfig(1.0, 0, 0.9), SamplingConfig(1.0, MOST_KEPT + 1),
                                    SamplingConfig(1.0, repetition_window=10)], ids=["top-p", "top-k", "window"])
def test_samplings_that_are_left_to_the_reference(own32, config):
    logits, forbidden, u = given()
    assert draw(own32, logits, config, forbidden, EOS, u) is None
    history = torch.full((3, 16, 10), -1)
    assert torch.equal(CPUBackend(own32).probs(logits, config, forbidden, EOS, history),
                       warp(logits, config, forbidden, EOS, history))
    few = logits[:1, ..., :MOST_KEPT].contiguous()
    assert draw(own32, few, SamplingConfig(1.0, MOST_KEPT + 1), None, 0) is not None  # all are kept


SIZE = 24


def policy_of(backend: CPUBackend, several: int, reach: int) -> PolicyReader:
    """Several candidates need a chunk scorer, which is float32 beside a decoder of any type."""
    torch.manual_seed(several)
    scorer = dict(chunk_scorer_width=16, chunk_scorer_embedding=8, chunk_scorer_ids=IDS) if several > 1 else {}
    policy = ChunkPolicy(ChunkPolicyConfig(SIZE, 16, reads="candidates", sizes=tuple(range(3, reach + 1)), **scorer))
    torch.nn.init.normal_(policy.scores.linear.weight, std=0.2)
    return PolicyReader(policy.eval(), backend, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("several", "reach", "dial"), [(1, 16, 0.0), (4, 16, -0.7), (3, 9, 0.0)])
def test_a_decision_is_that_of_the_reference(own, several, reach, dial):
    logits, forbidden, u = given()
    logits, forbidden, u = logits[:, :reach].to(own.dtype), forbidden[:, :reach], u[:, :reach, :several]
    logits[0, 1, 1:] = -torch.inf  # one token alone: no entropy
    u[1, 4:6] = 0.5  # the same token in all candidates
    hidden, fused = torch.randn(3, SIZE).to(own.dtype), policy_of(CPUBackend(own), several, reach)
    policy = fused.policy
    for config in (SamplingConfig(1.0), SamplingConfig(0.4, 10), SamplingConfig(0.0)):
        for where in (None, forbidden):
            made = fused.decide(hidden, logits, u, config, where, EOS, dial)
            assert made is not None
            tokens = sample_several(warp(logits, config, where, EOS), u).mT
            seen = policy.candidate_features(hidden, logits, tokens)
            wanted = policy.log_probs(None, seen, dial)
            assert torch.equal(made.tokens, tokens) and made.candidates.dtype == torch.float32
            assert torch.allclose(made.candidates, seen, atol=1e-5, rtol=1e-5) and seen[0, 0, 1, 2].abs() < 1e-6
            possible = wanted > -1e6
            assert torch.equal(possible[0].view(several, 16).any(0), ~policy.unused)
            assert torch.allclose(made.log_probs[possible], wanted[possible], atol=1e-4)
            assert bool((made.log_probs[~possible] < -1e8).all())
            sizes, taken, chosen = made.likeliest
            best = made.log_probs.argmax(-1)
            assert torch.equal(chosen * 16 + sizes - 1, best)
            assert torch.equal(taken, made.log_probs.gather(1, best[:, None])[:, 0])
            alone = fused.decide(hidden[1:2], logits[1:2], u[1:2], config, None if where is None else where[1:2], EOS,
                                 dial)  # a row does not depend on its company
            for one, many in zip((*alone[:3], *alone.likeliest), (*made[:3], *made.likeliest), strict=True):
                assert torch.equal(one, many[1:2])
    with pytest.raises(ValueError, match="do not fit"):
        fused.decide(hidden, logits[:, 1:], u[:, 1:], config, None, EOS, dial)
