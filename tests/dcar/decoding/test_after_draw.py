"""Chunks that end where the drawn candidates say, and the best of several drawn side by side: in the loop, in fast
passes and in the engine."""


import pytest
import torch
from tiny_decoders import tiny_decoder
from ways import SAMPLING, check_ways

from dcar.decoding import BestOfChunk, ChunkMethod, EndOnConfident, FixedChunk, PolicyChunk, ShuffledChunk, decode
from dcar.errors import CheckpointError, ConfigError
from dcar.sampling import SamplingConfig
from heads.candidates import CHUNK_SCORE, candidate_features, end_features, joint_log_probs
from heads.policy import ChunkPolicy, ChunkPolicyConfig


def policy_of(seed: int = 0, num_actions: int = 4, **changes) -> ChunkPolicy:
    torch.manual_seed(seed)
    policy = ChunkPolicy(ChunkPolicyConfig(32, num_actions, reads="candidates", **changes)).eval()
    torch.nn.init.normal_(policy.scores.linear.weight, std=0.1)
    policy.scores.linear.weight.data[:, 9:] = 0.0  # tokens decide, not lengths
    return policy


def scored_policy(decoder, **changes) -> ChunkPolicy:
    policy = policy_of(**{"chunk_scorer_width": 8, "chunk_scorer_embedding": 4,
                          "chunk_scorer_ids": decoder.config.output_size, **changes})
    torch.nn.init.normal_(policy.chunk_scorer.output.weight, std=8.0)  # so that draws differ by much
    return policy.eval()


def test_a_policy_of_fewer_sizes_than_the_decoder_has_heads(decoder, prompts):
    method = ChunkMethod(PolicyChunk(scored_policy(decoder, num_actions=3), "sample", num_candidates=3))
    expected = check_ways(decoder, prompts, method, SAMPLING, 3, "exact", seed=3)
    assert decoder.config.num_prediction_heads > 3 and {a for r in expected for a in r.actions} == {1, 2, 3}


@pytest.mark.parametrize("num_candidates", [0, 1, 3])
@pytest.mark.parametrize(("batch", "chunks"), [(1, "exact"), (3, "exact"), (8, "padded"), (1, "padded")])
def test_loop_fast_passes_and_engine_agree(decoder, prompts, num_candidates, batch, chunks):
    """0 candidates: a policy without a chunk scorer, which sees one chunk."""
    policy = scored_policy(decoder) if num_candidates else policy_of(sizes=(1, 2, 3) if batch == 3 else ())
    forced = {prompts[0].utterance_id: [2, 0], prompts[1].utterance_id: [0, 3]}
    for mode, dial, sampling in (("greedy", 0.4, SAMPLING), ("sample", 0.0, SAMPLING),
                                 ("sample", 0.3, SamplingConfig(temperature=0, max_tokens=30))):
        asked = PolicyChunk(policy, mode, forced=forced, dial=dial, num_candidates=num_candidates or 1)
        expected = check_ways(decoder, prompts, ChunkMethod(asked), sampling, batch, chunks, seed=3, group_size=2)
        assert expected[0].candidates.shape[-1] == CHUNK_SCORE + (num_candidates > 0)
        assert {tuple(set(r.actions)) for r in expected[:4:3]} == {(2,), (3,)}  # the forced ones
        chosen = {n for r in expected[:4:3] for n in r.chosen}
        assert len(chosen) > 1 or sampling.temperature == 0 if num_candidates > 1 else chosen == set()
        for result in expected:  # the log-probabilities recorded are those of candidate and size together
            given = result.hidden[None], torch.tensor([result.decision_positions]), result.candidates[None]
            scores = policy.end_scores(*given)[0]
            assert scores.shape == (len(result.actions), num_candidates or 1, 4)
            assert torch.allclose(policy(*given)[0].flatten(1), joint_log_probs(scores, result.candidates))
            spoken = 4 * torch.tensor(result.chosen or [0])
            probs = joint_log_probs(scores + dial * torch.arange(1, 5), result.candidates)
            taken = probs[torch.arange(len(probs)), spoken + torch.tensor(result.actions) - 1]
            assert taken.tolist() == pytest.approx(result.action_log_probs, abs=1e-4)


