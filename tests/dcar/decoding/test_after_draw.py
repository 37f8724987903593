"""Decisions after the draw: what is seen of candidates, and what policies and rules make of it."""

import math

import pytest
import torch
from tiny_decoders import tiny_decoder
from tiny_methods import candidates_policy, scored

from dcar.decoding import FixedChunk, PolicyChunk, RandomChunk, decode
from dcar.errors import CheckpointError, ConfigError
from dcar.sampling import SamplingConfig
from eval.verifiers.controls import BestOfChunk, EndOnConfident, ShuffledChunk
from heads.candidates import candidate_features, end_features, joint_log_probs
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    ChunkPolicy,
    HiddenPolicy,
    HiddenPolicyConfig,
)

SAMPLING = SamplingConfig(max_tokens=60, max_tokens_per_text_unit=6)


def test_recorded_log_probs_are_those_of_candidate_and_size_together(decoder, prompts):
    """As a policy in training computes them from what was recorded."""
    policy, dial = scored(), 0.3
    asked = PolicyChunk(policy, "sample", dial=dial, num_candidates=3)
    for result in decode(decoder, prompts, asked, SAMPLING, record_hidden=True):
        ends = end_features(result.features)
        scores = 8 * ends @ policy.scores.linear.weight[0]  # by definition, without the affine map
        assert scores.shape == (len(result.sizes), 3, 4)
        assert torch.allclose(
            policy(result.features), joint_log_probs(scores, result.features), atol=1e-4
        )
        spoken = 4 * torch.tensor(result.chosen)
        probs = joint_log_probs(scores + dial * torch.arange(1, 5), result.features)
        taken = probs[torch.arange(len(probs)), spoken + torch.tensor(result.sizes) - 1]
        assert taken.tolist() == pytest.approx(result.log_probs, abs=1e-4)


def test_an_untrained_policy_is_uniform_over_its_sizes(decoder, prompts):
    policy = CandidatePolicy(CandidatePolicyConfig(32, 4, sizes=(2, 3, 4)))
    (result, *_) = decode(decoder, prompts[:1], PolicyChunk(policy, "sample"), SAMPLING)
    assert result.log_probs == pytest.approx([-torch.tensor(3.0).log().item()] * len(result.sizes))


def test_the_dial_lengthens_chunks(decoder, prompts):
    policy = candidates_policy()
    asked = [
        [
            a
            for r in decode(decoder, prompts, PolicyChunk(policy, dial=d), SAMPLING)
            for a in r.sizes
        ]
        for d in (-90.0, 0.0, 90.0)
    ]
    assert set(asked[0]) == {1} and set(asked[2]) == {4} and 1 < sum(asked[1]) / len(asked[1]) < 4


def test_features_by_hand():
    logits = torch.tensor([[0.0, 0.0, -1e9], [3.0, 0.0, 0.0]])
    seen = candidate_features(logits, torch.tensor([1, 1]))
    half = torch.tensor(0.5).log()
    assert torch.allclose(seen[0], torch.stack((half, half, -half)))
    probs = logits[1].log_softmax(-1)
    assert torch.allclose(seen[1], torch.stack((probs[1], probs[0], -(probs.exp() * probs).sum())))
    assert candidate_features(logits, torch.tensor([2, 1]))[0, 0] == -8.0 and seen.isfinite().all()
    ends = end_features(seen)
    assert (
        ends.shape == (2, 15)
        and torch.equal(ends[0, :3], seen[0])
        and torch.equal(ends[0, 3:6], seen[1])
    )
    assert not ends[1, 3:6].any() and torch.allclose(ends[1, 6:9], seen.mean(0))
    assert torch.allclose(8 * ends[1, 9:12], seen.sum(0))
    assert ends[:, -1].tolist() == [0.0, 1.0]  # behind the last candidate nothing is dropped


def test_begins_as_a_soft_rule(decoder, prompts):
    """Ever more certain of the rule, a greedy policy is `end-on-confident`."""
    policy = CandidatePolicy(CandidatePolicyConfig(32, 4, sizes=(2, 3, 4))).eval()
    policy.scores.end_on_likely()
    features = torch.tensor([[-1.0, 0, 0], [-2.0, 0, 0], [-0.5, 0, 0], [-3.0, 0, 0]])
    wanted = torch.tensor([-math.inf, -4.0, -1.0, -6.0]).log_softmax(-1)
    assert torch.allclose(policy.log_probs(features[None]).exp(), wanted.exp())
    ruled = decode(decoder, prompts, EndOnConfident(2, 4), SAMPLING, seed=3)
    own = decode(decoder, prompts, PolicyChunk(policy), SAMPLING, seed=3)
    assert [(r.tokens, r.sizes) for r in own] == [(r.tokens, r.sizes) for r in ruled]


def test_checkpoints_of_every_kind(tmp_path):
    for policy in (
        HiddenPolicy(HiddenPolicyConfig(32, 4, width=16, num_attention_heads=2, sizes=(2, 4))),
        CandidatePolicy(CandidatePolicyConfig(32, 4, sizes=(2, 4))),
    ):
        folder = tmp_path / policy.model_type
        policy.save_pretrained(folder)
        for kind in (ChunkPolicy, type(policy)):
            loaded = kind.from_pretrained(folder)
            assert type(loaded) is type(policy) and loaded.config == policy.config
            assert loaded.checksum() == policy.checksum()
            assert loaded.forbidden_sizes.tolist() == [True, False, True, False]
    with pytest.raises(CheckpointError, match="candidate-policy' .*hidden-policy'"):
        HiddenPolicy.from_pretrained(folder)
    for wrong in (dict(sizes=(5,)), dict(sizes=(0,))):
        with pytest.raises(CheckpointError, match="policy"):
            CandidatePolicyConfig(32, 4, **wrong)


def test_in_half_precision(prompts):
    """Also with a chunk scorer, which stays float32."""
    half = tiny_decoder().to(torch.bfloat16)
    for rule in (
        PolicyChunk(candidates_policy(), "sample"),
        PolicyChunk(scored(width=16), num_candidates=3),
        BestOfChunk(4, 3, scored(width=16).chunk_scorer),
    ):
        results = decode(half, prompts, rule, SAMPLING, record_hidden=True)
        assert all(r.tokens and r.features.dtype == torch.float32 for r in results)


def test_one_draw_of_a_policy_of_one_size_is_car_k(decoder, prompts):
    """Several draws are the best of them; shuffling sizes that never vary changes nothing."""
    policy = scored(sizes=(3,))
    with torch.no_grad():
        for weight in policy.scores.parameters():
            weight.zero_()  # all draws alike but for their shares
    one, sampled, shuffled, car, three, best = (
        [r.tokens for r in decode(decoder, prompts, rule, SAMPLING, seed=2)]
        for rule in (
            PolicyChunk(policy),
            PolicyChunk(policy, "sample"),
            ShuffledChunk(policy),
            FixedChunk(3),
            PolicyChunk(policy, num_candidates=3),
            BestOfChunk(3, 3, policy.chunk_scorer),
        )
    )
    assert one == sampled == shuffled == car != three == best


def test_refuses_what_cannot_be_chosen_among():
    for message, ask in (
        ("chunk_scorer", lambda: PolicyChunk(candidates_policy(), num_candidates=4)),
        ("sizes", lambda: RandomChunk([])),
    ):
        with pytest.raises(ConfigError, match=message):
            ask()
