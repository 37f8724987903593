"""Verifying methods against the oracle (tests/oracle.py), token for token and in every record."""

import oracle
import pytest
import torch
from held import REPETITION, SAMPLINGS, hold, target
from tiny_backbones import tiny_backbone
from tiny_decoders import tiny_decoder
from tiny_methods import BUSH, chains, entropy, vadusa, viterbi
from tiny_verifiers import imperfect_draft, rule_of

from dcar.decoding import FixedChunk
from dcar.sampling import SamplingConfig
from eval.verifiers.drafters import ModelDrafter
from eval.verifiers.vadusa import RankTree, Vadusa, chain


@pytest.mark.parametrize("by", ["heads", "draft"])
@pytest.mark.parametrize("kind", ["sd", "ssd", "ssd-eos", "pcg", "typical", "topk"])
def test_chains(kind, by):
    spoken = hold(chains(kind, by), SAMPLINGS | REPETITION)
    assert 0.05 < sum(sum(s.accepted) for s in spoken) / sum(sum(s.proposed) for s in spoken) < 0.95
    assert {s.truncated for s in spoken} == {True, False}


@pytest.mark.parametrize("tree", [chain(3), BUSH], ids=["chain", "tree"])
def test_trees(tree):
    spoken = [s for tau in (1, 2, 3) for s in hold(vadusa(tau, tree), SAMPLINGS)]
    assert {0, 1, 2} <= {n for s in spoken for n in s.accepted}
    # a limit inside a path
    assert any(s.truncated and s.emitted[-1] <= s.accepted[-1] for s in spoken)


def test_ends_in_trees():
    """Where nodes often end, which branch leads furthest is asked as if none did."""
    paths = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))

    def case(read):
        model = target(end=0.5)
        # hidden states of little content: all heads draft what the base head says
        with torch.no_grad():
            model.norm.weight.mul_(0.3)
            model.heads.block_weight.zero_()
            model.heads.block_bias.fill_(-1e4)
        return read(model), Vadusa(3, RankTree(paths)), oracle.vadusa(3, paths)

    spoken = hold(
        case,
        {"flat": SamplingConfig(temperature=1.5, top_k=4, max_tokens=12)},
        [dict(group_size=40)],
    )
    assert sum(sum(s.accepted) for s in spoken) > 20 and not all(s.truncated for s in spoken)


def test_a_long_way_to_the_residual_of_groups():
    """A draft so near that thinning seldom passes: the residual is enumerated."""
    spoken = hold(
        chains("pcg", "draft", noise=0.05), {"plain": SAMPLINGS["plain"]}, [dict(group_size=40)]
    )
    assert any(sum(s.accepted) < sum(s.proposed) for s in spoken)


def test_entropy():
    assert len({a for s in hold(entropy, SAMPLINGS | REPETITION) for a in s.sizes}) > 2


def test_viterbi():
    assert {s.truncated for s in hold(viterbi, SAMPLINGS) if s.emitted[-1] < 3} == {True, False}


OTHERS = {
    "qwen2": lambda: tiny_backbone(kind="qwen2", seed=1),
    "llama, no BOS": lambda: tiny_backbone(kind="llama", bos=False),
    "shared heads, no BOS": lambda: tiny_decoder(kind="shared", bos=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_decoders(name):
    """Language models, shared heads, and prompts without BOS: chunks, drafts and trees."""

    def chunks(read):
        return read(OTHERS[name]()), FixedChunk(3), oracle.fixed(3)

    def drafts(read):
        model = OTHERS[name]()
        draft = read(imperfect_draft(model))
        return (
            read(model),
            rule_of("ssd", ModelDrafter(draft, 3), None),
            oracle.tolerant(0.4, draft=draft),
        )

    def tree(read):
        return read(OTHERS[name]()), Vadusa(2, BUSH), oracle.vadusa(2, BUSH.paths)

    for case in (chunks, drafts, tree):
        spoken = hold(case, {"top-p": SAMPLINGS["top-p"], "short": SAMPLINGS["short"]})
        assert any(s.truncated for s in spoken) and any(n > 1 for s in spoken for n in s.emitted)
