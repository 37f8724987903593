"""Chunks drawn side by side, of which the one that goes together best is spoken: loop, fast passes, engine, and against
a slow reference that makes every draw by itself."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from replayed import Replayed
from test_after_draw import policy_of
from tiny_decoders import drawn, speak_slowly
from ways import SAMPLING, check_ways, same

from dcar.decoding import BestOfChunk, ChunkMethod, FixedChunk, PolicyChunk, ShuffledChunk, decode
from dcar.decoding.engine.run import engine_for
from dcar.decoding.fast.chunk_scorer import NativeChunkScorer
from dcar.decoding.fast.passes import fast
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from heads.candidates import CHUNK_SCORE, joint_log_probs
from heads.chunk_scorer import scored_features

REPEATED = SamplingConfig(max_tokens=40, repetition_window=8, repetition_share=0.2)


def scored_policy(decoder=None, **changes):
    policy = policy_of(**{"chunk_scorer_width": 8, "chunk_scorer_embedding": 4,
                                 "chunk_scorer_ids": decoder.config.output_size, **changes})
    torch.nn.init.normal_(policy.chunk_scorer.output.weight, std=8.0)  # so that draws differ by much
    return policy.eval()


@pytest.mark.parametrize("num_candidates", [1, 3])
@pytest.mark.parametrize(("batch", "chunks"), [(1, "exact"), (3, "exact"), (8, "padded")])
def test_loop_fast_passes_and_engine_agree(decoder, prompts, num_candidates, batch, chunks):
    policy = scored_policy(decoder)
    forced = {prompts[0].utterance_id: [2, 0], prompts[1].utterance_id: [0, 3]}
    for mode, sampling in (("greedy", SAMPLING), ("sample", SAMPLING), ("sample", SamplingConfig(temperature=0))):
        method = ChunkMethod(PolicyChunk(policy, mode, forced=forced, dial=0.3, num_candidates=num_candidates))
        expected = check_ways(decoder, prompts, method, sampling, batch, chunks, seed=3, group_size=2)
        assert expected[0].candidates.shape[-1] == CHUNK_SCORE + 1
        assert {tuple(set(r.actions)) for r in expected[:4:3]} == {(2,), (3,)}  # the forced ones
        chosen = {n for r in expected[:4:3] for n in r.chosen}
        assert chosen == set() if num_candidates == 1 else len(chosen) > 1 or sampling.temperature == 0
        for result in expected:  # the log-probabilities recorded are those of candidate and size together
            given = result.hidden[None], torch.tensor([result.decision_positions]), result.candidates[None]
            scores = policy.end_scores(*given)[0]
            assert scores.shape == (len(result.actions), num_candidates, 4)
            assert torch.allclose(policy(*given)[0].flatten(1), joint_log_probs(scores, result.candidates))
            spoken = 4 * torch.tensor(result.chosen or [0])
            probs = joint_log_probs(scores + 0.3 * torch.arange(1, 5), result.candidates)
            taken = probs[torch.arange(len(probs)), spoken + torch.tensor(result.actions) - 1]
            assert taken.tolist() == pytest.approx(result.action_log_probs, abs=1e-4)


def test_graphs_write_what_decisions_saw_where_it_is_read(decoder, prompts, monkeypatch):
    """An engine that was asked for four candidates, for one, and for four again: the graphs of the first wrote to a
    buffer that was gone."""
    where: dict[tuple, torch.Tensor] = {}
    run = Replayed.run

    def watched(self, key, step, state, signature):
        assert where.setdefault((self, key), engine.candidates) is engine.candidates
        run(self, key, step, state, signature)

    monkeypatch.setattr("dcar.decoding.engine.steps.StepGraphs", Replayed)
    monkeypatch.setattr(Replayed, "run", watched)
    policy = scored_policy(decoder=decoder)
    engine = engine_for(decoder, prompts, SAMPLING, batch=3, policy=policy)
    for num_candidates in (4, 4, 1, 4):
        method = ChunkMethod(PolicyChunk(policy, "sample", num_candidates=num_candidates))
        same(engine.decode(prompts, method, SAMPLING, record_hidden=True),
             decode(decoder, prompts, method, SAMPLING, record_hidden=True))
    # captured anew where the number of candidates changes, and only there
    assert len({graphs for graphs, _ in where}) == 3


def test_the_engine_and_a_policy_of_fewer_sizes_than_heads(decoder, prompts):
    policy = scored_policy(decoder, num_actions=3)
    method = ChunkMethod(PolicyChunk(policy, "sample", num_candidates=3))
    engine = engine_for(decoder, prompts, SAMPLING, batch=3, policy=policy)
    expected = decode(decoder, prompts, method, SAMPLING, seed=3, record_hidden=True)
    assert decoder.config.num_prediction_heads > 3 and {a for r in expected for a in r.actions} == {1, 2, 3}
    same(engine.decode(prompts, method, SAMPLING, seed=3, record_hidden=True), expected)


def test_where_a_size_is_forced_the_draw_is_chosen(decoder, prompts):
    policy = scored_policy(decoder=decoder)
    forced = {p.utterance_id: [3] for p in prompts}
    results = decode(decoder, prompts, ChunkMethod(PolicyChunk(policy, forced=forced, num_candidates=3)), SAMPLING,
                     seed=2, record_hidden=True)
    assert {a for r in results for a in r.actions} == {3} and len({n for r in results for n in r.chosen}) == 3
    for result in results:
        log_probs = policy(result.hidden[None], candidates=result.candidates[None])[0]
        assert log_probs[..., 2].argmax(-1).tolist() == result.chosen


@pytest.mark.parametrize("num_candidates", [1, 3])
def test_shuffled_sizes_are_those_of_the_policy_in_another_order(decoder, prompts, num_candidates):
    policy = scored_policy(decoder=decoder)
    asked = PolicyChunk(policy, num_candidates=num_candidates)
    spoken = decode(decoder, prompts, ChunkMethod(asked), SAMPLING, seed=3, record_hidden=True)
    again = decode(decoder, prompts, ChunkMethod(ShuffledChunk(asked)), SAMPLING, seed=3, record_hidden=True)
    for before, after in zip(spoken, again, strict=True):
        sizes, rounds = sorted(before.actions), len(before.actions)
        for start in range(0, len(after.actions), rounds):
            part = after.actions[start : start + rounds]
            assert sorted(part) == sizes if len(part) == rounds else not Counter(part) - Counter(sizes)
        if num_candidates > 1:  # the policy chooses the draw, given the size
            probs = policy(after.hidden[None], candidates=after.candidates[None])[0]
            at_size = probs[torch.arange(len(probs)), :, torch.tensor(after.actions) - 1]
            assert at_size.argmax(-1).tolist() == after.chosen
    assert any(a.actions[: len(b.actions)] != b.actions for a, b in zip(again, spoken, strict=True))
    for batch in (1, 2):
        same(decode(fast(decoder), prompts, ChunkMethod(ShuffledChunk(asked)), SAMPLING, seed=3, batch_size=batch,
                    record_hidden=True), again)
    # the policy is as it was
    same(decode(decoder, prompts, ChunkMethod(asked), SAMPLING, seed=3, record_hidden=True), spoken)
    with pytest.raises(ConfigError, match="every utterance once"):
        decode(decoder, prompts, ChunkMethod(ShuffledChunk(asked)), SAMPLING, group_size=2)


def test_sizes_that_never_vary_are_not_changed_by_shuffling(decoder, prompts):
    policy = scored_policy(decoder=decoder, sizes=(3,))
    shuffled = ChunkMethod(ShuffledChunk(PolicyChunk(policy)))
    fixed = decode(decoder, prompts, ChunkMethod(FixedChunk(3)), SAMPLING, seed=1)
    assert [r.tokens for r in decode(decoder, prompts, shuffled, SAMPLING, seed=1)] == [r.tokens for r in fixed]


@pytest.mark.parametrize("sampling", [SAMPLING, REPEATED])
def test_speaks_the_chunk_that_goes_together_best(decoder, prompts, sampling):
    """Every draw made by itself, at numbers a third of the circle apart, and the sums of what its tokens add."""
    chunk_scorer, chosen = scored_policy(decoder=decoder, seed=1).chunk_scorer, []

    def next_chunk(tokens, key, hidden):
        chunks = [drawn(decoder, hidden[-1], tokens, 4, key, sampling, n / 3) for n in range(3)]
        seen = scored_features(chunk_scorer, hidden[-1:], decoder.heads(hidden[-1:], 4), torch.tensor([chunks]))
        chosen.append(int(seen[0, ..., CHUNK_SCORE].sum(-1).argmax()))
        return chunks[chosen[-1]]

    results = decode(decoder, prompts, ChunkMethod(BestOfChunk(4, 3, chunk_scorer)), sampling, seed=5)
    for prompt, result in zip(prompts, results, strict=True):
        assert (result.tokens, result.actions) == speak_slowly(decoder, prompt, next_chunk, sampling, 5)
    assert sum(map(bool, chosen)) > 5


def test_the_most_best_of_draw_by_kernels_and_by_the_module(decoder, prompts, monkeypatch):
    """A fast decoder asks the kernels, with the weights of the moment; the plain one, the reference, the module."""
    asked = []
    monkeypatch.setattr(NativeChunkScorer, "__call__", lambda self, *given, of=NativeChunkScorer.__call__: (
        asked.append(self), of(self, *given))[1])
    chunk_scorer = scored_policy(decoder=decoder, chunk_scorer_width=16).chunk_scorer
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
    policy = scored_policy(decoder=decoder, sizes=(3,))
    with torch.no_grad():
        for weight in policy.scores.parameters():
            weight.zero_()  # all draws alike but for their shares
    one, three = (decode(decoder, prompts, ChunkMethod(PolicyChunk(policy, num_candidates=n)), SAMPLING, seed=2)
                  for n in (1, 3))
    expected = decode(decoder, prompts, ChunkMethod(FixedChunk(3)), SAMPLING, seed=2)
    best = decode(decoder, prompts, ChunkMethod(BestOfChunk(3, 3, policy.chunk_scorer)), SAMPLING, seed=2)
    assert [r.tokens for r in one] == [r.tokens for r in expected] != [r.tokens for r in three]
    assert [r.tokens for r in three] == [r.tokens for r in best]


def test_nothing_to_choose_at_temperature_0(decoder, prompts):
    policy, cold = scored_policy(decoder=decoder), SamplingConfig(temperature=0, max_tokens=40)
    one, five = (decode(decoder, prompts, ChunkMethod(PolicyChunk(policy, num_candidates=n)), cold) for n in (1, 5))
    assert [(r.tokens, r.actions) for r in one] == [(r.tokens, r.actions) for r in five]


def test_refuses_what_cannot_be_chosen_among(decoder, prompts):
    with pytest.raises(ConfigError, match="chunk_scorer"):
        PolicyChunk(policy_of(), num_candidates=4)
    policy = scored_policy(decoder=decoder)
    with pytest.raises(ConfigError, match="not 0"):
        PolicyChunk(policy, num_candidates=0)
    with pytest.raises(ConfigError, match="at least 2"):
        BestOfChunk(3, 1, policy.chunk_scorer)
    with pytest.raises(ConfigError, match="needs 9 heads"):
        decode(decoder, prompts, ChunkMethod(BestOfChunk(9, 2, policy.chunk_scorer)), SAMPLING)
