"""Warp and position-addressed randomness: distributions checked against definitions, draws by
statistics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from dcar.errors import ConfigError
from dcar.sampling import STREAMS, SamplingConfig, group_keys, sample, uniform, utterance_keys, warp
from dcar.ties import first_of_equals, likeliest, rank

LOGITS = torch.tensor([[1.0, 3.0, 3.0, 0.0, -1.0]])


SHARES = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


@pytest.mark.parametrize(
    ("logits", "config", "expected"),
    [
        (LOGITS, SamplingConfig(), LOGITS.exp()),
        (LOGITS, SamplingConfig(temperature=0), [0, 1, 0, 0, 0]),  # the lowest of the best
        (
            LOGITS,
            SamplingConfig(temperature=0.5, top_k=3),
            [math.exp(2), math.exp(6), math.exp(6), 0, 0],
        ),
        # among equals
        (
            torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 1.0]]),
            SamplingConfig(top_k=3),
            [0, math.e, 1, 1, 0, 0],
        ),
        (SHARES, SamplingConfig(top_p=0.5), [1, 0, 0, 0]),  # the smallest set that reaches it
        (SHARES, SamplingConfig(top_p=0.6), [0.5, 0.3, 0, 0]),
    ],
    ids=["softmax", "temperature 0", "top-k", "equals", "top-p", "top-p between"],
)
def test_warp_by_hand(logits, config, expected):
    expected = torch.as_tensor(expected, dtype=torch.float32).view(1, -1)
    probs = warp(logits, config)
    assert torch.allclose(probs, expected / expected.sum()) and torch.equal(probs > 0, expected > 0)


def in_order(row: list[float]) -> list[int]:
    """Ids from the likeliest down, the lowest first among equals; by Python's own stable sort."""
    return sorted(range(len(row)), key=lambda i: -row[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("levels", [2, 5, 120])
def test_the_likeliest_are_those_of_lowest_id_among_equals(levels, dtype):
    values = torch.randint(
        -levels, levels, (3, 4, 40), generator=torch.Generator().manual_seed(levels)
    ).to(dtype)
    values[0, 0, 5:] = -torch.inf
    values[1, 1, ::2], values[1, 1, 1::2] = 0.0, -0.0
    values[2, 2, 3:9:2], values[2, 2, 12] = torch.inf, torch.finfo(dtype).tiny
    order = torch.tensor([in_order(row) for row in values.view(-1, 40).tolist()]).view(3, 4, 40)
    for k in (1, 7, 39, 40):
        best, ids = likeliest(values, k)
        assert torch.equal(ids, order[..., :k]) and torch.equal(best, values.gather(-1, ids))
        assert torch.equal(
            likeliest(values, k, ordered=False)[1].sort().values, order[..., :k].sort().values
        )
        if dtype != torch.float64:  # as on devices that are not asked whether there are equals
            assert torch.equal(first_of_equals(values, k), order[..., :k])
    for place in (0, 7, 39):
        assert rank(values, order[..., place]).unique().tolist() == [place]


def test_a_value_that_is_no_number_is_among_the_likeliest():
    """So that a broken distribution stays broken, and is seen."""
    for values in ([0.0, 1.0, math.nan, 2.0], [2.0, -math.nan, 2.0, 2.0]):
        assert likeliest(torch.tensor([values]), 2)[0].isnan().any()
        assert math.isnan(values[first_of_equals(torch.tensor(values), 2)[0]])
        assert warp(torch.tensor([values]), SamplingConfig(top_k=2)).isnan().any()


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0),
        SamplingConfig(top_k=2),
        SamplingConfig(temperature=0.1, top_p=0.5),
    ],
)
def test_where_nothing_but_a_forbidden_end_is_possible_all_others_are_alike(config):
    logits = torch.tensor([[-torch.inf, -torch.inf, -torch.inf, 5.0]]).expand(2, -1)
    probs = warp(logits, config, torch.tensor([True, False]), eos=3)
    count = {1.0: 3}.get(config.top_p, 2) if config.temperature else 1
    count = config.top_k or count
    assert probs[0].tolist() == pytest.approx([1 / count] * count + [0.0] * (4 - count))
    assert probs[1].tolist() == [0, 0, 0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=9).filter(lambda x: sum(x) > 0.01),
    st.floats(0, 1, exclude_max=True),
)
def test_sample_inverts_the_cumulative_distribution_and_never_draws_zero_mass(weights, u):
    probs = torch.tensor([weights], dtype=torch.float64)
    index = int(sample(probs, torch.tensor([u], dtype=torch.float64)))
    assert weights[index] > 0
    below, total = sum(weights[:index]), sum(weights)
    assert below <= u * total * (1 + 1e-12) + 1e-12
    assert u * total <= (below + weights[index]) * (1 + 1e-12) + 1e-12


