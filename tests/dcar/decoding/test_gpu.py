from __future__ import annotations
import pytest, torch
from contextlib import nullcontext
import fake_gpu
from fake_gpu import fake_gpu as fake
from test_static_engine import policy_of, same, schedules
from tiny_decoders import tiny_decoder
from dcar.decoding import ChunkMethod, decode
from dcar.decoding.engine.run import engine_for
from dcar.sampling import SamplingConfig

@pytest.fixture
def device(monkeypatch):
    with fake(monkeypatch) as d:
        yield d

@pytest.mark.parametrize("name", ["far", "car-3", "greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("graphs", [True, False])
def test_engine(decoder, prompts, device, name, batch, graphs):
    policy = policy_of()
    sampling = SamplingConfig(max_tokens=60, max_tokens_per_text_unit=6, min_tokens=20, top_k=5)
    expected = [decode(decoder, prompts, ChunkMethod(schedules(policy)[name]), sampling, seed=s, record_hidden=True) for s in (3,4)]
    model, there = tiny_decoder().to(device), policy_of().to(device)
    engine = engine_for(model, prompts, sampling, batch=batch, policy=there, sync_every=3, column_block=16, graphs=graphs)
    for seed, e in zip((3, 4), expected):
        got = engine.decode(prompts, ChunkMethod(schedules(there)[name]), sampling, seed=seed, record_hidden=True)
        for g in got: g.hidden = g.hidden.cpu()
        same(got, e)
    assert bool(fake_gpu.replays) == graphs
