"""Rollouts in the static engine are those of the reference loop, with the policy of the moment."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from dcar.decoding.fast.passes import Passes
from tiny_backbones import tiny_backbone
from tiny_decoders import tiny_decoder
from toy_training import Deaf, random_policy
from toy_world import ToyVocoder, toy_items

from dcar.sampling import SamplingConfig
from rl import objective
from rl.rewards import WERReward
from rl.rollout import Roller

SAMPLING = SamplingConfig(max_tokens=40, max_tokens_per_text_unit=5)


def ragged_items(count: int = 5) -> list:
    """Texts and prompts of different lengths."""
    return [replace(item, prompt=replace(item.prompt, text_ids=tuple(range(1, 3 + 2 * i)),
                                         prompt_ids=tuple((i + j) % 12 for j in range(1 + 3 * (i % 3)))))
            for i, item in enumerate(toy_items(count))]


def roller(base=None, **changes) -> Roller:
    settings = {"group_size": 4, "chunk_range": [2, 3], "sampling": SAMPLING, **changes}
    return Roller(tiny_decoder() if base is None else base, ToyVocoder(), [WERReward(Deaf())], [1.0], **settings)


def same(got, expected) -> None:
    """The whole record: tokens, decisions and where they were made, their distribution, hidden states."""
    for a, b in zip(got.records, expected.records, strict=True):
        for name in ("tokens", "actions", "emitted", "decision_positions", "truncated", "target_passes", "method",
                     "prompt_length", "seed", "utterance_id"):
            assert getattr(a.result, name) == getattr(b.result, name), name
        assert a.result.action_log_probs == pytest.approx(b.result.action_log_probs, abs=1e-5)
        assert (a.item, a.member, a.forced, a.transcript) == (b.item, b.member, b.forced, b.transcript)
    for name in ("positions", "actions", "mask", "forced", "rewards"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert got.hidden.dtype == expected.hidden.dtype and np.array_equal(got.parts, expected.parts)
    assert torch.allclose(got.hidden.float(), expected.hidden.float(), atol=1e-5 if got.hidden.dtype == torch.float32
                          else 2e-3)


@pytest.mark.parametrize("width", [16, None], ids=["bottleneck", "full"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("changes", [
    {}, {"forced_rows": "none"}, {"share_token_draws": True}, {"group_size": 6},
    {"microbatches": 3}, {"microbatches": 50},  # against one part
    {"sampling": SamplingConfig(temperature=0.8, top_k=5, top_p=0.9, min_tokens=4, max_tokens=30)},
    {"hidden_dtype": torch.float16}, {"share_token_draws": True, "forced_rows": "none", "microbatches": 2}], ids=str)
def test_rollouts_equal_those_of_the_loop(width, bos, changes):
    base, policy, items = tiny_decoder(bos=bos), random_policy(32, width=width, std=0.5), ragged_items()
    items.append(items[1])  # an epoch is filled up from its beginning, so a step can hold an utterance twice
    engine, loop = roller(base, **changes), roller(base, decoding="loop", **{**changes, "microbatches": 1})
    for seed in (1, 2):  # a used engine is as good as a new one
        got = engine.collect(policy, items, range(6), seed)
        same(got, loop.collect(policy, items, range(6), seed))
    lengths = {len(r.result.tokens) for r in got.records}
    assert len(lengths) > 3 and len({a for r in got.records for a in r.result.actions}) > 2  # ragged indeed


def test_every_rollout_is_made_with_the_policy_of_the_moment():
    """As the trainer does it: one rollout policy, which takes the trained weights before every step."""
    base, items = tiny_decoder(), ragged_items()
    engine, loop = roller(base), roller(base, decoding="loop")
    rolling, actions = random_policy(32, std=0.5), []
    for seed in range(3):
        rolling.load_state_dict(random_policy(32, seed + 5, std=0.5).state_dict())
        got = engine.collect(rolling, items, range(5), seed=1)
        same(got, loop.collect(rolling, items, range(5), seed=1))
        probs = rolling(got.hidden, got.positions)  # one pass over the stored states
        taken = objective.taken(probs, got.actions) * got.mask
        recorded = [torch.tensor(r.result.action_log_probs) for r in got.records]
        assert torch.allclose(taken, torch.nn.utils.rnn.pad_sequence(recorded, batch_first=True), atol=1e-4)
        actions.append([r.result.actions for r in got.records])
    assert actions[0] != actions[1] != actions[2]
    for parameter in rolling.parameters():  # a write that version counters do not see
        parameter.data.mul_(-1)
    same(engine.collect(rolling, items, range(5), seed=1), loop.collect(rolling, items, range(5), seed=1))


def test_the_group_shares_one_prefill(monkeypatch):
    base, items, calls, prefill = tiny_decoder(), ragged_items(), [], Passes.prefill
    monkeypatch.setattr(Passes, "prefill", lambda own, *given: calls.append(len(given[0])) or prefill(own, *given))
    roller(base, group_size=6).collect(random_policy(32, std=0.5), items, range(5), seed=0)
    assert calls == [5]


def test_steps_of_growing_and_shrinking_utterances():
    base, items = tiny_decoder(), ragged_items(8)
    engine, loop = roller(base), roller(base, decoding="loop")
    for chosen in (items[:2], items[4:8], items[:1], items[1:7]):
        same(engine.collect(random_policy(32, std=0.5), chosen, range(len(chosen)), 3),
             loop.collect(random_policy(32, std=0.5), chosen, range(len(chosen)), 3))


def test_what_the_engine_cannot_serve_is_decoded_in_the_loop_and_said(caplog):
    backbone = tiny_backbone()
    repeating = replace(SAMPLING, repetition_window=5)
    with caplog.at_level(logging.WARNING, logger="rl.rollout"):
        assert roller().decoder == "engine" and not caplog.records
        assert roller(backbone).decoder == "fast"
        assert "BackboneDecoder" in caplog.records[-1].getMessage()
        assert roller(sampling=repeating).decoder == "fast"
        assert "repetition_window" in caplog.records[-1].getMessage()
    items = ragged_items(2)
    same(roller(sampling=repeating).collect(random_policy(32, std=0.5), items, range(2), 0),
         roller(sampling=repeating, decoding="loop").collect(random_policy(32, std=0.5), items, range(2), 0))
