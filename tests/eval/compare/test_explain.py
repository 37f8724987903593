"""Why chunks end: watching changes nothing, and what is noted is what was kept and dropped."""

import pytest
import torch

from dcar.decoding import DecodeResult, FixedChunk, PolicyChunk, decode
from dcar.sampling import SamplingConfig
from eval.compare.explain import Watched, summary
from eval.methods.controls import EndOnConfident
from heads.candidates import MIN_LOG_PROB
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    ChunkPolicy,
    HiddenPolicy,
    HiddenPolicyConfig,
)

SHORT = SamplingConfig(max_tokens=30, max_tokens_per_text_unit=8)


def policy(reads: str) -> ChunkPolicy:
    torch.manual_seed(1)
    policy = (
        HiddenPolicy(HiddenPolicyConfig(32, 4, width=16, num_attention_heads=2))
        if reads == "hidden"
        else CandidatePolicy(CandidatePolicyConfig(32, 4))
    ).eval()
    for weight in policy.parameters():
        torch.nn.init.normal_(weight, std=1.0)
    return policy


@pytest.mark.parametrize(
    "rule",
    [
        FixedChunk(3),
        EndOnConfident([2, 3]),
        PolicyChunk(policy("hidden")),
        PolicyChunk(policy("candidates"), "sample"),
    ],
)
def test_watching_changes_nothing(decoder, prompts, rule):
    plain = decode(decoder, prompts, rule, SHORT, seed=3)
    seen = decode(decoder, prompts, Watched(rule), SHORT, seed=3, record_hidden=True)
    assert [(r.tokens, r.sizes) for r in plain] == [(r.tokens, r.sizes) for r in seen]
    assert all(r.chosen_features.shape == (r.passes, 4, 3) for r in seen)


@torch.no_grad()
def test_what_is_noted_is_of_the_tokens_spoken(decoder, prompts):
    """The features of the last kept token, recomputed from the hidden state of its decision."""
    (result,) = decode(
        decoder,
        prompts[2:3],
        Watched(FixedChunk(2)),
        SHORT,
        seed=1,
        record_hidden=True,
    )
    place = 0
    for at, size, emitted, seen in zip(
        result.decision_positions,
        result.sizes,
        result.emitted,
        result.chosen_features,
        strict=True,
    ):
        if emitted == size:
            probs = decoder.heads.logits(result.hidden[at])[size - 1].log_softmax(-1)
            expected = probs[result.tokens[place + size - 1]].clamp(min=MIN_LOG_PROB)
            assert float(seen[size - 1, 0]) == pytest.approx(float(expected), abs=1e-4)
        place += emitted


def test_summary_of_decisions_known_by_hand():
    seen = torch.zeros(3, 3, 3)
    seen[:, :, 0] = torch.tensor([[-1.0, -2.0, -3.0], [-5.0, -1.0, -4.0], [-1.0, -1.0, -1.0]])
    seen[:, :, 2] = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.0, 0.0, 0.0]])
    result = DecodeResult(
        "x",
        "m",
        0,
        [1] * 4,
        False,
        3,
        emitted=[1, 2, 1],
        sizes=[1, 2, 3],
        features=torch.stack((seen, seen + 1), 1),
        chosen=[0, 0, 1],
    )
    found = summary([result])
    assert found["decisions"] == 2  # the last chunk was cut
    one, two = found["sizes"]
    assert (one["size"], one["share"], one["kept"]["drawn"], one["dropped"]["drawn"]) == (
        1,
        0.5,
        -1.0,
        -2.0,
    )
    assert two["kept"]["entropy"] == pytest.approx(0.5) and two["dropped"][
        "entropy"
    ] == pytest.approx(0.6)
    assert found["kept"]["drawn"] == [-1.0, -1.0, -1.0] and found["likeliest"] == 1.0
    whole = DecodeResult(
        "x", "m", 0, [1] * 3, False, 1, emitted=[3], sizes=[3], features=seen[:1, None]
    )
    assert summary([whole])["dropped"] is None and summary([whole])["likeliest"] is None
    assert summary(
        [DecodeResult("x", "m", 0, [], False, 1, emitted=[0], sizes=[3], features=seen[:1, None])]
    ) == {"decisions": 0, "sizes": [], "kept": None, "dropped": None, "likeliest": None}
