"""The operations in C equal those in PyTorch, row by row alike, and leave to PyTorch what they
do not support."""

import pytest
import torch
from torch import Tensor, nn

from dcar.decoding.backend import Backend
from dcar.decoding.columns import CausalMask, RotaryCache, columns_of
from dcar.decoding.cpu.backend import MOST_KEPT, CPUBackend, cpu_backend
from dcar.decoding.cpu.heads import NativeHeads
from dcar.decoding.cpu.native import kernels
from dcar.decoding.cpu.stack import CPUStack
from dcar.sampling import BELOW_ONE, SamplingConfig, sample_several, shifted, warp
from heads.chunk_scorer import ChunkScorerConfig
from heads.layers import KVCache, RotaryTable, TransformerLayer
from heads.multi_token import MultiTokenHeads
from heads.policy import CandidatePolicy, CandidatePolicyConfig
from heads.shared import SharedHeads

IDS, EOS, SIZE = 1025, 1024, 48  # ids that fill no vector

PYTORCH = Backend()


@pytest.fixture(scope="module")
def native() -> CPUBackend:
    library = kernels()
    assert library is not None
    return CPUBackend(library)


def vary(module: nn.Module) -> None:
    """Make every weight count."""
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight, 1, 0.3)
            nn.init.normal_(part.bias, 0, 0.3)
    module.eval().requires_grad_(False)


