"""Why chunks end: watching changes nothing, and what is noted is what was kept and dropped. Losses and their paths."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from tiny_decoders import tiny_decoder

from dcar.decoding import ChunkMethod, DecodeResult, EndOnConfident, FixedChunk, PolicyChunk, decode
from dcar.prompts.items import PromptItem
from dcar.sampling import SamplingConfig
from eval.analysis.losses import by_token, led_path, loss_maps
from eval.analysis.oracle import cheapest, cheapest_path, chunk_costs, loss_matrix
from eval.analysis.reasons import Watched, summary, watch
from eval.analysis.teacher import along_recordings, teacher_forced
from eval.methods.registry import Models, make_methods
from heads.candidates import UNLIKELY, candidate_features
from heads.policy import ChunkPolicy, ChunkPolicyConfig

SHORT = SamplingConfig(max_tokens=30, max_tokens_per_text_unit=8)


def policy(reads: str) -> ChunkPolicy:
    torch.manual_seed(1)
    made = ChunkPolicy(ChunkPolicyConfig(32, 4, width=16, num_attention_heads=2, reads=reads)).eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=1.0)
    return made


@pytest.fixture
def items(prompts) -> list[PromptItem]:
    found = []
    for i, prompt in enumerate(prompts[1:]):
        tokens = np.random.default_rng(i).integers(0, 12, 9 + 2 * i).tolist()
        found.append(PromptItem(prompt, "word", "x", np.zeros(3, np.float32), tokens, "y", len(tokens) / 50))
    return found


@pytest.mark.parametrize("schedule", [FixedChunk(3), EndOnConfident([2, 3]), PolicyChunk(policy("hidden")),
                                      PolicyChunk(policy("candidates"), "sample")])
def test_watching_changes_nothing(decoder, prompts, schedule):
    plain = decode(decoder, prompts, ChunkMethod(schedule), SHORT, seed=3)
    seen = decode(decoder, prompts, ChunkMethod(Watched(schedule, 4)), SHORT, seed=3, record_hidden=True)
    assert [(r.tokens, r.actions) for r in plain] == [(r.tokens, r.actions) for r in seen]
    assert all(r.seen_of_spoken.shape == (r.target_passes, 4, 3) for r in seen)


@torch.no_grad()
def test_what_is_noted_is_of_the_tokens_spoken(decoder, prompts):
    """The features of the last kept token, recomputed from the hidden state of its decision."""
    (result,) = decode(decoder, prompts[2:3], ChunkMethod(Watched(FixedChunk(2), 4)), SHORT, seed=1, record_hidden=True)
    place = 0
    for at, size, emitted, seen in zip(result.decision_positions, result.actions, result.emitted,
                                       result.seen_of_spoken, strict=True):
        if emitted == size:
            probs = decoder.heads(result.hidden[at])[size - 1].log_softmax(-1)
            expected = probs[result.tokens[place + size - 1]].clamp(min=UNLIKELY)
            assert float(seen[size - 1, 0]) == pytest.approx(float(expected), abs=1e-4)
        place += emitted


def test_summary_of_decisions_known_by_hand():
    seen = torch.zeros(3, 3, 3)
    seen[:, :, 0] = torch.tensor([[-1.0, -2.0, -3.0], [-5.0, -1.0, -4.0], [-1.0, -1.0, -1.0]])
    seen[:, :, 2] = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.0, 0.0, 0.0]])
    result = DecodeResult("x", "m", 0, [1] * 4, False, 3, emitted=[1, 2, 1], actions=[1, 2, 3],
                          candidates=torch.stack((seen, seen + 1), 1), chosen=[0, 0, 1])
    found = summary([result])
    assert found["decisions"] == 2  # the last chunk was cut
    one, two = found["sizes"]
    assert (one["size"], one["share"], one["kept"]["drawn"], one["dropped"]["drawn"]) == (1, 0.5, -1.0, -2.0)
    assert two["kept"]["entropy"] == pytest.approx(0.5) and two["dropped"]["entropy"] == pytest.approx(0.6)
    assert found["kept"]["drawn"] == [-1.0, -1.0, -1.0] and found["likeliest"] == 1.0
    whole = DecodeResult("x", "m", 0, [1] * 3, False, 1, emitted=[3], actions=[3], candidates=seen[:1, None])
    assert summary([whole])["dropped"] is None and summary([whole])["likeliest"] is None
    assert summary([DecodeResult("x", "m", 0, [], False, 1, emitted=[0], actions=[3], candidates=seen[:1, None])]) == {
        "decisions": 0, "sizes": [], "kept": None, "dropped": None, "likeliest": None}


def test_methods_that_choose_no_chunks_are_not_watched(decoder, prompts):
    models = Models(decoder, tiny_decoder(heads=1, seed=5), {"": policy("candidates")})
    found = watch(make_methods(["far", "car-2", "end-on-confident-1-4", "dcar", "sd"], models, SHORT), prompts, 0)
    assert list(found) == ["car-2", "end-on-confident-1-4", "dcar"]
    assert found["car-2"]["sizes"][0]["share"] == 1.0
    assert sum(s["share"] for s in found["dcar"]["sizes"]) == pytest.approx(1)


def test_the_cheapest_path_is_the_cheapest_of_all():
    costs = chunk_costs(np.random.default_rng(0).exponential(size=(3, 7)))
    for k in range(3):
        costs[k, 7 - k:] = np.inf  # past the end
    for passes in range(3, 8):
        every = [s for s in product((1, 2, 3), repeat=passes) if sum(s) == 7]
        cost = {s: sum(costs[a - 1, sum(s[:i])] for i, a in enumerate(s)) for s in every}
        assert tuple(cheapest_path(costs, passes)) == min(cost, key=cost.get)
        assert cheapest(costs)[passes] == pytest.approx(min(cost.values()))
    with pytest.raises(ValueError, match="7 tokens cannot be covered by 2 chunks"):
        cheapest_path(costs, 2)


@pytest.mark.parametrize("reads", ["hidden", "candidates"])
def test_the_led_path_asks_the_policy_along_the_recording(decoder, items, reads):
    asked = policy(reads)
    states, prompt_length, targets = list(along_recordings(decoder, items))[-1]
    sizes = led_path(decoder, asked, states, prompt_length, targets)
    assert sum(sizes) == len(targets)
    place = 0
    for size in sizes:
        at = prompt_length - 1 + place
        candidates = None
        if reads != "hidden":
            logits = decoder.heads(states[at])
            tokens = [int(targets[place + k]) if place + k < len(targets) else int(logits[k].argmax())
                      for k in range(4)]
            candidates = candidate_features(logits, torch.tensor(tokens))[None, None]
        scores = asked(states[None, : at + 1], torch.tensor([[at]]), candidates)[0, 0]
        assert size == min(int(scores.argmax()) + 1, len(targets) - place)
        place += size


def test_loss_maps_stand_by_the_token(decoder, items):
    (hidden, targets), *_ = teacher_forced(decoder, items)
    losses, _ = loss_matrix(decoder, hidden, targets)
    found = by_token(losses)
    assert found[2][:2] == [None, None] and found[2][2] == pytest.approx(losses[2, 0], abs=1e-3)
    maps = loss_maps(decoder, {"dcar": policy("hidden")}, items)
    table = {row["path"]: row for row in maps["table"]}
    mine, oracle = table["dcar"], table["oracle for dcar"]
    assert oracle["tokens_per_pass"] == mine["tokens_per_pass"]
    assert oracle["nats_per_token"] <= mine["nats_per_token"]
    shown = maps["shown"]
    assert len(shown["losses"]) == 4 and all(sum(s) == len(shown["losses"][0]) for s in shown["paths"].values())
    assert shown["id"] == items[-1].prompt.utterance_id  # the one nearest to what can be drawn
    assert loss_maps(decoder, {}, items) is None
