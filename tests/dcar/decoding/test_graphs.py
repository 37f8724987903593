"""How steps are captured: what `StepGraphs` asks of torch.cuda."""

import pytest
import torch
from dcar.decoding.fast.graphs import StepGraphs

from dcar.errors import EngineError


def test_captures_share_a_stream_with_their_pool_and_bear_other_threads(device, monkeypatch):
    """DCPO's reward worker speaks and listens on the same GPU while rollouts capture their steps: with the default mode
    whatever it allocated broke the capture. Graphs that share a pool must be captured on one stream."""
    asked, graph = [], torch.cuda.graph
    monkeypatch.setattr(torch.cuda, "graph", lambda made, **how: asked.append(how) or graph(made, **how))
    graphs, count = StepGraphs(True, device), torch.zeros(1).to(device)
    for key in ("a", "b", "a"):
        graphs.run(key, lambda: count.add_(1), [count], "as it is")
    assert len(graphs) == len(asked) == 2
    assert all(how["capture_error_mode"] == "thread_local" for how in asked)
    assert asked[0]["stream"] is asked[1]["stream"] and asked[0]["pool"] is asked[1]["pool"]
    assert count.tolist() == [3]  # a step each time; the warm-ups were put back


def test_what_cannot_be_captured_says_what_to_switch_off(device):
    count = torch.zeros(1).to(device)
    with pytest.raises(EngineError, match="(?s)capturing.*graphs=false"):
        StepGraphs(True, device).run("a", lambda: bool(count > 0), (), "as it is")
