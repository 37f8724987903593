"""Verifying methods against the oracle (tests/oracle.py), token for token and in every record."""

import random

import oracle
import pytest
import torch
from held import REPETITION, SAMPLINGS, hold, target
from tiny_backbones import tiny_backbone
from tiny_decoders import tiny_decoder
from tiny_verifiers import imperfect_draft, rule_of

from dcar.decoding import ChunkMethod, FixedChunk
from dcar.sampling import SamplingConfig
from eval.verifiers.drafters import HeadDrafter, ModelDrafter
from eval.verifiers.entropy import EntropyChunk
from eval.verifiers.mtp_viterbi import MTPViterbi, Transitions, count_bigrams
from eval.verifiers.pcg import build_groups
from eval.verifiers.vadusa import RankTree, Vadusa, chain

THETA = 0.1
BUSH = RankTree(((0,), (1,), (4,), (0, 0), (0, 2), (1, 0), (0, 0, 1)))
UTTERANCES = [[random.Random(i).randrange(12) for _ in range(20)] for i in range(30)]


def chains(kind, by, length=3, noise=0.8):
    """A case of `rule_of(kind)`, drafted by the heads or by a draft model."""
    def case(read):
        model = target()
        groups = build_groups(model.speech_embedding.weight[:12], THETA)
        if by == "heads":
            drafter, how = HeadDrafter(length), dict(length=length)
        else:
            draft = read(imperfect_draft(model, noise))
            drafter, how = ModelDrafter(draft, length), dict(length=length, draft=draft)
        rule = {
            "sd": lambda: oracle.tolerant(**how), "ssd": lambda: oracle.tolerant(0.4, **how),
            "ssd-eos": lambda: oracle.tolerant(0.4, eos_strict=False, **how), "typical": lambda: oracle.typical(**how),
            "pcg": lambda: oracle.coarse(oracle.groups_of(model, THETA), **how),
            "topk": lambda: oracle.top_k_verify(2, **how),
        }[kind]()
        return read(model), rule_of(kind, drafter, groups), rule
    return case


@pytest.mark.parametrize("by", ["heads", "draft"])
@pytest.mark.parametrize("kind", ["sd", "ssd", "ssd-eos", "pcg", "typical", "topk"])
def test_chains(kind, by):
    spoken = hold(chains(kind, by), SAMPLINGS | REPETITION)
    assert 0.05 < sum(s.accepted for s in spoken) / sum(s.proposed for s in spoken) < 0.95
    assert {s.truncated for s in spoken} == {True, False}


@pytest.mark.parametrize("tree", [chain(3), BUSH], ids=["chain", "tree"])
def test_trees(tree):
    spoken = [s for tau in (1, 2, 3) for s in hold(
        lambda read, tau=tau: (read(target()), Vadusa(tau, tree), oracle.vadusa(tau, tree.paths)), SAMPLINGS)]
    assert {0, 1, 2} <= {n for s in spoken for n in s.rounds_accepted}
    assert any(s.truncated and s.emitted[-1] <= s.rounds_accepted[-1] for s in spoken)  # a limit inside a path


def test_ends_in_trees():
    """Where nodes often end, which branch leads furthest is asked as if none did."""
    paths = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))

    def case(read):
        model = target(end=0.5)
        with torch.no_grad():  # hidden states of little content: all heads draft what the base head says
            model.norm.weight.mul_(0.3)
            model.heads.block_weight.zero_()
            model.heads.block_bias.fill_(-1e4)
        return read(model), Vadusa(3, RankTree(paths)), oracle.vadusa(3, paths)

    spoken = hold(case, {"flat": SamplingConfig(temperature=1.5, top_k=4, max_tokens=12)}, [dict(group_size=40)])
    assert sum(s.accepted for s in spoken) > 20 and not all(s.truncated for s in spoken)


def test_a_long_way_to_the_residual_of_groups():
    """A draft so near that thinning seldom passes: the residual is enumerated."""
    spoken = hold(chains("pcg", "draft", noise=0.05), {"plain": SAMPLINGS["plain"]}, [dict(group_size=40)])
    assert any(s.accepted < s.proposed for s in spoken)


def test_entropy():
    spoken = hold(lambda read: (read(target()), ChunkMethod(EntropyChunk(1.9)), oracle.entropy(1.9)),
                  SAMPLINGS | REPETITION)
    assert len({a for s in spoken for a in s.actions}) > 2


def test_viterbi():
    table = Transitions(*count_bigrams(UTTERANCES, 12), 14, 0.5)
    rule = oracle.viterbi(3, 2, oracle.transitions(UTTERANCES, 12, 0.5))
    spoken = hold(lambda read: (read(target()), MTPViterbi(3, table, 2), rule), SAMPLINGS)
    assert {s.truncated for s in spoken if s.emitted[-1] < 3} == {True, False}


OTHERS = {
    "qwen2": lambda: tiny_backbone(kind="qwen2"), "llama, no BOS": lambda: tiny_backbone(kind="llama", bos=False),
    "shared heads, no BOS": lambda: tiny_decoder(kind="shared", bos=False)}


@pytest.mark.parametrize("name", OTHERS)
def test_other_decoders(name):
    """Language models, shared heads, and prompts without BOS: chunks, drafts and trees."""
    def chunks(read):
        return read(OTHERS[name]()), ChunkMethod(FixedChunk(3)), oracle.fixed(3)

    def drafts(read):
        model = OTHERS[name]()
        draft = read(imperfect_draft(model))
        return read(model), rule_of("ssd", ModelDrafter(draft, 3), None), oracle.tolerant(0.4, draft=draft)

    def tree(read):
        return read(OTHERS[name]()), Vadusa(2, BUSH), oracle.vadusa(2, BUSH.paths)

    for case in (chunks, drafts, tree):
        spoken = hold(case, {"top-p": SAMPLINGS["top-p"], "short": SAMPLINGS["short"]})
        assert any(s.truncated for s in spoken) and any(n > 1 for s in spoken for n in s.emitted)
