"""Methods of every kind for tiny decoders: cases for tests/held.py, with the oracle's rules, and
all of them on one decoder."""

import random
from typing import Any

import oracle
import torch
from held import Case, target
from tiny_decoders import policy_of, tiny_decoder
from tiny_verifiers import imperfect_draft, rule_of

from dcar.decoding import ChunkRule, FixedChunk, Method, PolicyChunk, RandomChunk
from dcar.model.car import CARDecoder
from eval.verifiers.controls import BestOfChunk, EndOnConfident, ShuffledChunk
from eval.verifiers.drafters import HeadDrafter, ModelDrafter
from eval.verifiers.entropy import EntropyChunk
from eval.verifiers.mtp_viterbi import MTPViterbi, Transitions, count_bigrams
from eval.verifiers.pcg import GroupVerifier, build_groups
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.ssd import TolerantDecoding
from eval.verifiers.topk_verify import TopKVerify
from eval.verifiers.typical import TypicalAcceptance
from eval.verifiers.vadusa import RankTree, Vadusa, chain
from heads.chunk_scorer import ChunkScorerConfig
from heads.policy import CandidatePolicy, CandidatePolicyConfig

THETA = 0.1
BUSH = RankTree(((0,), (1,), (4,), (0, 0), (0, 2), (1, 0), (0, 0, 1)))
UTTERANCES = [[random.Random(i).randrange(12) for _ in range(20)] for i in range(30)]


def candidates_policy(
    scored: bool = False, num_actions: int = 4, width: int = 8, **changes
) -> CandidatePolicy:
    """Return a policy after the draw, far from uniform; `scored`: with a chunk scorer of this
    width."""
    torch.manual_seed(1)
    scorer = ChunkScorerConfig(32, num_actions, 13, 4, width, 2) if scored else None
    shape = CandidatePolicyConfig(32, num_actions, chunk_scorer=scorer, **changes)
    policy = CandidatePolicy(shape).eval()
    torch.nn.init.normal_(policy.scores.linear.weight, std=0.1)
    policy.scores.linear.weight.data[:, 9:] = 0.0  # the choice depends on tokens, not lengths
    if scored:
        # so that candidates differ clearly
        torch.nn.init.normal_(policy.chunk_scorer.output.weight, std=8.0)
    return policy


def scored(**changes) -> CandidatePolicy:
    return candidates_policy(scored=True, **changes)


def ruled(chunk_rule: ChunkRule, rule: oracle.Rule) -> Case:
    return lambda read: (read(target()), chunk_rule, rule)


def by_policy(make, mode: str = "greedy", shuffle: bool = False, **how: Any) -> Case:
    """Return the case of a policy; `how`: arguments of `PolicyChunk`."""

    def case(read):
        policy = read(make())
        schedule = PolicyChunk(policy, mode, **how)
        rule = oracle.policy(
            policy,
            mode,
            several=how.get("num_candidates", 1),
            dial=how.get("dial", 0.0),
            forced=how.get("forced"),
        )
        return (
            read(target()),
            ShuffledChunk(policy, mode, **how) if shuffle else schedule,
            oracle.shuffled(rule) if shuffle else rule,
        )

    return case


def best_of(read):
    scorer = read(scored(width=16).chunk_scorer)
    return read(target()), BestOfChunk(4, 3, scorer), oracle.best_of(4, 3, scorer)


def chains(kind: str, by: str, length: int = 3, noise: float = 0.8) -> Case:
    """Return the case of `rule_of(kind)`, drafted by the heads or by a draft model."""

    def case(read):
        model = target()
        groups = build_groups(model.speech_embedding.weight[:12].detach().clone(), THETA)
        if by == "heads":
            drafter, how = HeadDrafter(length), dict(length=length)
        else:
            draft = read(imperfect_draft(model, noise))
            drafter, how = ModelDrafter(draft, length), dict(length=length, draft=draft)
        rule = {
            "sd": lambda: oracle.tolerant(**how),
            "ssd": lambda: oracle.tolerant(0.4, **how),
            "ssd-eos": lambda: oracle.tolerant(0.4, eos_strict=False, **how),
            "typical": lambda: oracle.typical(**how),
            "pcg": lambda: oracle.coarse(oracle.groups_of(model, THETA), **how),
            "topk": lambda: oracle.top_k_verify(2, **how),
        }[kind]()
        return read(model), rule_of(kind, drafter, groups), rule

    return case


def vadusa(tau: int, tree: RankTree = BUSH) -> Case:
    return lambda read: (read(target()), Vadusa(tau, tree), oracle.vadusa(tau, tree.paths))


def viterbi(read):
    rule = oracle.viterbi(3, 2, oracle.transitions(UTTERANCES, 12, 0.5))
    return (
        read(target()),
        MTPViterbi(3, 2, Transitions(*count_bigrams(UTTERANCES, 12), 14, 0.5)),
        rule,
    )


entropy = ruled(EntropyChunk(1.9), oracle.entropy(1.9))

KINDS: dict[str, Case] = {
    "car-3": ruled(FixedChunk(3), oracle.fixed(3)),
    "before the draw": by_policy(policy_of, "sample"),
    "after the draw": by_policy(lambda: scored(width=16), "sample", num_candidates=3, dial=0.3),
    "best-of": best_of,
    "entropy": entropy,
    "sd by heads": chains("sd", "heads"),
    "ssd by a draft": chains("ssd", "draft"),
    "pcg by a draft": chains("pcg", "draft"),
    "tree": vadusa(2),
    "mtp-viterbi": viterbi,
}
"""One case of each kind: each stores other data for a row."""


def every_method(device: torch.device | str = "cpu") -> tuple[CARDecoder, dict[str, Method]]:
    """Return a decoder on a device, and methods of every kind by name."""
    model = tiny_decoder()
    groups = build_groups(model.speech_embedding.weight[:12], THETA)
    before, after = policy_of(16).to(device), scored(width=16).to(device)
    assert after.chunk_scorer is not None
    heads, models = HeadDrafter(3), ModelDrafter(imperfect_draft(model).to(device), 3)
    rules: list[ChunkRule] = [
        FixedChunk(1),
        FixedChunk(4),
        RandomChunk([1, 2, 4]),
        EndOnConfident(2, 4),
        BestOfChunk(3, 2, after.chunk_scorer),
        EntropyChunk(1.0),
        PolicyChunk(before).named("dcar, before the draw"),
        PolicyChunk(before, "sample").named("dcar-sampled"),
        PolicyChunk(after).named("dcar, after the draw"),
        PolicyChunk(after, "sample", num_candidates=3).named("dcar, of three chunks"),
        ShuffledChunk(after),
    ]
    transitions = Transitions(*count_bigrams(UTTERANCES, 12), 14)
    verifiers: list[Method] = [
        SpeculativeDecoding(drafter=heads),
        SpeculativeDecoding(drafter=models).named("sd@draft"),
        TolerantDecoding(0.4, drafter=heads).named("ssd"),
        TolerantDecoding(0.2, eos=True, drafter=models).named("ssd@draft"),
        GroupVerifier(THETA, groups, drafter=heads).named("pcg"),
        GroupVerifier(THETA, groups, drafter=models).named("pcg@draft"),
        TypicalAcceptance(drafter=heads),
        TopKVerify(2, drafter=heads).named("top-k"),
        Vadusa(1, BUSH).named("vadusa, a tree"),
        Vadusa(3, chain(3)).named("vadusa, a chain"),
    ]
    methods = [*rules, MTPViterbi(3, 2, transitions), *verifiers]
    return model.to(device), {method.name: method for method in methods}