def test_draws_are_a_function_of_their_address_only():
    keys = utterance_keys(7, ["a", "b", "c"])
    position = torch.arange(5).expand(3, -1)
    together = uniform(keys, "token", position)
    alone = torch.cat(
        [
            uniform(keys[i : i + 1], "token", position[i : i + 1, j : j + 1])
            for i in range(3)
            for j in range(5)
        ]
    ).view(3, 5)
    assert torch.equal(together, alone)
    assert torch.equal(utterance_keys(7, ["b"]), keys[1:2])
    assert torch.equal(uniform(keys, "token", torch.tensor([4, 4, 4])), together[:, 4])


def test_draws_are_those_of_earlier_versions():
    """Keys written down before members' addresses were told from ids that look like them:
    results stay the same."""
    before = {
        ("x", 0): -8507718032982347268,
        ("x", 1): 5358463972774364581,
        ("a#b", 0): -8851821559032420496,
        ("x#1", 2): -5697653142441149624,
    }
    _, keys = group_keys(7, [name for name, _ in before], [member for _, member in before])
    assert keys.tolist() == list(before.values())
    assert utterance_keys(7, ["x", "a#b"]).tolist() == [before["x", 0], before["a#b", 0]]


def test_streams_seeds_positions_and_draws_are_independent_and_uniform():
    """2 x 10^5 numbers a stream. Bounds are six standard errors: false alarm below 1e-7 in all
    checks together."""
    n = 200_000
    names = [f"utt{i}" for i in range(200)]
    position = torch.arange(1000).expand(200, -1)
    drawn = {
        stream: uniform(utterance_keys(0, names), stream, position).flatten() for stream in STREAMS
    }
    drawn["other seed"] = uniform(utterance_keys(1, names), "token", position).flatten()
    drawn["other draw"] = uniform(utterance_keys(0, names), "token", position, 1).flatten()
    for u in drawn.values():
        assert u.min() >= 0 and u.max() < 1
        assert abs(u.mean() - 0.5) < 6 / math.sqrt(12 * n)
        counts = torch.histc(u, 50, 0, 1)
        chi2 = float(((counts - n / 50) ** 2 / (n / 50)).sum())
        assert chi2 < 49 + 6 * math.sqrt(98)
        table = u.view(200, 1000)
        neighbours = torch.stack((table[:, :-1].flatten(), table[:, 1:].flatten()))
        assert abs(torch.corrcoef(neighbours)[0, 1]) < 6 / math.sqrt(n)
    correlation = torch.corrcoef(torch.stack(list(drawn.values()))).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(n)


# --- repetition-aware sampling --------------------------------------------------------------------


def cosyvoice_draws(
    logits: torch.Tensor,
    decoded: list[int],
    generator: torch.Generator,
    config: SamplingConfig,
    count: int,
) -> torch.Tensor:
    """The procedure of CosyVoice (ras_sampling, nucleus_sampling, random_sampling), `count`
    times."""
    values, indices = logits.double().softmax(0).sort(descending=True, stable=True)
    kept, mass = [], 0.0
    for value in values.tolist():
        if not (mass < config.top_p and len(kept) < config.top_k):
            break
        mass += value
        kept.append(value)
    first = torch.tensor(kept, dtype=torch.float64).multinomial(count, True, generator=generator)
    tokens = indices[first]
    for token in tokens.unique().tolist():
        repeated = sum(t == token for t in decoded[-config.repetition_window :])
        if repeated >= config.repetition_window * config.repetition_share:
            others, again = logits.double(), (indices[first] == token).nonzero()[:, 0]
            if config.repetition_mask:
                others[token] = -torch.inf
            tokens[again] = others.softmax(0).multinomial(len(again), True, generator=generator)
    return tokens


