"""Chunks that end where the drawn candidates say: in the loop, in fast passes, in the engine, and against a slow
reference without a cache."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import drawn, speak_slowly, tiny_decoder
from ways import SAMPLING, check_ways

from dcar.decoding import ChunkMethod, EndOnConfident, PolicyChunk, decode
from dcar.decoding.fast.passes import fast
from dcar.decoding.fast.policy import FusedEnds
from dcar.errors import CheckpointError, ConfigError
from dcar.sampling import SamplingConfig, sample, uniform
from heads.candidates import candidate_features, end_features
from heads.policy import ChunkPolicy, ChunkPolicyConfig


def policy_of(seed: int = 0, num_actions: int = 4, **changes) -> ChunkPolicy:
    torch.manual_seed(seed)
    policy = ChunkPolicy(ChunkPolicyConfig(32, num_actions, reads="candidates", **changes)).eval()
    torch.nn.init.normal_(policy.scores.linear.weight, std=0.1)
    policy.scores.linear.weight.data[:, 9:] = 0.0  # tokens decide, not lengths
    return policy


@pytest.mark.parametrize(("mode", "dial", "sizes"), [("greedy", 0.0, ()), ("sample", 0.0, (2, 3)), ("sample", 0.7, ())])
def test_equals_decoding_without_cache(decoder, prompts, mode, dial, sizes):
    policy = policy_of(seed=1, sizes=sizes)

    def next_chunk(tokens, key, hidden):
        """Of as many candidates as the policy sees, those up to the end that it chooses."""
        chunk = drawn(decoder, hidden[-1], tokens, policy.config.reach, key, SAMPLING)
        seen = candidate_features(decoder.heads(hidden[-1], policy.config.reach)[None], torch.tensor([chunk]))
        scores = policy(hidden[None], torch.tensor([[len(hidden) - 1]]), seen[:, None])[0, 0]
        scores = (scores + dial * torch.arange(1, policy.config.num_actions + 1)).softmax(-1)
        if mode == "greedy":
            return chunk[: int(scores.argmax()) + 1]
        return chunk[: int(sample(scores[None], uniform(key, "policy", torch.tensor([len(tokens)])))) + 1]

    results = decode(decoder, prompts, ChunkMethod(PolicyChunk(policy, mode, dial=dial)), SAMPLING, seed=3)
    for prompt, result in zip(prompts, results, strict=True):
        assert (result.tokens, result.actions) == speak_slowly(decoder, prompt, next_chunk, SAMPLING, 3)
    used = {a for r in results for a in r.actions}
    assert used <= set(sizes or (1, 2, 3, 4)) and len(used) > 1


@pytest.mark.parametrize(("batch", "chunks"), [(1, "exact"), (3, "exact"), (8, "padded"), (1, "padded")])
def test_loop_fast_passes_and_engine_agree(decoder, prompts, batch, chunks):
    policy = policy_of(sizes=(1, 2, 3) if batch == 3 else ())
    forced = {prompts[0].utterance_id: [2, 0], prompts[1].utterance_id: [0, 3]}
    for mode, dial, sampling in (("greedy", 0.4, SAMPLING), ("sample", 0.0, SAMPLING),
                                 ("sample", 0.0, SamplingConfig(temperature=0, max_tokens=30))):
        method = ChunkMethod(PolicyChunk(policy, mode, forced=forced, dial=dial))
        # the distribution recorded with the rollout is the one that it was drawn from
        for result in check_ways(decoder, prompts, method, sampling, batch, chunks, seed=3, group_size=2):
            positions = torch.tensor([result.decision_positions])
            probs = policy(result.hidden[None], positions, result.chosen_candidates[None])[0]
            probs = (probs + dial * torch.arange(1, 5)).log_softmax(-1)
            taken = probs[torch.arange(len(result.actions)), torch.tensor(result.actions) - 1]
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


def test_rules_by_hand(decoder, prompts):
    """Against what the candidates say, decision by decision."""
    for result in (results := decode(decoder, prompts, ChunkMethod(EndOnConfident([2, 3, 4])), SAMPLING, seed=4,
                                     record_hidden=True)):
        assert result.actions == [max((2, 3, 4), key=lambda a: seen[a - 1][0])
                                  for seen in result.chosen_candidates.tolist()]
    assert len({a for r in results for a in r.actions}) > 1
    with pytest.raises(ConfigError, match="needs 9 heads"):
        decode(decoder, prompts, ChunkMethod(EndOnConfident([2, 9])), SAMPLING)


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
    for wrong in (dict(reads="tokens"), dict(sizes=(5,)), dict(sizes=(0,)), dict(reads="both"),
                  dict(reads="candidates", score_width=8)):  # the last two of earlier versions
        with pytest.raises(CheckpointError, match="policy"):
            ChunkPolicyConfig(32, 4, **wrong)


def test_in_half_precision(decoder, prompts):
    half = tiny_decoder().to(torch.bfloat16)
    method = ChunkMethod(PolicyChunk(policy_of().to(torch.bfloat16), "sample"))
    for got in (decode(half, prompts, method, SAMPLING), decode(fast(half), prompts, method, SAMPLING)):
        assert all(r.tokens and len(set(r.actions)) > 0 for r in got)