def test_an_untrained_policy_is_uniform_over_its_sizes(decoder, prompts):
    policy = ChunkPolicy(ChunkPolicyConfig(32, 4, reads="candidates", sizes=(2, 3, 4)))
    (result, *_) = decode(decoder, prompts[:1], ChunkMethod(PolicyChunk(policy, "sample")), SAMPLING)
    assert result.action_log_probs == pytest.approx([-torch.tensor(3.0).log().item()] * len(result.actions))


def test_the_dial_lengthens_chunks(decoder, prompts):
    policy = policy_of(seed=1)
    asked = [[a for r in decode(decoder, prompts, ChunkMethod(PolicyChunk(policy, dial=d)), SAMPLING)
              for a in r.actions] for d in (-90.0, 0.0, 90.0)]
    assert set(asked[0]) == {1} and set(asked[2]) == {4} and 1 < sum(asked[1]) / len(asked[1]) < 4
    with pytest.raises(ConfigError, match="dial"):
        PolicyChunk(policy, dial=float("nan"))


def test_features_by_hand():
    logits = torch.tensor([[0.0, 0.0, -1e9], [3.0, 0.0, 0.0]])
    seen = candidate_features(logits, torch.tensor([1, 1]))
    half = torch.tensor(0.5).log()
    assert torch.allclose(seen[0], torch.stack((half, half, -half)))
    probs = logits[1].log_softmax(-1)
    assert torch.allclose(seen[1], torch.stack((probs[1], probs[0], -(probs.exp() * probs).sum())))
    assert candidate_features(logits, torch.tensor([2, 1]))[0, 0] == -8.0 and seen.isfinite().all()
    ends = end_features(seen)
    assert ends.shape == (2, 15) and torch.equal(ends[0, :3], seen[0]) and torch.equal(ends[0, 3:6], seen[1])
    assert not ends[1, 3:6].any() and torch.allclose(ends[1, 6:9], seen.mean(0))
    assert torch.allclose(8 * ends[1, 9:12], seen.sum(0))
    assert ends[:, -1].tolist() == [0.0, 1.0]  # behind the last candidate nothing is dropped


@pytest.mark.parametrize("sizes", [(), (2, 3), (1, 2, 5)])
def test_scores_of_all_ends_in_one_product(sizes):
    torch.manual_seed(2)
    policy = ChunkPolicy(ChunkPolicyConfig(32, 6, reads="candidates", sizes=sizes)).eval()
    fused = FusedEnds(policy.scores, policy.unused, policy.config.reach)
    torch.nn.init.normal_(policy.scores.linear.weight)
    fused.load(policy.scores)
    candidates = torch.randn(7, 2, policy.config.reach, 3)  # of two chunks drawn side by side
    assert torch.allclose(fused(candidates), policy.score(None, candidates), rtol=1e-5, atol=1e-4)


def test_begins_as_a_soft_rule(decoder, prompts):
    """Ever more certain of the rule, a greedy policy is `end-on-confident`."""
    policy = ChunkPolicy(ChunkPolicyConfig(32, 4, reads="candidates", sizes=(2, 3, 4))).eval()
    policy.scores.end_on_likely()
    ends = policy.score(None, torch.tensor([[[-1.0, 0, 0], [-2.0, 0, 0], [-0.5, 0, 0], [-3.0, 0, 0]]]))[0]
    assert ends[1:].tolist() == pytest.approx([-4.0, -1.0, -6.0])
    ruled = decode(decoder, prompts, ChunkMethod(EndOnConfident([2, 3, 4])), SAMPLING, seed=3)
    own = decode(decoder, prompts, ChunkMethod(PolicyChunk(policy)), SAMPLING, seed=3)
    assert [(r.tokens, r.actions) for r in own] == [(r.tokens, r.actions) for r in ruled]


def test_checkpoints_of_every_kind(tmp_path):
    for reads in ("hidden", "candidates"):
        policy = ChunkPolicy(ChunkPolicyConfig(32, 4, 16, 2, reads=reads, sizes=(2, 4)))
        policy.save_pretrained(tmp_path / reads)
        loaded = ChunkPolicy.from_pretrained(tmp_path / reads)
        assert loaded.config == policy.config and loaded.checksum() == policy.checksum()
        assert loaded.unused.tolist() == [True, False, True, False]
    for wrong in (dict(reads="tokens"), dict(sizes=(5,)), dict(sizes=(0,)), dict(reads="both")):
        with pytest.raises(CheckpointError, match="policy"):
            ChunkPolicyConfig(32, 4, **wrong)


