"""Verifying methods: exact output, EOS, limits. All rules, step by step:
test_verifiers_oracle.py."""

import pytest
import torch
from tiny_decoders import eos_decoder, tiny_decoder
from tiny_verifiers import (
    FALSE_ALARM,
    goodness,
    imperfect_draft,
    method_of,
    plain,
    sequence_distribution,
)

from dcar.decoding import DecodeResult, Prompt, decode
from dcar.model.car import CARDecoder
from dcar.model.draft import build_draft
from dcar.sampling import SamplingConfig
from eval.verifiers.drafters import HeadDrafter, ModelDrafter
from eval.verifiers.sd import SpeculativeDecoding

SAMPLING = SamplingConfig(temperature=0.9, top_k=8, max_tokens=60, max_tokens_per_text_unit=6)
# no EOS in the first few rounds
LONG = SamplingConfig(min_tokens=16, max_tokens=60, max_tokens_per_text_unit=6)
GREEDY = SamplingConfig(temperature=0, max_tokens=40, min_tokens=0)
METHODS = ["sd", "ssd", "pcg", "typical", "topk"]
DRAFTERS = ["heads", "draft"]


def drafter_of(source: str, target: CARDecoder, length: int = 3, noise: float = 0.4):
    return (
        HeadDrafter(length)
        if source == "heads"
        else ModelDrafter(imperfect_draft(target, noise), length)
    )


# --- exact output ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", DRAFTERS)
# groups of one token each
@pytest.mark.parametrize(("kind", "theta"), [("sd", 0), ("ssd-0", 0), ("pcg", 1.0)])
def test_greedy_output_is_that_of_greedy_decoding(prompts, source, kind, theta):
    target = tiny_decoder()
    with torch.no_grad():  # head 2 predicts like head 1, so that some drafts of the heads are right
        target.heads.projection[0].copy_(target.heads.base.weight.T)
    expected = plain(target, prompts, GREEDY)
    results = decode(
        target, prompts, method_of(kind, target, drafter_of(source, target), theta), GREEDY
    )
    assert [r.tokens for r in results] == [r.tokens for r in expected]
    assert 0 < sum(sum(r.accepted) for r in results) < sum(sum(r.proposed) for r in results)
    assert sum(r.passes for r in results) < sum(r.passes for r in expected)


@pytest.mark.parametrize("sampling", [SAMPLING, LONG])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_perfect_draft_reproduces_next_token_decoding_token_by_token(
    decoder, prompts, length, sampling
):
    """Draft and target are one model: every draft is right, and drafts take the draws of
    next-token decoding."""
    results = decode(
        decoder,
        prompts,
        SpeculativeDecoding("sd", ModelDrafter(build_draft(decoder).eval(), length)),
        sampling,
        seed=5,
    )
    expected = plain(decoder, prompts, sampling, seed=5)
    assert [r.tokens for r in results] == [r.tokens for r in expected]
    assert all(r.accepted == r.proposed for r in results)
    if sampling is LONG:
        assert all(r.proposed.count(length) > 1 for r in results)


SHORT = SamplingConfig(temperature=0.9, top_p=0.97, max_tokens=4, max_tokens_per_text_unit=9)
# Repetition-aware: a token that makes up a third of the last three is drawn again, from the whole
# distribution.
REPETITION = SamplingConfig(
    temperature=0.9,
    top_p=0.8,
    top_k=3,
    max_tokens=4,
    max_tokens_per_text_unit=9,
    repetition_window=3,
    repetition_share=0.3,
)


@pytest.mark.parametrize("sampling", [SHORT, REPETITION], ids=["plain", "repetition-aware"])
@pytest.mark.parametrize("source", DRAFTERS)
def test_sequences_of_sd_have_the_distribution_of_next_token_decoding(source, sampling):
    target = tiny_decoder(heads=3, seed=2, speech_vocab_size=3)
    prompt = Prompt("u", (1, 2, 3), (0, 1))
    probs = sequence_distribution(target, prompt, sampling, 4)
    assert sum(probs.values()) == pytest.approx(1, abs=1e-5)

    def sample_with(kind: str) -> list[DecodeResult]:
        method = method_of(kind, target, drafter_of(source, target, 2, noise=2.0))
        return decode(target, [prompt], method, sampling, seed=3, group_size=6000)

    exact = sample_with("sd")
    assert goodness(exact, probs, 3) > FALSE_ALARM
    accepted, proposed = sum(sum(r.accepted) for r in exact), sum(sum(r.proposed) for r in exact)
    assert 0.05 < accepted / proposed < 0.95
    # the test has the power to see a tolerance of 0.4
    assert goodness(sample_with("ssd-eos"), probs, 3) < FALSE_ALARM


# --- EOS and limits -------------------------------------------------------------------------------


def test_accepted_eos_ends_the_utterance_without_a_bonus_token(prompts):
    """Heads and base agree on EOS: it is drafted, accepted, and nothing follows."""
    target = eos_decoder(2)
    with torch.no_grad():  # the base head is undecided between EOS and the rest, the draft says EOS
        target.heads.base.weight[12] = target.heads.base.weight[:12].mean(0)
    sampling = SamplingConfig(max_tokens=50, min_tokens=0)
    results = decode(
        target, prompts, SpeculativeDecoding("sd", HeadDrafter(3)), sampling, group_size=40
    )
    ended = [r for r in results if r.accepted and r.accepted[-1]]
    assert len(ended) > 20
    for r in ended:
        assert r.proposed[-1] == r.accepted[-1] == 1  # nothing is drafted behind EOS
        assert not r.truncated and 12 not in r.tokens and r.emitted[-1] == 0


@pytest.mark.parametrize("kind", METHODS)
def test_refused_eos_is_replaced_and_decoding_goes_on(prompts, kind):
    """Only the heads say EOS, the base never: no tolerance and no group may let it through."""
    target = eos_decoder(2)
    results = decode(
        target,
        prompts,
        method_of(kind, target, HeadDrafter(3)),
        SamplingConfig(max_tokens=50, max_tokens_per_text_unit=4),
    )
    for prompt, r in zip(prompts, results, strict=True):
        assert r.truncated and len(r.tokens) == 4 * len(prompt.text_ids)
        assert set(r.proposed) == {1} and set(r.accepted) == {0}


@pytest.mark.parametrize("source", DRAFTERS)
def test_eos_is_not_drafted_before_the_minimum(prompts, source):
    target = eos_decoder(1)
    results = decode(
        target,
        prompts,
        SpeculativeDecoding("sd", drafter_of(source, target, noise=0)),
        SamplingConfig(max_tokens=50, min_tokens=5),
    )
    assert all(len(r.tokens) == 5 and not r.truncated for r in results)
    if source == "draft":  # the base head's distribution drafts: what it proposes passes
        assert all(r.accepted == r.proposed != [] for r in results)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_length_limit_is_met_exactly_by_rows_of_any_length(prompts, limit):
    """One head and a draft longer than the cache's own slack; rows near their limit beside rows
    that are not."""
    target = tiny_decoder(heads=1)
    with torch.no_grad():
        target.heads.base.weight[12] = -10  # hardly ever EOS
    sampling = SamplingConfig(max_tokens=7 * limit, max_tokens_per_text_unit=limit, min_tokens=100)
    for kind in ("sd", "topk"):
        results = decode(
            target, prompts, method_of(kind, target, drafter_of("draft", target, 6)), sampling
        )
        for prompt, r in zip(prompts, results, strict=True):
            assert r.truncated and len(r.tokens) == min(7 * limit, limit * len(prompt.text_ids))
