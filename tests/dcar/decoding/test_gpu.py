"""A GPU decodes what the CPU decodes: on a GPU if there is one, else on the stand-in of
tests/toys/fake_gpu.py, on which mixing devices or waiting within a captured step is an error, as on a
GPU."""

import gc
import threading
import time
from contextlib import contextmanager

import fake_gpu
import pytest
import torch
from held import check
from kernels import NO_KERNELS
from tiny_backbones import tiny_backbone, tiny_prompts
from tiny_decoders import policy_of, tiny_decoder
from tiny_methods import KINDS

from dcar.decoding import Engine, FixedChunk, PolicyChunk, Prompt, decode
from dcar.decoding import engine as module
from dcar.decoding import graphs as module_of_graphs
from dcar.decoding.graphs import StepGraphs
from dcar.errors import EngineError
from dcar.sampling import SamplingConfig

PROMPTS = [Prompt(f"u{i}", range(1, 4 + i), range(1, 3 + i)) for i in (2, 9, 4, 3)]
SAMPLING = SamplingConfig(
    temperature=0.9, top_k=8, max_tokens=16, max_tokens_per_text_unit=2, min_tokens=8
)


RECORDED = ("before the draw", "after the draw", "ssd by a draft", "tree")
"""Kinds that the stand-in is asked for here; tokens of every method: test_step.py."""


def replayed() -> bool:
    return torch.cuda.is_available() or len(fake_gpu.replays) > 3


@pytest.mark.parametrize("name", KINDS if torch.cuda.is_available() else RECORDED)
def test_a_gpu_decodes_what_the_cpu_decodes(device, name, monkeypatch):
    """Eager and replayed; rows are replaced and buffers used again by another seed and by
    groups: what was captured for the first rows, lengths and chunks serves the later ones."""
    # several blocks of columns in these short utterances
    monkeypatch.setattr(module, "COLUMN_BLOCK", 16)
    calls = [(PROMPTS, dict(seed=3)), (PROMPTS[2:], dict(seed=4, group_size=2))]
    model, method, _ = KINDS[name](lambda part: part)
    how = dict(record_hidden=method.tree is None)
    expected = [decode(model, prompts, method, SAMPLING, **call, **how) for prompts, call in calls]
    model, method, _ = KINDS[name](lambda part: part.to(device))
    for graphs in (False, True):
        engine = Engine(model, method, SAMPLING, 3, graphs=graphs, **how)
        for (prompts, call), results in zip(calls, expected, strict=True):
            for result, wanted in zip(engine.decode(prompts, **call), results, strict=True):
                check(result, wanted, 1e-4, f"{result.utterance_id}, {graphs=}")
        assert (len(engine.graphs) > 1) == graphs
    assert replayed()


def test_graphs_decide_with_the_present_weights_of_a_policy(device):
    here, there = policy_of(), policy_of().to(device)
    engine = Engine(
        tiny_decoder().to(device), PolicyChunk(there, "sample"), SAMPLING, 2, graphs=True
    )
    spoken = set()
    for turn in range(3):
        results = engine.decode(PROMPTS)
        expected = decode(tiny_decoder(), PROMPTS, PolicyChunk(here, "sample"), SAMPLING)
        assert [(r.tokens, r.sizes) for r in results] == [(r.tokens, r.sizes) for r in expected]
        spoken.add(tuple(results[0].sizes))
        with torch.no_grad():
            for a, b in zip(here.parameters(), there.parameters(), strict=True):
                a.add_(torch.randn(a.shape, generator=torch.Generator().manual_seed(turn)))
                b.copy_(a)
    assert len(spoken) > 1 and replayed()


@pytest.mark.parametrize("name", ["car-3", "before the draw", "sd by heads"])
def test_the_host_waits_for_nothing_and_a_finished_row_for_one_step(device, name, monkeypatch):
    """A step reports once, and all rows that finish together are read at once: 64 utterances that
    end together need as many reads as one."""
    if torch.cuda.is_available():
        pytest.skip("the stand-in counts the reads")
    model, method, _ = KINDS[name](lambda part: part.to(device))
    sampling = SamplingConfig(temperature=0.9, max_tokens=8, min_tokens=8)
    steps, advance = [], Engine._advance
    monkeypatch.setattr(Engine, "_advance", lambda *given: steps.append(1) or advance(*given))
    for count in (1, 64):
        prompts = [Prompt(f"u{i}", (1, 2, 3), (1, 2)) for i in range(count)]
        engine = Engine(model, method, sampling, count, graphs=False)
        list(engine.run(prompts))
        fake_gpu.reads.clear()
        fake_gpu.waits.clear()
        steps.clear()
        results = engine.decode(prompts)
        assert len(results) == count and not fake_gpu.waits
        ends = {result.passes for result in results}
        assert len(steps) == max(ends) + module.QUEUED
        assert len(fake_gpu.reads) == len(steps) + len(ends)


