"""CUDA graphs of decoding steps: captured once for each shape, replayed without any launch from
Python."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import torch

from dcar.decoding.state import BatchState
from dcar.errors import EngineError

capture_lock = threading.RLock()
"""Lock to hold while a graph is captured, also by another library: only one capture may be underway
in a process, and nothing may wait for the whole device meanwhile."""


def one_thread(device: torch.device, name: str = "") -> ThreadPoolExecutor:
    """Return a pool of one thread for work on a device. The current GPU of a new thread is the
    first one, on which every process of a launch would then take memory."""
    if device.type != "cuda":
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (device,))


def save_state(state: BatchState, trees: bool) -> Callable[[], None]:
    """Save what a step changes, so that it can be run again. Return a function that restores it.
    Tokens and logs are only ever written ahead, and so are keys and values, but the path through a
    drafted tree is moved."""
    changing = [
        state.positions,
        state.remaining,
        state.passes,
        state.draft_passes,
        state.alive,
        state.highest,
        state.draft_tokens,
        state.draft_counts,
        state.draft_probs,
        state.states,
        *state.own.values(),
        *(cache.lengths for cache in (state.cache, *state.caches.values())),
    ]
    saved = [tensor.clone() for tensor in changing]
    drafted = torch.arange(state.draft_length if trees else 0, device=state.alive.device)
    columns = state.cache.index(state.cache.lengths[:, None] + drafted)
    layers = [layer[columns] for layer in state.cache.kv]

    def restore() -> None:
        for tensor, value in zip(changing, saved, strict=True):
            tensor.copy_(value)
        for layer, values in zip(state.cache.kv, layers, strict=True):
            layer[columns] = values

    return restore


class CapturePool:
    """Memory of all graphs that are replayed on one stream of a device. They follow one another, so
    each may overwrite what the last one has left."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def handle(self) -> Any:
        """Return the handle of the pool for a capture. It is a new one where no graph is left:
        the allocator refuses a handle whose last graph was freed."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graphs.add(graph)


_pools: dict[torch.cuda.Stream, CapturePool] = {}
_capture_streams: dict[torch.device, torch.cuda.Stream] = {}


class StepGraphs:
    """Runner of steps, each a function of tensors at fixed addresses.

    `enabled`: steps are run by graphs (the default on CUDA); otherwise they are simply called. The
    first run with a key warms the step up and captures it, later ones replay it. A graph is only
    replayed on the stream for which it was captured, because it shares memory with all other graphs
    of that stream.
    """

    def __init__(self, enabled: bool | None, device: torch.device):
        if enabled and device.type != "cuda":
            raise EngineError(
                f"CUDA graphs were requested on device '{device}'; move the model to a CUDA "
                "device, or set graphs=false"
            )
        self.enabled = device.type == "cuda" if enabled is None else enabled
        self.device = device
        self._graphs: dict[tuple[torch.cuda.Stream, Hashable], torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def captured(self) -> dict[Any, torch.cuda.CUDAGraph]:
        """Return the graphs by their keys."""
        return {key: graph for (_, key), graph in self._graphs.items()}

    def reset(self) -> None:
        """Discard the graphs, because a buffer moves."""
        self._graphs.clear()

    def run(
        self,
        key: Hashable,
        step: Callable[[], None],
        save: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> None:
        """Run the step. The warm-up before a capture executes it: `save` saves what it changes, and
        returns a function that restores that; by default nothing, for a step that may be run twice.
        A replay does not ask for it."""
        current = torch.cuda.current_stream(self.device)
        if (current, key) not in self._graphs:
            with capture_lock:
                self._graphs[current, key] = self._capture(step, save(), current)
        self._graphs[current, key].replay()

    def _capture(
        self, step: Callable[[], None], restore: Callable[[], None], current: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        if self.device not in _capture_streams:
            _capture_streams[self.device] = torch.cuda.Stream(self.device)
        stream, pool = _capture_streams[self.device], _pools.setdefault(current, CapturePool())
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
                restore()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile: DCPO's rewards are computed next to the
            # rollouts. `graph` does not return to the current stream after an error.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(
                    graph, pool=pool.handle(), stream=stream, capture_error_mode="thread_local"
                ),
            ):
                step()
        except RuntimeError as error:
            _pools.pop(current)  # the allocator refuses the handle of a capture that has failed
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise EngineError(
                f"this step cannot be captured as a CUDA graph ({error}); disable graphs: "
                "graphs=false"
            ) from error
        pool.add(graph)
        return graph
