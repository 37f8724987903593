"""The chunk scorer of drawn chunks in C equals the module, whatever stands beside a chunk, and gives way to it
elsewhere."""

import pytest
import torch

from dcar.decoding.cpu.backend import CPUBackend, cpu_backend
from dcar.decoding.cpu.chunk_scorer import NativeChunkScorer, native_chunk_scorer
from dcar.decoding.policy import FusedEnds, PolicyReader
from dcar.errors import ConfigError
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import ChunkPolicy, ChunkPolicyConfig

SIZE, STEPS, IDS = 24, 16, 40


def made(width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> ChunkScorer:
    torch.manual_seed(seed)
    chunk_scorer = ChunkScorer(ChunkScorerConfig(SIZE, STEPS, IDS, embedding_size=12, width=width))
    for parameter in chunk_scorer.parameters():  # gates that open and close, and every bias and offset counts
        torch.nn.init.normal_(parameter, std=2 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.5)
    return chunk_scorer.eval().requires_grad_(False).to(dtype)


def chunks(rows: int, steps: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of which some end: with the first token, with the last one, or between."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, IDS, (rows, steps), generator=generator)
    tokens[::3, steps // 2] = IDS - 1
    if rows > 1:
        tokens[1, 0] = tokens[-1, -1] = IDS - 1
    return (torch.randn(rows, SIZE, generator=generator), tokens, 3 * torch.randn(rows, steps, 3, generator=generator))


@pytest.mark.parametrize("width", [16, 32, 128])
def test_equals_the_module(own32, width):
    chunk_scorer = made(width)
    fused = native_chunk_scorer(own32, chunk_scorer)
    for rows in (1, 2, 3, 4, 8, 12, 13, 16, 40):
        for steps in range(1, STEPS + 1) if rows in (1, 4) else (1, 2, 9, STEPS):
            given = chunks(rows, steps)
            got, wanted = fused(*given), chunk_scorer(*given)
            assert wanted.abs().max() > 0.01 and got.shape == (rows, steps) and got.dtype == torch.float32
            assert torch.allclose(got, wanted, atol=1e-5, rtol=1e-5), (rows, steps)
            assert torch.equal(got == 0, wanted == 0)  # behind an end


def test_saturated_gates(own32):
    chunk_scorer = made(32)
    for layer in (chunk_scorer.layer.weight_ih_l0, chunk_scorer.layer.weight_hh_l0, chunk_scorer.start.weight):
        layer.mul_(1000.0)
    given = chunks(4, 6)
    assert torch.allclose(native_chunk_scorer(own32, chunk_scorer)(*given), chunk_scorer(*given), atol=1e-5, rtol=1e-5)


def test_small_states_keep_their_digits(own32):
    """tanh near 0, where 1 - 2 / (exp(2 x) + 1) would cancel: to 1e-6 of the value."""
    chunk_scorer = made(16)
    for parameter in chunk_scorer.layer.parameters():
        parameter.zero_()  # the state is halved in every step
    chunk_scorer.start.weight.mul_(1e-5)
    chunk_scorer.start.bias.zero_()
    chunk_scorer.inner.bias.fill_(0.0)
    chunk_scorer.output.bias.zero_()
    chunk_scorer.output.weight.fill_(1.0)
    chunk_scorer.inner.weight.copy_(torch.eye(16))
    hidden, tokens, seen = chunks(4, 3)
    got = native_chunk_scorer(own32, chunk_scorer)(hidden, tokens, seen)
    wanted = chunk_scorer.double()(hidden, tokens, seen)
    assert 0 < wanted.abs().max() < 1e-3
    terms = torch.tanh(chunk_scorer.start(hidden.double())).abs().sum(-1, keepdim=True)  # what the sums add up from
    assert ((got - wanted).abs() <= 1e-6 * terms).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_chunk_does_not_depend_on_the_others(own32, threads):
    fused = native_chunk_scorer(own32, made(32))
    hidden, tokens, seen = chunks(30, STEPS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = fused(hidden, tokens, seen)
        for i in (0, 11, 12, 29):
            one = slice(i, i + 1)
            assert torch.equal(fused(hidden[one], tokens[one], seen[one])[0], together[i])
            # nor on what stands behind
            assert torch.equal(fused(hidden[one], tokens[one, :5], seen[one, :5])[0], together[i, :5])
    finally:
        torch.set_num_threads(before)
    other = tokens.mT.contiguous().mT, seen.transpose(0, 1).contiguous().transpose(0, 1)  # as they may lie in memory
    assert torch.equal(fused(hidden, *other), together)
    short = hidden.bfloat16()  # of a decoder of that type
    assert torch.equal(fused(short, tokens, seen), fused(short.float(), tokens, seen))


def test_where_the_kernels_do_not_take_it_is_the_module(own32):
    backend = CPUBackend(own32)
    assert isinstance(backend.chunk_scorer(made(32)), NativeChunkScorer)  # else nothing here is tested
    for chunk_scorer in (made(8), made(24), made(32, dtype=torch.float64), made(32, dtype=torch.bfloat16)):
        assert backend.chunk_scorer(chunk_scorer) is chunk_scorer


def test_refuses_what_would_be_read_beyond_its_weights(own32):
    fused = native_chunk_scorer(own32, made(16))
    hidden, tokens, seen = chunks(2, 4)
    for wrong in (IDS, -1):
        tokens[1, 3] = wrong
        with pytest.raises(IndexError, match=f"{IDS} ids"):
            fused(hidden, tokens, seen)
    hidden, tokens, seen = chunks(2, STEPS)
    for given in ((hidden[:1], tokens, seen), (hidden, tokens, seen[:, 1:]), (hidden, tokens, seen[..., :2]),
                  (hidden, tokens.repeat(1, 2), seen.repeat(1, 2, 1))):
        with pytest.raises(ValueError, match="do not fit"):
            fused(*given)


@pytest.mark.parametrize("width", [8, 32])
def test_a_policy_sees_by_it_also_after_load(width):
    """Several draws of several rows, and the weights of another policy in place of the first's."""
    def policy(seed: int) -> ChunkPolicy:
        made_of = ChunkPolicy(ChunkPolicyConfig(SIZE, STEPS, reads="candidates", chunk_scorer_width=width,
                                                chunk_scorer_embedding=12, chunk_scorer_ids=IDS)).eval()
        made_of.chunk_scorer.load_state_dict(made(width, seed).state_dict())
        return made_of

    first, second = policy(0), policy(5)
    reader = PolicyReader(first, cpu_backend(torch.float32), torch.device("cpu"), torch.float32)
    hidden, logits = torch.randn(3, SIZE), torch.randn(3, STEPS, IDS)
    tokens = torch.randint(0, IDS, (3, 4, STEPS))

    def same(wanted: ChunkPolicy) -> bool:
        seen = [policy.candidate_features(hidden, logits, tokens) for policy in (reader, wanted)]
        one = [policy.candidate_features(hidden, logits, tokens[:, 0]) for policy in (reader, wanted)]
        chosen = [policy.log_probs(None, seen[0]) for policy in (reader, wanted)]
        return all(torch.allclose(*both, atol=1e-4) for both in (seen, one, chosen))

    for wanted in (first, second, first):
        reader.load(wanted)
        assert same(wanted)
    assert not same(second)
    with torch.no_grad():
        for part in (first.chunk_scorer.output.bias, first.scores.linear.weight):
            part.data.add_(1.0)  # which no version counter tells
            assert not same(first)
            reader.load(first)
            assert same(first)
    other = ChunkPolicy(ChunkPolicyConfig(SIZE, STEPS, reads="candidates", chunk_scorer_width=16,
                                          chunk_scorer_embedding=12, chunk_scorer_ids=IDS))
    with pytest.raises(ConfigError, match="chunk_scorer_width"):
        reader.load(other)


@pytest.mark.parametrize("sizes", [(), (2, 3), (1, 2, 5)])
def test_scores_of_all_ends_in_one_product(sizes):
    torch.manual_seed(2)
    policy = ChunkPolicy(ChunkPolicyConfig(32, 6, reads="candidates", sizes=sizes)).eval()
    fused = FusedEnds(policy.scores, policy.unused, policy.config.reach)
    torch.nn.init.normal_(policy.scores.linear.weight)
    fused.load(policy.scores)
    candidates = torch.randn(7, 2, policy.config.reach, 3)  # of two chunks drawn side by side
    assert torch.allclose(fused(candidates), policy.score(None, candidates), rtol=1e-5, atol=1e-4)