@pytest.mark.parametrize("name", ["car-3", "before the draw", "after the draw", "ssd by a draft"])
def test_the_host_launches_little_before_an_utterance(device, name, monkeypatch):
    """Prompts are read, and rows are started, by graphs: 461 operators at paper size otherwise."""
    if torch.cuda.is_available():
        pytest.skip("the stand-in counts what is launched")
    launched, before = [], []
    dispatch, index = fake_gpu.GPU.__torch_dispatch__, fake_gpu.GPU.index

    def counted(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.overloadpacket.__name__ not in NO_KERNELS:
            launched.append(func)
        return dispatch(self, func, types, args, kwargs)

    def indexed(self, packet, run, target, by, *value):
        if value or fake_gpu.tensors_of(by):
            launched.append(packet)
        return index(self, packet, run, target, by, *value)

    advance = Engine._advance
    model, method, _ = KINDS[name](lambda part: part.to(device))
    for rows in (1, 4):
        engine = Engine(model, method, SAMPLING, rows)
        expected = engine.decode(PROMPTS)
        with monkeypatch.context() as patch:
            patch.setattr(fake_gpu.GPU, "__torch_dispatch__", counted)
            patch.setattr(fake_gpu.GPU, "index", indexed)
            patch.setattr(
                Engine, "_advance", lambda *of: before.append(len(launched)) or advance(*of)
            )
            before.clear()
            launched.clear()
            results = engine.decode(PROMPTS)
        assert [r.tokens for r in results] == [r.tokens for r in expected]
        assert before[0] <= 30


# --- graphs ---------------------------------------------------------------------------------------


def test_what_cannot_be_captured_says_what_to_switch_off(device):
    count = torch.zeros(1).to(device)
    with pytest.raises(EngineError, match="(?s)capturing.*graphs=false"):
        StepGraphs(True, device).run("a", lambda: bool(count > 0), lambda: list)


def test_a_capture_that_fails_leaves_the_current_stream(device, monkeypatch):
    """PyTorch's context stays on the stream of a capture that cannot be ended, and its allocator
    refuses the pool of that capture."""
    if torch.cuda.is_available():
        before = torch.cuda.current_stream()
        test_what_cannot_be_captured_says_what_to_switch_off(device)
        assert torch.cuda.current_stream() == before
        return
    at = ["own"]

    @contextmanager
    def stream(_):
        before = at[0]
        try:
            yield
        finally:
            at[0] = before

    @contextmanager
    def graph(*_, **settings):
        at[0] = "capture"
        yield
        raise RuntimeError("capturing: invalid")

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(EngineError):
        StepGraphs(True, device).run("a", lambda: None)
    assert at == ["own"] and torch.cuda.current_stream(device) not in module_of_graphs._pools


def saved(tensor):
    """Return what saves a tensor for the warm-up of a capture."""

    def save():
        before = tensor.clone()
        return lambda: tensor.copy_(before)

    return save


def test_captures_of_two_threads_follow_one_another(device):
    together, called = threading.Barrier(2), []

    def work(name):
        def step():
            called.append(name)
            time.sleep(0.02)

        graphs = StepGraphs(True, device)
        together.wait()
        graphs.run("key", step, lambda: list)

    threads = [threading.Thread(target=work, args=[name]) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "".join(called) in ("aaabbb", "bbbaaa")


def test_graphs_of_a_stream_share_a_pool_which_is_not_used_again_once_all_are_freed(
    device, monkeypatch
):
    pools, capture = [], torch.cuda.graph

    def noted(graph, *, pool, **settings):
        pools.append(pool)
        return capture(graph, pool=pool, **settings)

    monkeypatch.setattr(torch.cuda, "graph", noted)
    monkeypatch.setattr(module_of_graphs, "_pools", {})
    count = torch.zeros(1).to(device)
    first, second = StepGraphs(True, device), StepGraphs(True, device)
    for graphs in (first, second, first, second):
        graphs.run(len(graphs), lambda: count.add_(1), saved(count))
        if len(pools) == 3:
            first.reset()
            gc.collect()
    assert pools[0] is pools[1] is pools[2] is pools[3]
    first.reset()
    second.reset()
    fake_gpu.replays.clear()
    gc.collect()
    first.run("again", lambda: count.add_(1), saved(count))
    assert pools[4] is not pools[0]
    assert count.item() == 5


def test_the_stand_in_refuses_what_a_gpu_refuses(device):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    there, graph = torch.arange(4.0).to(device), fake_gpu.Graph()
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(4)
    with (
        pytest.raises(RuntimeError, match="capturing"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        bool(there.sum() > 0)
    with torch.cuda.graph(graph := fake_gpu.Graph(), capture_error_mode="thread_local"):
        there.add_(1)
        made = there * 2
    assert there.tolist() == [0, 1, 2, 3]  # nothing is computed while it is captured
    graph.replay()
    # and nothing that was made within stays
    assert there.tolist() == [1, 2, 3, 4] and made.isnan().all()


# --- language models ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "cosyvoice-lm"])
def test_a_gpu_decodes_with_a_language_model_what_the_cpu_decodes(device, kind):
    """Text around the prompts, which a captured pass may not copy from the host, is read too."""
    prompts, sampling = tiny_prompts(), SamplingConfig(temperature=0.9, max_tokens=12)
    here, there = tiny_backbone(kind=kind), tiny_backbone(kind=kind).to(device)
    expected = decode(here, prompts, FixedChunk(2), sampling)
    engine = Engine(there, FixedChunk(2), sampling, 2)
    for _ in range(2):
        for result, wanted in zip(engine.decode(prompts), expected, strict=True):
            assert result.tokens == wanted.tokens
    assert len(engine.graphs) > 1
