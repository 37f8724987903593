"""Chunk-wise methods against the oracle (tests/oracle.py), token for token and in every record."""

import oracle
import pytest
from held import HOW, REPETITION, SAMPLINGS, hold
from tiny_decoders import policy_of
from tiny_methods import best_of, by_policy, candidates_policy, ruled, scored

from dcar.decoding import FixedChunk, RandomChunk
from eval.verifiers.controls import EndOnConfident

FORCED = {"a": [2, 0, 3], "c#2": [4, 1, 1]}


CASES = {
    "far": ruled(FixedChunk(1), oracle.fixed(1)),
    "car-2": ruled(FixedChunk(2), oracle.fixed(2)),
    "car-4": ruled(FixedChunk(4), oracle.fixed(4)),
    "random": ruled(RandomChunk([1, 2, 2, 4]), oracle.random_size([1, 2, 2, 4])),
    "end-on-confident": ruled(EndOnConfident(2, 4), oracle.end_on_confident([4, 2, 3])),
    "best-of": best_of,
    "before": by_policy(policy_of),
    "before, sampled, forced": by_policy(lambda: policy_of(None), "sample", forced=FORCED),
    "before, dial": by_policy(policy_of, dial=-0.7),
    "after": by_policy(candidates_policy),
    "after, some sizes, sampled, dial": by_policy(
        lambda: candidates_policy(sizes=(2, 3)), "sample", dial=0.4
    ),
    "after, one scored": by_policy(scored, "sample", forced=FORCED),
    "after, fewer sizes than heads": by_policy(
        lambda: scored(num_actions=3), "sample", num_candidates=3
    ),
    "after, three scored": by_policy(scored, num_candidates=3, dial=0.3),
    "after, three scored, sampled, forced": by_policy(
        scored, "sample", num_candidates=3, forced=FORCED
    ),
    "shuffled": by_policy(policy_of, shuffle=True),
    "shuffled, three scored": by_policy(scored, "sample", shuffle=True, num_candidates=3),
}


@pytest.mark.parametrize("name", CASES)
def test_chunks(name):
    spoken = hold(CASES[name], SAMPLINGS | REPETITION, HOW[:1] if "shuffled" in name else HOW)
    cut = {s.truncated for s in spoken if s.emitted[-1] < s.sizes[-1]}
    # the end, and the limit, inside a chunk
    assert cut == {True, False} or name in ("far", "best-of")
    assert len({a for s in spoken for a in s.sizes}) > 1 or name.startswith(("far", "car", "best"))
