"""Chunk-wise methods against the oracle (tests/oracle.py), token for token and in every record."""

import oracle
import pytest
import torch
from held import HOW, REPETITION, SAMPLINGS, hold, target
from tiny_decoders import policy_of

from dcar.decoding import BestOfChunk, ChunkMethod, EndOnConfident, FixedChunk, PolicyChunk, RandomChunk, ShuffledChunk
from heads.policy import ChunkPolicy, ChunkPolicyConfig

FORCED = {"a": [2, 0, 3], "c#2": [4, 1, 1]}


def candidates_policy(scored: bool = False, **changes) -> ChunkPolicy:
    torch.manual_seed(1)
    scorer = dict(chunk_scorer_width=8, chunk_scorer_embedding=4, chunk_scorer_ids=13) if scored else {}
    policy = ChunkPolicy(ChunkPolicyConfig(32, 4, reads="candidates", **scorer, **changes)).eval()
    torch.nn.init.normal_(policy.scores.linear.weight, std=0.1)
    policy.scores.linear.weight.data[:, 9:] = 0.0  # tokens decide, not lengths
    if scored:
        torch.nn.init.normal_(policy.chunk_scorer.output.weight, std=8.0)  # so that draws differ by much
    return policy


def ruled(schedule, rule):
    return lambda read: (read(target()), ChunkMethod(schedule), rule)


def by_policy(make, mode="greedy", shuffle=False, **how):
    """A policy's case; `how` as for `PolicyChunk`."""
    def case(read):
        policy = read(make())
        schedule = PolicyChunk(policy, mode, **how)
        rule = oracle.policy(policy, mode, several=how.get("num_candidates", 1), dial=how.get("dial", 0.0),
                             forced=how.get("forced"))
        return (read(target()), ChunkMethod(ShuffledChunk(schedule) if shuffle else schedule),
                oracle.shuffled(rule) if shuffle else rule)
    return case


def best_of(read):
    scorer = read(candidates_policy(scored=True).chunk_scorer)
    return read(target()), ChunkMethod(BestOfChunk(4, 3, scorer)), oracle.best_of(4, 3, scorer)


def scored():
    return candidates_policy(scored=True)


CASES = {
    "far": ruled(FixedChunk(1), oracle.fixed(1)),
    "car-2": ruled(FixedChunk(2), oracle.fixed(2)),
    "car-4": ruled(FixedChunk(4), oracle.fixed(4)),
    "random": ruled(RandomChunk([1, 2, 2, 4]), oracle.random_size([1, 2, 2, 4])),
    "end-on-confident": ruled(EndOnConfident([4, 2, 3]), oracle.end_on_confident([4, 2, 3])),
    "best-of": best_of,
    "before": by_policy(policy_of),
    "before, sampled, forced": by_policy(lambda: policy_of(None), "sample", forced=FORCED),
    "before, dial": by_policy(policy_of, dial=-0.7),
    "after": by_policy(candidates_policy),
    "after, some sizes, sampled, dial": by_policy(lambda: candidates_policy(sizes=(2, 3)), "sample", dial=0.4),
    "after, one scored": by_policy(scored, "sample", forced=FORCED),
    "after, three scored": by_policy(scored, num_candidates=3, dial=0.3),
    "after, three scored, sampled, forced": by_policy(scored, "sample", num_candidates=3, forced=FORCED),
    "shuffled": by_policy(policy_of, shuffle=True),
    "shuffled, three scored": by_policy(scored, "sample", shuffle=True, num_candidates=3),
}


@pytest.mark.parametrize("name", CASES)
def test_chunks(name):
    spoken = hold(CASES[name], SAMPLINGS | REPETITION, HOW[:1] if "shuffled" in name else HOW)
    cut = {s.truncated for s in spoken if s.emitted[-1] < s.actions[-1]}
    assert cut == {True, False} or name in ("far", "best-of")  # the end, and the limit, inside a chunk
    assert len({a for s in spoken for a in s.actions}) > 1 or name.startswith(("far", "car", "best"))