def ras(**changes) -> SamplingConfig:
    return SamplingConfig(
        **{**dict(top_p=0.8, top_k=25, repetition_window=10, repetition_share=0.1), **changes}
    )


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("changes", [{}, {"top_k": 2}, {"repetition_share": 0.2}, {"top_p": 0.5}])
def test_repetition_aware_distribution_is_that_of_cosyvoices_procedure(mask, changes):
    """Chi-square of 20 000 candidates of the procedure against the distribution written down;
    false alarm 1e-6 a case."""
    config = ras(repetition_mask=mask, **changes)
    logits = torch.tensor([2.0, 1.5, 1.0, 0.3, -0.5, -1.0])
    decoded = [5, 5, 5, 5, 0, 3, 0, 1, 2, 2, 4, 0, 0]  # the first three have left the window of ten
    probs = warp(logits[None], config, history=torch.tensor([decoded[-10:]]))[0].double()
    assert float(probs.sum()) == pytest.approx(1, abs=1e-6)
    generator = torch.Generator().manual_seed(7)
    draws = cosyvoice_draws(logits, decoded, generator, config, 20_000)
    counts = torch.bincount(draws, minlength=6).double()
    expected = probs * len(draws)
    assert counts[expected < 1e-6].sum() == 0
    real = expected > 1e-6
    statistic = float(((counts - expected)[real] ** 2 / expected[real]).sum())
    assert statistic < chi2.isf(1e-6, int(real.sum()) - 1)


def masked_probs(f: list[float], n: list[float], repeated: set[int]) -> list[float]:
    """The procedure with the mask, enumerated: u from the nucleus, then, if it is repeated,
    another one from f."""
    out = [0.0] * len(f)
    for u, p in enumerate(n):
        others = sum(x for v, x in enumerate(f) if v != u)
        if u not in repeated or not others:
            out[u] += p
            continue
        for v, x in enumerate(f):
            out[v] += p * x / others if v != u else 0.0
    return out


@pytest.mark.parametrize("gap", [0.5, 20.0, 36.0, 60.0, 200.0, torch.inf])
def test_a_repeated_token_may_have_any_probability_where_it_is_masked(gap):
    logits = (
        torch.tensor([[gap, 0.0, -1.0]]) if gap < torch.inf else torch.tensor([[0.0, -gap, -gap]])
    )
    f = logits.double().softmax(-1)[0].tolist()
    n = [1.0, 0.0, 0.0] if f[0] >= 0.8 else [f[0] / (f[0] + f[1]), f[1] / (f[0] + f[1]), 0.0]
    probs = warp(logits, ras(repetition_mask=True), history=torch.tensor([[0] * 10]))[0]
    assert probs.tolist() == pytest.approx(masked_probs(f, n, {0}), abs=1e-6)
    assert float(probs[0]) == (1.0 if gap == torch.inf else 0.0)
    # the second draw is from all of them
    without = [n[0] * x + n[v] * (v > 0) for v, x in enumerate(f)]
    assert warp(logits, ras(), history=torch.tensor([[0] * 10]))[0].tolist() == pytest.approx(
        without, abs=1e-6
    )


def test_a_method_without_histories_is_refused():
    with pytest.raises(ConfigError, match="repetition_window=0"):
        warp(torch.zeros(1, 4), ras())
    with pytest.raises(ConfigError, match="repetition_window.*temperature=0"):
        ras(temperature=0)
    with pytest.raises(ConfigError, match="repetition_share"):
        ras(repetition_share=0)
