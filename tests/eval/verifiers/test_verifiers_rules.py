"""One step of each acceptance rule: its distribution by enumeration, and what the code draws by
statistics."""

import math

import pytest
import torch
from scipy import stats
from tiny_verifiers import FALSE_ALARM, rule_of
from torch import Tensor

from dcar.sampling import SamplingConfig, sample, uniform, warp
from eval.verifiers import pcg, sd, ssd
from eval.verifiers.chain import Uniforms
from eval.verifiers.drafters import HeadDrafter
from eval.verifiers.pcg import TokenGroups, build_groups
from eval.verifiers.topk_verify import among_likeliest
from eval.verifiers.typical import threshold

VOCABULARY = 6
EOS = VOCABULARY - 1
SAMPLINGS = [SamplingConfig(), SamplingConfig(temperature=0.6, top_k=4), SamplingConfig(top_p=0.8)]


def random_distributions(
    seed: int, sampling: SamplingConfig = SAMPLINGS[0], size: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Target distribution q and draft distribution p [V], float64; warped, so that some tokens
    are impossible in one or both."""
    generator = torch.Generator().manual_seed(seed)
    q, p = (warp(1.5 * torch.randn(size, generator=generator), sampling).double() for _ in range(2))
    return q / q.sum(), p / p.sum()


def distance(a: Tensor, b: Tensor) -> float:
    """Total variation."""
    return float((a - b).abs().sum() / 2)


def assert_drawn_from(tokens: Tensor, probs: Tensor) -> None:
    """Chi-square of the tokens against the distribution; what is impossible must not occur."""
    counts = tokens.bincount(minlength=len(probs)).double()
    assert counts[probs <= 1e-12].sum() == 0
    possible = probs > 1e-12
    assert (
        stats.chisquare(
            counts[possible], len(tokens) * probs[possible] / probs[possible].sum()
        ).pvalue
        > FALSE_ALARM
    )


class Numbers:
    """What a rule asks of the state of a batch: random numbers, here of `count` utterances;
    eager: shapes may follow data, as on a CPU."""

    sample = staticmethod(sample)

    def __init__(self, count: int, eager: bool = True):
        self.eager = eager
        self.shared: dict[str, TokenGroups] = {}
        self.keys = torch.randint(
            -(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0)
        )

    def uniform(self, stream: str, positions: Tensor) -> Tensor:
        return uniform(self.keys, stream, positions)

    def further(self, stream: str, positions: Tensor, number: int | Tensor) -> Tensor:
        return uniform(self.keys, stream, positions, number)

    def most(self, counts: Tensor, bound: int) -> int:
        return min(int(counts.max()), bound) if self.eager else bound


def numbers_of(count: int, eager: bool = True) -> Uniforms:
    return Uniforms(Numbers(count, eager), torch.full((count,), 7))


def first_tokens(
    kind: str, groups: TokenGroups, q: Tensor, p: Tensor, count: int, eager: bool = True
) -> tuple[Tensor, Tensor]:
    """The token that a draft of one leaves at its position, and whether the draft was accepted,
    `count` times."""
    method, draws = rule_of(kind, HeadDrafter(1), groups), numbers_of(count, eager)
    draws.state.shared["groups"] = groups
    q, p = q.expand(count, -1), p.expand(count, -1)
    x = sample(p, draws("token"))
    of_draft = Uniforms(draws.state, draws.positions[:, None])
    accepted = method.accept(q[:, None], p[:, None], x[:, None], EOS, of_draft)[:, 0]
    return torch.where(accepted, x, method.following(q, p, x, EOS, draws, ~accepted)), accepted


# --- SD and SSD -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seed", range(20))
def test_distribution_of_one_sd_step_is_the_targets(seed, sampling):
    q, p = random_distributions(seed, sampling)
    drawn = p > 0
    accepted = torch.zeros_like(p)
    accepted[drawn] = p[drawn] * sd.acceptance(q[drawn], p[drawn])
    assert float(accepted.sum()) == pytest.approx(1 - distance(p, q), abs=1e-12)
    assert torch.allclose(
        accepted + (1 - accepted.sum()) * sd.residual(q, p), q, atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("seed", range(10))
def test_tolerance_buys_acceptance_with_the_same_amount_of_total_variation(seed):
    q, p = random_distributions(seed)
    before = 0.0
    for beta in (0.0, 0.1, 0.25, 0.4, 0.8, 1.0, 1.7):
        accepted = p * ssd.tolerant(q, p, beta)
        rate = float(accepted.sum())
        out = accepted + (1 - accepted.sum()) * sd.residual(q, p)
        gained = rate - float((p * sd.acceptance(q, p)).sum())
        assert distance(out, q) == pytest.approx(gained, abs=1e-12) and gained <= beta + 1e-12
        assert rate >= before  # monotone in beta
        before = rate
    assert torch.allclose(out, p, atol=1e-12)  # beta >= 1: the draft alone


# --- what the methods draw, against their distributions -------------------------------------------


def expected_distribution(kind: str, q: Tensor, p: Tensor, groups: TokenGroups) -> Tensor:
    """The distribution of the emitted token, in plain loops over the notes' formulas."""
    size = len(q)
    q, p = q.tolist(), p.tolist()
    excess = [max(0.0, a - b) for a, b in zip(q, p, strict=True)]
    residual = [e / sum(excess) for e in excess] if sum(excess) else q
    ratio = [min(1.0, q[x] / p[x]) if p[x] else 0.0 for x in range(size)]
    if kind == "sd":
        return torch.tensor(q, dtype=torch.float64)
    if kind in ("ssd", "ssd-eos"):
        accept = [
            min(1.0, ratio[x] + (0.4 if x != EOS or kind == "ssd-eos" else 0.0))
            for x in range(size)
        ]
        behind = [residual] * size
    elif kind == "pcg":
        members = [
            groups.group_tokens[a:b].tolist()
            for a, b in zip(groups.group_start, groups.group_start[1:], strict=False)
        ]
        of = [[k for k in range(len(members)) if t in members[k]] for t in range(size)]
        q_c, p_c = (
            [sum(probs[t] / len(of[t]) for t in ids) for ids in members] for probs in (q, p)
        )
        accept = [
            sum(min(1.0, q_c[k] / p_c[k]) if p_c[k] else 0.0 for k in of[x]) / len(of[x])
            for x in range(size)
        ]
        over = [max(0.0, a - b) for a, b in zip(q_c, p_c, strict=True)]
        behind = [
            [
                sum(over[k] / sum(over) * q[t] / len(of[t]) / q_c[k] for k in of[t] if q_c[k])
                for t in range(size)
            ]
        ] * size
    else:
        if kind == "typical":
            entropy = -sum(a * math.log(a) for a in q if a)
            fits = [q[x] > min(0.09, 0.3 * math.exp(-entropy)) for x in range(size)]
        else:
            fits = [q[x] > 0 and sum(a > q[x] for a in q) < 2 for x in range(size)]
        accept = [ratio[x] if x == EOS else float(fits[x]) for x in range(size)]
        behind = [residual if x == EOS else q for x in range(size)]
    out = [
        p[t] * accept[t] + sum(p[x] * (1 - accept[x]) * behind[x][t] for x in range(size))
        for t in range(size)
    ]
    return torch.tensor(out, dtype=torch.float64)


def small_groups(seed: int = 3) -> TokenGroups:
    """Groups of five codes that overlap, and EOS."""
    embedding = torch.randn(EOS, 3, generator=torch.Generator().manual_seed(seed))
    return build_groups(embedding, 0.2)


KINDS = ["sd", "ssd", "ssd-eos", "pcg", "typical", "topk"]


@pytest.mark.parametrize(("kind", "eager"), [*((k, True) for k in KINDS), ("pcg", False)])
@pytest.mark.parametrize("seed", [1, 2, 5])
def test_emitted_token_has_the_distribution_of_the_rule(kind, eager, seed):
    q, p = random_distributions(seed, SAMPLINGS[seed % 3])
    groups = small_groups()
    tokens, accepted = first_tokens(kind, groups, q, p, 60_000, eager)
    assert_drawn_from(tokens, expected_distribution(kind, q, p, groups))
    assert 0 < accepted.sum() < len(accepted)


@pytest.mark.parametrize(
    ("kind", "late", "early"),
    [
        ("sd", 0.3, 0.05),
        ("pcg", 0.3, 0.05),  # kept
        # starved where the draft ends late; the paper's rule rushes, too
        ("ssd", 0.075, 0.05),
        ("ssd-eos", 0.075, 0.17),
        ("typical", 0.05, 0.05),
        ("topk", 0.05, 0.05),
    ],
)
def test_what_becomes_of_the_end_of_speech(kind, late, early):
    """The figures of docs/methods.md: a draft that ends too seldom, and the same two
    distributions exchanged."""
    often = torch.tensor([0.3875, 0.3125, 0, 0, 0, 0.3], dtype=torch.float64)
    seldom = torch.tensor([0.3875, 0.5625, 0, 0, 0, 0.05], dtype=torch.float64)
    groups = small_groups()
    for q, p, expected in ((often, seldom, late), (seldom, often, early)):
        assert float(expected_distribution(kind, q, p, groups)[EOS]) == pytest.approx(
            expected, abs=1e-9
        )
        tokens, _ = first_tokens(kind, groups, q, p, 20_000)
        assert float((tokens == EOS).double().mean()) == pytest.approx(expected, abs=0.02)


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_group_distribution_is_the_targets_and_rejection_is_total_variation(seed):
    q, p = random_distributions(seed, SAMPLINGS[seed % 3])
    groups = small_groups(seed)
    q_c, p_c = (pcg.coarse(pcg.group_share(probs[None], groups), groups)[0] for probs in (q, p))
    assert float(q_c.sum()) == pytest.approx(1, abs=1e-12) and float(p_c.sum()) == pytest.approx(
        1, abs=1e-12
    )
    asked = pcg.group_mass(
        [q[None], p[None]], torch.arange(groups.count)[None], groups, groups.largest
    )
    assert torch.allclose(asked[0][0], q_c, atol=1e-12) and torch.allclose(
        asked[1][0], p_c, atol=1e-12
    )
    accepted = torch.where(p_c > 0, p_c * sd.acceptance(q_c, p_c.clamp(min=1e-300)), 0.0)
    refused = 1 - float(accepted.sum())
    assert refused == pytest.approx(distance(q_c, p_c), abs=1e-12)
    assert distance(q_c, p_c) <= distance(q, p) + 1e-12  # never accepts less than SD
    probs = pcg.enumerated_residual(q[None], p[None], groups)[0]
    assert float(probs.sum()) == pytest.approx(1, abs=1e-9)
    # the group of the emitted token: kept where accepted, drawn from the residual where not
    assert torch.allclose(accepted + refused * sd.residual(q_c, p_c), q_c, atol=1e-12)


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_thinning_draws_from_the_enumerated_residual(seed):
    q, p = random_distributions(seed)
    groups = small_groups(seed)
    count = 40_000
    refused = torch.ones(count, dtype=torch.bool)
    tokens, trials = pcg.thinned_residual(
        q.expand(count, -1), p.expand(count, -1), groups, numbers_of(count), refused
    )
    done = trials <= pcg.TRIALS
    assert_drawn_from(tokens[done], pcg.enumerated_residual(q[None], p[None], groups)[0])
    q_c, p_c = (pcg.coarse(pcg.group_share(probs[None], groups), groups)[0] for probs in (q, p))
    success = distance(q_c, p_c)  # of one trial
    for trial in (1, 2, 5):
        reached = int((trials >= trial).sum())
        passed = int((trials == trial).sum())
        assert stats.binomtest(passed, reached, success).pvalue > FALSE_ALARM
    assert int((~done).sum()) <= stats.binom.isf(FALSE_ALARM, count, (1 - success) ** pcg.TRIALS)


def test_singletons_and_zero_tolerance_are_sd_and_one_group_is_the_draft():
    q, p = random_distributions(5)
    embedding = torch.randn(EOS, 3, generator=torch.Generator().manual_seed(0))
    single, one = build_groups(embedding, 1.0), build_groups(embedding.abs(), -0.999)
    assert single.count == VOCABULARY and one.count == 2
    exact, accepted = first_tokens("sd", single, q, p, 40_000)
    tokens, same = first_tokens("ssd-0", single, q, p, 40_000)
    assert torch.equal(accepted, same) and torch.equal(tokens, exact)
    tokens, same = first_tokens("pcg", single, q, p, 40_000)
    # decision by decision; the replacements are other draws of the same distribution
    assert torch.equal(accepted, same) and torch.equal(tokens[same], exact[same])
    assert_drawn_from(tokens, q)
    tokens, accepted = first_tokens("pcg", one, q, p, 40_000)
    refused = int((~accepted).sum())  # only EOS tells the two groups apart
    assert stats.binomtest(refused, 40_000, abs(float(q[EOS] - p[EOS]))).pvalue > FALSE_ALARM
    codes = tokens[accepted & (tokens != EOS)]
    assert_drawn_from(
        codes, torch.cat((p[:EOS] / p[:EOS].sum(), torch.zeros(1, dtype=torch.float64)))
    )


# --- the relaxed rules ----------------------------------------------------------------------------


def test_typical_threshold_by_hand():
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0, 0, 0]])
    # exp(-H) is 1/4 and 1
    assert threshold(q, 0.09, 0.3).tolist() == pytest.approx([0.3 / 4, 0.09])


def test_among_likeliest_prefers_lower_ids_among_equals_and_refuses_the_impossible():
    q = torch.tensor([0.4, 0.3, 0.3, 0.0])
    hits = {k: [bool(among_likeliest(q, torch.tensor(x), k)) for x in range(4)] for k in (1, 2, 9)}
    assert hits == {
        1: [True, False, False, False],
        2: [True, True, False, False],
        9: [True, True, True, False],
    }
