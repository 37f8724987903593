"""`decode` keeps its engines: what is captured serves the next call, and memory is bounded."""

import gc
import weakref

import pytest
import torch
from tiny_decoders import policy_of, tiny_decoder
from tiny_methods import every_method

from dcar.decoding import Engine, FixedChunk, PolicyChunk, Prompt, decode
from dcar.decoding import pool as module
from dcar.decoding.pool import engine_pool
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig

SAMPLING = SamplingConfig(temperature=0.9, max_tokens=12, max_tokens_per_text_unit=4)
PROMPTS = [Prompt(f"u{i}", range(1, 4 + i), range(1, 3 + i)) for i in (2, 4, 3)]
LONG = Prompt("long", range(1, 20), tuple(i % 12 for i in range(200)))


def tokens(results):
    return [result.tokens for result in results]


def test_what_was_captured_serves_equal_methods_of_later_calls(device):
    """New objects of the same settings, policies that were trained meanwhile, another name."""
    model, policy = tiny_decoder().to(device), policy_of(16).to(device)
    decode(model, PROMPTS, PolicyChunk(policy, "sample"), SAMPLING)
    (engine,) = engine_pool(model).engines.values()
    captured = dict(engine.graphs._graphs)
    for turn in range(3):
        again = decode(
            model, PROMPTS, PolicyChunk(policy, "sample").named("again"), SAMPLING, seed=turn
        )
        fresh = Engine(model, PolicyChunk(policy, "sample"), SAMPLING, 3, graphs=False)
        assert tokens(again) == tokens(fresh.decode(PROMPTS, seed=turn))
        assert {result.method for result in again} == {"again"}
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.3)
    assert list(engine_pool(model).engines.values()) == [engine]
    assert all(engine.graphs._graphs[key] is graph for key, graph in captured.items())
    for method in (PolicyChunk(policy), PolicyChunk(policy, "sample", dial=0.5), FixedChunk(2)):
        decode(model, PROMPTS, method, SAMPLING)
    decode(model, PROMPTS[:1], method, SAMPLING)
    decode(model, PROMPTS, method, SamplingConfig(max_tokens=12))
    assert len(engine_pool(model).engines) == 6


def test_engines_of_a_decoder_share_the_memory_of_keys_and_values(device):
    """A longer prompt replaces it, whoever decodes it, and the other methods follow."""
    model, every = every_method(device)
    kinds = ("car-4", "dcar, of three chunks", "sd@draft", "mtp-viterbi-3-2", "vadusa, a tree")
    methods = {name: every[name] for name in kinds}
    expected = {
        name: tokens(Engine(model, method, SAMPLING, 3).decode(PROMPTS))
        for name, method in methods.items()
    }
    engines = engine_pool(model).engines
    for prompts in ([LONG], PROMPTS, [LONG, *PROMPTS[:2]], PROMPTS):
        for name, method in methods.items():
            spoken = tokens(decode(model, prompts, method, SAMPLING))
            assert prompts is not PROMPTS or spoken == expected[name], name
        states = [engine._state for engine in engines.values() if engine._state is not None]
        assert len(states) >= len(methods)
        for layer in range(model.config.num_layers):
            assert len({state.cache.kv[layer].data_ptr() for state in states}) == 1


def test_a_decoder_in_use_decodes_with_another_engine(device):
    model, method = tiny_decoder().to(device), FixedChunk(2)
    expected = tokens(decode(model, PROMPTS, method, SAMPLING))
    pool = engine_pool(model)
    before = dict(pool.engines)
    with pool.lock:
        assert tokens(decode(model, PROMPTS, method, SAMPLING)) == expected
        decode(model, PROMPTS, FixedChunk(3), SAMPLING)
    assert pool.engines == before


def test_no_more_than_so_many_engines_are_kept_and_none_of_former_weights(device, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    model = tiny_decoder().to(device)
    for size in (1, 2, 1, 3):
        decode(model, PROMPTS, FixedChunk(size), SAMPLING)
    pool = engine_pool(model)
    assert [engine.method.longest for engine in pool.engines.values()] == [1, 3]
    gc.disable()
    try:
        state = weakref.ref(next(iter(pool.engines.values()))._state)
        del pool
        with torch.no_grad():
            model.norm.weight.add_(0.1)
        assert not engine_pool(model).engines
        assert state() is None  # without the garbage collector
    finally:
        gc.enable()


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (3, 0)])
def test_on_a_cpu_only_buffers_that_save_time_are_kept(rows, count):
    """A comparison of forty methods held 190 MiB of keys and values for each."""
    model = tiny_decoder()
    several = decode(model, PROMPTS, FixedChunk(2), SAMPLING, batch_size=rows)
    assert tokens(several) == tokens(Engine(model, FixedChunk(2), SAMPLING, 3).decode(PROMPTS))
    assert len(engine_pool(model).engines) == count


@pytest.mark.parametrize("size", ["batch_size", "group_size"])
def test_a_batch_of_nobody_is_refused(size):
    with pytest.raises(ConfigError, match=f"{size}=0 must be at least 1"):
        decode(tiny_decoder(), PROMPTS, FixedChunk(2), SAMPLING, **{size: 0})


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match="seed=-1 must be between"):
        decode(tiny_decoder(), PROMPTS, FixedChunk(2), SAMPLING, seed=-1)
