"""Rollouts are what `decode` speaks of each utterance alone, with the policy of the moment."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import fake_gpu
import pytest
import torch
from tiny_backbones import tiny_backbone
from tiny_decoders import tiny_decoder
from toy_training import Deaf, random_policy, rollout_settings
from toy_world import ToyVocoder, toy_items

from dcar.decoding import Engine, PolicyChunk, decode
from dcar.decoding.engine import QUEUED
from dcar.decoding.graphs import capture_lock
from dcar.decoding.reader import CARReader
from dcar.sampling import SamplingConfig
from rl import objective
from rl.rewards import WERReward
from rl.rollout import Roller, RolloutBatch, forced_sizes

SAMPLING = SamplingConfig(max_tokens=40, max_tokens_per_text_unit=5)


def ragged_items(count: int = 5) -> list:
    """Texts and prompts of different lengths."""
    return [
        replace(
            item,
            text_ids=tuple(range(1, 3 + 2 * i)),
            prompt_ids=tuple((i + j) % 12 for j in range(1 + 3 * (i % 3))),
        )
        for i, item in enumerate(toy_items(count))
    ]


def roller(base=None, parts=1, **changes) -> Roller:
    return Roller(
        rollout_settings(**{"sampling": SAMPLING, **changes}),
        tiny_decoder() if base is None else base,
        ToyVocoder(),
        [WERReward(Deaf())],
        [1.0],
        parts=parts,
    )


def check(got: RolloutBatch, by: Roller, policy, items, seed: int) -> None:
    """The whole record: tokens, decisions and where they were made, their distribution, hidden
    states."""
    records = iter(enumerate(got.records))
    for index, item in enumerate(items):
        forced = forced_sizes(
            index, by.config.num_generations, by.config.chunk_range, by.config.forced_rows
        )
        rule = PolicyChunk(policy, "sample", forced={item.utterance_id: forced})
        results = decode(
            by.base,
            [item],
            rule,
            by.config.sampling,
            seed=seed,
            group_size=by.config.num_generations,
            common_random_numbers=by.config.common_random_numbers,
            record_hidden=True,
        )
        for member, b in enumerate(results):
            i, record = next(records)
            a, count, states = record.result, len(b.sizes), got.hidden[i, : len(b.hidden)]
            for name in (
                "tokens sizes emitted decision_positions truncated passes method prompt_length "
                "seed utterance_id"
            ).split():
                assert getattr(a, name) == getattr(b, name), name
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
            assert record.item is item and record.transcript == "red"
            assert (record.member, record.forced) == (member, forced[member])
            assert got.forced[i] == (forced[member] > 0) and got.rewards[i] == got.parts[i, 0]
            assert (got.positions[i, :count].tolist(), (got.actions[i, :count] + 1).tolist()) == (
                b.decision_positions,
                b.sizes,
            )
            assert got.mask[i].sum() == count and got.mask[i, :count].all()
            assert torch.allclose(states, b.hidden, atol=1e-5)
            assert not got.hidden[i, len(b.hidden) :].any()
    assert next(records, None) is None


@pytest.mark.parametrize("width", [16, None], ids=["bottleneck", "full"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"forced_rows": "none"},
        {"common_random_numbers": True},
        {"num_generations": 6},
        {"parts": 3},
        {"parts": 50},  # against one part
        {
            "sampling": SamplingConfig(
                temperature=0.8, top_k=5, top_p=0.9, min_tokens=4, max_tokens=30
            )
        },
        {"common_random_numbers": True, "forced_rows": "none", "parts": 2},
    ],
    ids=str,
)
def test_rollouts_are_those_of_utterances_alone(width, bos, changes):
    base = tiny_decoder(bos=bos)
    policy = random_policy(32, width=width, std=0.5)
    items = ragged_items()
    made = roller(base, **changes)
    for seed in (1, 2):  # used buffers are as good as new ones
        got = made.collect(policy, items, range(5), seed)
        check(got, made, policy, items, seed)
    lengths = {len(r.result.tokens) for r in got.records}
    # ragged indeed
    assert len(lengths) > 3 and len({a for r in got.records for a in r.result.sizes}) > 2


def test_every_rollout_is_made_with_the_policy_of_the_moment():
    """As the trainer does it: one rollout policy, which takes the trained weights before every
    step."""
    made, items = roller(), ragged_items()
    rolling, actions = random_policy(32, std=0.5), []
    for seed in range(3):
        rolling.load_state_dict(random_policy(32, seed + 5, std=0.5).state_dict())
        got = made.collect(rolling, items, range(5), seed=1)
        check(got, made, rolling, items, seed=1)
        probs = rolling(got.hidden, got.positions)  # one pass over the stored states
        taken = objective.taken(probs, got.actions) * got.mask
        recorded = [torch.tensor(r.result.log_probs) for r in got.records]
        assert torch.allclose(
            taken, torch.nn.utils.rnn.pad_sequence(recorded, batch_first=True), atol=2e-5
        )
        actions.append([r.result.sizes for r in got.records])
    assert actions[0] != actions[1] != actions[2]
    for parameter in rolling.parameters():  # a write that version counters do not see
        parameter.data.mul_(-1)
    check(made.collect(rolling, items, range(5), seed=1), made, rolling, items, seed=1)


def test_the_group_shares_one_prefill(monkeypatch):
    items, calls, prefill = ragged_items(), [], CARReader.prefill
    monkeypatch.setattr(
        CARReader,
        "prefill",
        lambda own, *given: calls.append(len(given[0])) or prefill(own, *given),
    )
    roller(num_generations=6).collect(random_policy(32, std=0.5), items, range(5), seed=0)
    assert calls == [5]


def test_steps_of_growing_and_shrinking_utterances():
    made, policy, items = roller(), random_policy(32, std=0.5), ragged_items(8)
    for chosen in (items[:2], items[4:8], items[:1], items[1:7]):
        check(made.collect(policy, chosen, range(len(chosen)), 3), made, policy, chosen, 3)


@pytest.mark.parametrize(
    ("base", "changes"),
    [(tiny_backbone, {}), (tiny_decoder, {"sampling": replace(SAMPLING, repetition_window=5)})],
    ids=["backbone", "ras"],
)
def test_language_models_and_sampling_without_repetition(base, changes):
    made, items = roller(base(), **changes), ragged_items(2)
    policy = random_policy(made.base.config.hidden_size, std=0.5)
    check(made.collect(policy, items, range(2), 0), made, policy, items, 0)


# --- on a GPU, or its stand-in --------------------------------------------------------------------


def spoken(batch: RolloutBatch) -> list:
    return [(r.result.tokens, r.result.sizes) for r in batch.records]


@pytest.mark.parametrize(("parts", "dtype"), [(2, torch.float32), (1, torch.bfloat16)], ids=str)
def test_a_gpu_rolls_out_what_the_cpu_does_by_graphs_that_see_every_update(
    parts, dtype, monkeypatch
):
    """Weights change in place, as an optimiser changes them. No step is captured twice, and rounded
    copies of weights follow. In bfloat16 the CPU rounds elsewhere, so the used engine is held to a
    new one."""
    items, made, captured = ragged_items(), [], {}
    with fake_gpu.fake_gpu(monkeypatch) as device:
        there = roller(tiny_decoder().to(device, dtype), parts=parts)
        moved = random_policy(32, std=0.5).to(device)
        here, policy = roller(tiny_decoder(), parts=parts), random_policy(32, std=0.5)
        for turn in range(3):
            got = there.collect(moved, items, range(5), seed=1)
            made.append(spoken(got))
            graphs = dict(there._engine.graphs._graphs)  # steps of new lengths are added
            assert all(graphs[key] is graph for key, graph in captured.items())
            captured = graphs
            if dtype == torch.float32:
                assert made[-1] == spoken(here.collect(policy, items, range(5), seed=1))
            else:
                new = roller(there.base, parts=parts)
                assert made[-1] == spoken(new.collect(moved, items, range(5), seed=1))
                assert new._engine.reader.dtype == dtype
            for trained in (policy, moved):
                trained.load_state_dict(random_policy(32, turn + 5, std=0.5).state_dict())
        assert fake_gpu.replays
        assert {
            t.device.type for t in (got.hidden, got.positions, got.actions, got.mask, got.rewards)
        } == {"cuda"}
    assert made[0] != made[1] != made[2]


def test_the_host_waits_for_no_pass_and_a_rollout_for_one(monkeypatch):
    """What it reads of each pass has arrived when it looks, however many rollouts end; a pass is
    queued meanwhile."""
    with fake_gpu.fake_gpu(monkeypatch) as device:
        made = roller(tiny_decoder().to(device), parts=1)
        policy = random_policy(32, std=0.5).to(device)
        made.collect(policy, ragged_items(), range(5), seed=1)  # captures
        fake_gpu.waits.clear()
        steps, advance = [], Engine._advance
        monkeypatch.setattr(Engine, "_advance", lambda *given: steps.append(1) or advance(*given))
        got = made.collect(policy, ragged_items(), range(5), seed=1)
        assert not fake_gpu.waits
    assert len(steps) == max(r.result.passes for r in got.records) + QUEUED


def test_rewards_have_one_thread_beside_which_no_graph_is_captured(monkeypatch):
    """A recogniser may capture graphs, and only one capture may be underway in a process."""
    threads, capturing, on_device = [], [], []

    def may_capture() -> bool:
        if free := capture_lock.acquire(blocking=False):
            capture_lock.release()
        return free

    def watching(audio, **_):
        threads.append(threading.get_ident())
        with ThreadPoolExecutor(1) as another:
            capturing.append(another.submit(may_capture).result())
        return [0.0] * len(audio)

    with fake_gpu.fake_gpu(monkeypatch) as device:
        monkeypatch.setattr(
            torch.cuda, "set_device", lambda index: on_device.append((index, threading.get_ident()))
        )
        made = roller(tiny_decoder().to(device), parts=2)
        made.rewards = [watching]
        for seed in (1, 2):
            made.collect(random_policy(32).to(device), ragged_items(), range(5), seed)
    assert len(threads) == 4 and len(set(threads)) == 1 and threads[0] != threading.get_ident()
    assert not any(capturing) and may_capture() and on_device == [(device, threads[0])]
