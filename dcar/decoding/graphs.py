"""CUDA graphs of decoding steps: captured once for each shape, replayed without any launch from
Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from dcar.errors import EngineError


class StepGraphs:
    """Runner of steps, each a function of tensors at fixed addresses.

    `enabled`: steps are run by graphs (the default on CUDA); otherwise they are simply called. The
    first run with a key warms the step up and captures it, later ones replay it.
    """

    def __init__(self, enabled: bool | None, device: torch.device):
        if enabled and device.type != "cuda":
            raise EngineError(
                f"CUDA graphs were requested on device '{device}'; move the model to a CUDA "
                "device, or set graphs=false"
            )
        self.enabled = device.type == "cuda" if enabled is None else enabled
        self.device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # memory pool shared by the graphs, which are captured on one stream
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def reset(self) -> None:
        """Discard the graphs, because a buffer moves."""
        self._graphs.clear()

    def run(
        self, key: Hashable, step: Callable[[], None], changing: Callable[[], Sequence[Tensor]]
    ) -> None:
        """Run the step. `changing` returns the tensors that it changes; the warm-up executes the
        step, so they are restored before the capture. A replay does not ask for them."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(step, changing())
        self._graphs[key].replay()

    def _capture(self, step: Callable[[], None], state: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        saved = [t.clone() for t in state]
        if self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self.device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile: DCPO's rewards are computed next to the
            # rollouts.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineError(
                f"this step cannot be captured as a CUDA graph ({error}); disable graphs: "
                "graphs=false"
            ) from error
        return graph
