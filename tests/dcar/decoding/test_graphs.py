"""How steps are captured: what `StepGraphs` asks of torch.cuda, without CUDA."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dcar.decoding.fast.graphs import StepGraphs
from dcar.errors import EngineError


@pytest.fixture
def captures(monkeypatch):
    """The settings of every capture, by a stand-in for CUDA that runs a step where it would capture it."""
    asked: list[dict] = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            pass

    def graph(graph, **settings):
        asked.append(settings)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return asked


def test_captures_share_a_stream_with_their_pool_and_bear_other_threads(captures):
    """DCPO's reward worker speaks and listens on the same GPU while rollouts capture their steps: with the default mode
    whatever it allocated broke the capture. Graphs that share a pool must be captured on one stream."""
    graphs, count = StepGraphs(True, torch.device("cuda")), torch.zeros(1)
    for key in ("a", "b", "a"):
        graphs.run(key, lambda: count.add_(1), [count], "as it is")
    assert len(graphs) == len(captures) == 2
    assert all(asked["capture_error_mode"] == "thread_local" for asked in captures)
    assert captures[0]["stream"] is captures[1]["stream"] and captures[0]["pool"] is captures[1]["pool"]
    assert count == 2  # a step at each capture; the warm-ups were put back


def test_what_cannot_be_captured_says_what_to_switch_off(captures):
    def step() -> None:
        if captures:  # behind the warm-ups
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(EngineError, match="not permitted.*graphs=false"):
        StepGraphs(True, torch.device("cuda")).run("a", step, (), "as it is")
