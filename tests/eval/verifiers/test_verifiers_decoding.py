"""Whole sequences of SD have the distribution of next-token decoding. All rules, step by step:
test_verifiers_oracle.py."""

import pytest
import torch
from tiny_decoders import tiny_decoder
from tiny_verifiers import FALSE_ALARM, goodness, imperfect_draft, method_of, sequence_distribution

from dcar.decoding import DecodeResult, Prompt, decode
from dcar.model.car import CARDecoder
from dcar.sampling import SamplingConfig
from eval.verifiers.drafters import HeadDrafter, ModelDrafter

DRAFTERS = ["heads", "draft"]


def drafter_of(source: str, target: CARDecoder, length: int = 3, noise: float = 0.4):
    return (
        HeadDrafter(length)
        if source == "heads"
        else ModelDrafter(imperfect_draft(target, noise), length)
    )


# --- exact output ---------------------------------------------------------------------------------


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
    with torch.no_grad():  # some of the heads' drafts are accepted
        target.heads.projection.add_(target.heads.base.weight)
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