def test_in_half_precision(decoder, prompts):
    half = tiny_decoder().to(torch.bfloat16)
    method = ChunkMethod(PolicyChunk(policy_of().to(torch.bfloat16), "sample"))
    for got in (decode(half, prompts, method, SAMPLING), decode(fast(half), prompts, method, SAMPLING)):
        assert all(r.tokens and len(set(r.actions)) > 0 for r in got)


# --- several candidates ----------------------------------------------------------------------------------------------


def test_the_most_best_of_draw_by_kernels_and_by_the_module(decoder, prompts, monkeypatch):
    """A fast decoder asks the kernels, with the weights of the moment; the plain one, the reference, the module."""
    asked = []
    monkeypatch.setattr(NativeChunkScorer, "__call__", lambda self, *given, of=NativeChunkScorer.__call__: (
        asked.append(self), of(self, *given))[1])
    chunk_scorer = scored_policy(decoder, chunk_scorer_width=16).chunk_scorer
    method, quick, spoken = ChunkMethod(BestOfChunk(4, 3, chunk_scorer)), fast(decoder), []
    for _ in range(2):
        expected = decode(decoder, prompts, method, SAMPLING, seed=5)
        assert not asked
        for batch in (1, 3):
            got = decode(quick, prompts, method, SAMPLING, seed=5, batch_size=batch)
            assert [(r.tokens, r.chosen) for r in got] == [(r.tokens, r.chosen) for r in expected]
        assert len(asked) >= max(r.target_passes for r in expected) and len(set(map(id, asked))) == 1
        asked.clear()
        spoken.append([r.tokens for r in expected])
        chunk_scorer.output.weight.data.neg_()  # which no version counter tells: now the least well-scored ones
    assert spoken[0] != spoken[1]


def test_one_draw_of_a_policy_of_one_size_is_car_k(decoder, prompts):
    """Several draws are the best of them; shuffling sizes that never vary changes nothing."""
    policy = scored_policy(decoder, sizes=(3,))
    with torch.no_grad():
        for weight in policy.scores.parameters():
            weight.zero_()  # all draws alike but for their shares
    one, sampled, shuffled, car, three, best = (
        [r.tokens for r in decode(decoder, prompts, ChunkMethod(schedule), SAMPLING, seed=2)] for schedule in (
            PolicyChunk(policy), PolicyChunk(policy, "sample"), ShuffledChunk(PolicyChunk(policy)), FixedChunk(3),
            PolicyChunk(policy, num_candidates=3), BestOfChunk(3, 3, policy.chunk_scorer)))
    assert one == sampled == shuffled == car != three == best


def test_nothing_to_choose_at_temperature_0(decoder, prompts):
    policy, cold = scored_policy(decoder), SamplingConfig(temperature=0, max_tokens=40)
    one, five = (decode(decoder, prompts, ChunkMethod(PolicyChunk(policy, num_candidates=n)), cold) for n in (1, 5))
    assert [(r.tokens, r.actions) for r in one] == [(r.tokens, r.actions) for r in five]


def test_refuses_what_cannot_be_chosen_among(decoder, prompts):
    policy = scored_policy(decoder)
    nine = ChunkMethod(BestOfChunk(9, 2, policy.chunk_scorer))
    shuffled = ChunkMethod(ShuffledChunk(PolicyChunk(policy)))
    for message, ask in (
        ("chunk_scorer", lambda: PolicyChunk(policy_of(), num_candidates=4)),
        ("not 0", lambda: PolicyChunk(policy, num_candidates=0)),
        ("at least 2", lambda: BestOfChunk(3, 1, policy.chunk_scorer)),
        ("needs 9 heads", lambda: decode(decoder, prompts, nine, SAMPLING)),
        ("needs 9 heads", lambda: decode(decoder, prompts, ChunkMethod(EndOnConfident([2, 9])), SAMPLING)),
        ("every utterance once", lambda: decode(decoder, prompts, shuffled, SAMPLING, group_size=2)),
    ):
        with pytest.raises(ConfigError, match=message):
            ask()