def read(
    backend: Backend, new: int, which: str, rows: slice = slice(0, 3), ffn: int = 80
) -> tuple[Tensor, Tensor]:
    """Read `new` positions after three ragged rows of a cache; return the result and the cache."""
    torch.manual_seed(new)
    width, heads, prefix = 96, 2, 0 if which == "ends" else 16  # a policy reads no text
    layers = [TransformerLayer(width, heads, ffn) for _ in range(1 if which == "ends" else 2)]
    last: list[nn.Module] = [nn.LayerNorm(width)] + [nn.Linear(width, 6)] * (which == "ends")
    first = [nn.LayerNorm(32), nn.Linear(32, width)] if which == "ends" else []
    vary(nn.ModuleList([*layers, *first, *last]))
    x = torch.randn(3, new, 32 if first else width)[rows]
    kv = torch.randn(len(layers), 3, prefix + 60, 2, heads, width // heads)[:, rows]
    lengths = torch.tensor([21, 0, 14])[rows]
    text = torch.tensor([16, 5, 1]).clamp(max=prefix)[rows]
    cache = KVCache(
        len(layers), len(x), heads, 60, width // heads, prefix=prefix, prefix_lengths=text
    )
    for layer, values in zip(cache.kv, kv, strict=True):
        layer.copy_(values.flatten(0, 1))
    cache.lengths = lengths
    rotary = RotaryCache(RotaryTable(width // heads), torch.device("cpu"), torch.float32)
    rotary.cover(-10, 100)
    positions = lengths[:, None] + torch.arange(new) - 3
    causal = CausalMask(torch.device("cpu"), torch.float32)
    tree = ends = counts = None
    if which == "tree":  # two branches
        tree = torch.ones(new, new).tril().bool()
        tree[2, 1] = False
        tree = tree[None]
    if which == "ends":
        counts = torch.tensor([new, 1, 2])[rows]
        ends = torch.arange(len(x)) * new + counts - 1
    columns = columns_of(cache, 21, new, causal, tree=tree, ends=ends, counts=counts)
    columns.writes_only = which == "writes_only"
    got = backend.stack(layers, last, first).read(
        x.flatten(0, 1), rotary, positions.flatten(), columns
    )
    return got, torch.stack(cache.kv)


@pytest.mark.parametrize("new", [3, 5, 13])
@pytest.mark.parametrize("which", ["chain", "tree", "ends", "writes_only"])
def test_stacks_equal_pytorch(native, which, new):
    (got, kv), (wanted, wanted_kv) = read(native, new, which), read(PYTORCH, new, which)
    assert torch.allclose(kv, wanted_kv, atol=1e-5)
    assert which == "writes_only" or torch.allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("new", [1, 7, 13])
def test_a_row_depends_neither_on_the_others_nor_on_threads(native, new, monkeypatch):
    together, _ = read(native, new, "chain")
    for b in range(3):
        assert torch.equal(
            read(native, new, "chain", slice(b, b + 1))[0], together[b * new : (b + 1) * new]
        )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(read(native, new, "chain")[0], together)


def made_heads(**settings: object) -> SharedHeads:
    torch.manual_seed(0)
    heads = SharedHeads(SIZE, IDS, 6, 2, **settings)
    nn.init.normal_(heads.scale)
    vary(heads)
    return heads


@pytest.mark.parametrize("settings", [{}, dict(base_bias=True)], ids=str)
def test_shared_heads_equal_pytorch(native, settings):
    heads = made_heads(**settings)
    logits = native.heads(heads)
    assert isinstance(logits, NativeHeads)
    hidden = torch.randn(30, SIZE)
    whole = logits(hidden)
    assert torch.allclose(whole, heads.logits(hidden), atol=1e-5)
    for k in (1, 2, 6):
        for rows in (1, 3, 14):
            assert torch.equal(logits(hidden[:rows], k), whole[:rows, :k])
    assert torch.equal(logits(hidden.view(5, 6, SIZE), 2), whole.view(5, 6, 6, IDS)[:, :, :2])
    for k in (0, 7):
        with pytest.raises(ValueError, match=f"{k} heads .* 6"):
            logits(hidden, k)
    for bad in (hidden[:, 1:], hidden.double()):
        with pytest.raises(TypeError, match=r"\(30, 4[78]\) .*float32"):
            logits(bad, 2)


def test_a_base_head_alone_equals_pytorch(native):
    heads = MultiTokenHeads(SIZE, IDS, 1).requires_grad_(False)
    logits, hidden = native.heads(heads), torch.randn(13, SIZE)
    assert isinstance(logits, NativeHeads) and torch.allclose(
        logits(hidden), heads.logits(hidden), atol=1e-5
    )


def test_what_c_does_not_read_is_left_to_pytorch(native):
    quantised = made_heads()
    quantised.up[1] = nn.Sequential(quantised.up[1])
    narrow, half = SharedHeads(SIZE + 2, IDS, 3), made_heads().bfloat16()
    for heads in (MultiTokenHeads(SIZE, IDS, 3), narrow, half, quantised):
        assert not isinstance(native.heads(heads), NativeHeads)
    assert not isinstance(cpu_backend(torch.bfloat16), CPUBackend)
    last = [nn.LayerNorm(32)]
    good, wrapped, other = (TransformerLayer(32, 2, 64) for _ in range(3))
    wrapped.up = nn.Sequential(wrapped.up)
    other.ffn_norm.eps = 1e-3
    assert isinstance(native.stack([good], last), CPUStack)
    for bad in (
        wrapped,
        other,
        TransformerLayer(32, 2, 50),
        TransformerLayer(32, 4, 64),
        good.bfloat16(),
    ):
        assert not isinstance(native.stack([bad], last), CPUStack)


def given(ties: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [3, 16, V], of which some are minus infinity; where the end is forbidden; numbers
    of four candidates."""
    generator = torch.Generator().manual_seed(0)
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
@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 10, MOST_KEPT, 4000])
def test_distributions_and_draws_equal_pytorch(native, temperature, top_k, ties):
    config, (logits, forbidden, u) = SamplingConfig(temperature, top_k), given(ties)
    for where in (None, forbidden):
        probs, wanted = native.probs(logits, config, where, EOS), warp(logits, config, where, EOS)
        assert torch.allclose(probs, wanted, atol=1e-6, rtol=1e-6)
        # the same ids, also among equals
        assert not bool(((probs > 0) != (wanted > 0))[wanted > 1e-30].any())
        tokens, checked = native.tokens(logits, u, config, where, EOS)
        assert checked and torch.equal(tokens, sample_several(wanted, u))
        one = native.tokens(
            logits[1:2], u[1:2], config, None if where is None else where[1:2], EOS
        )[0]
        assert torch.equal(one[0], tokens[1])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_is_left_to_pytorch(native, wrong):
    config, (logits, _, u) = SamplingConfig(0.4, 10), given()
    logits[1, 3, 7] = wrong
    tokens, checked = native.tokens(logits, u, config, None, EOS)
    probs = native.probs(logits, config, None, EOS)
    assert (
        not checked and not probs[1, 3].sum() > 0 and torch.equal(tokens, sample_several(probs, u))
    )
    wrong_ones = tokens == logits.shape[-1]
    assert wrong_ones[1, 3].all() and wrong_ones.sum() == u.shape[-1]
    decide = native.decision(policy_of(4, 16))
    assert decide(torch.randn(3, SIZE), logits, u[..., 0], 4, config, None, EOS, 0.0) is None


def policy_of(several: int, reach: int, window: int = 2) -> CandidatePolicy:
    """A policy; several candidates need a chunk scorer."""
    torch.manual_seed(several)
    scorer = (
        {"chunk_scorer": ChunkScorerConfig(SIZE, 16, IDS, 8, 32, window)} if several > 1 else {}
    )
    policy = CandidatePolicy(
        CandidatePolicyConfig(SIZE, 16, sizes=tuple(range(3, reach + 1)), **scorer)
    )
    nn.init.normal_(policy.scores.linear.weight, std=0.2)
    if policy.chunk_scorer is not None:
        # every bias counts
        for parameter in policy.chunk_scorer.parameters():
            nn.init.normal_(
                parameter, std=2 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.5
            )
    return policy.eval()


@pytest.mark.parametrize(
    ("several", "reach", "window", "dial"),
    [(1, 16, 0, 0.0), (4, 16, 2, -0.7), (3, 9, 1, 0.0), (3, 9, 4, 0.0)],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_decisions_equal_pytorch(native, several, reach, window, dial, threads, monkeypatch):
    logits, forbidden, u = given()
    logits, forbidden, u = logits[:, :reach], forbidden[:, :reach], u[:, :reach, 0]
    logits[0, 1, 1:] = -torch.inf  # one token alone: no entropy
    logits[1, 6, EOS] = 60.0  # an end inside of a chunk
    u[0, 2] = BELOW_ONE
    hidden, policy = torch.randn(3, SIZE), policy_of(several, reach, window)
    decide = native.decision(policy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for config in (SamplingConfig(1.0), SamplingConfig(0.4, 10), SamplingConfig(0.0)):
        for where in (None, forbidden):
            tokens, features, log_probs = decide(
                hidden, logits, u, several, config, where, EOS, dial
            )
            drawn = sample_several(warp(logits, config, where, EOS), shifted(u, several))
            assert torch.equal(tokens, drawn.mT)
            seen = policy.candidate_features(hidden, logits, tokens)
            assert torch.allclose(features, seen, atol=1e-5, rtol=1e-5)
            assert seen[0, 0, 1, 2].abs() < 1e-6
            wanted = policy.log_probs(seen, dial)
            possible = wanted > -1e6
            assert torch.allclose(log_probs[possible], wanted[possible], atol=1e-4)
            assert bool((log_probs[~possible] < -1e8).all())
            banned = None if where is None else where[1:2]
            alone = decide(hidden[1:2], logits[1:2], u[1:2], several, config, banned, EOS, dial)
            assert torch.equal(alone[2][0], log_probs[1])
    with pytest.raises(ValueError, match=r"\(3, 48\)"):
        decide(hidden, logits[:, 1:], u[:, 1:], several, config, None, EOS, dial)
