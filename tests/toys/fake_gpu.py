"""Simulated GPU for tests: tensors that report a CUDA device and are computed on the CPU.

Mixing devices, or waiting for the device during a capture, is an error as on a GPU. A captured
graph is the list of operators that were called. A replay calls them again on the same memory, and
tensors made inside the graph are invalidated afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dcar.decoding.compiled import CompiledBackend

aten = torch.ops.aten
DEVICE = torch.device("cuda:0")
WAITS = (
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.bincount,
)
COPIES = (aten.copy_, aten._to_copy)
INDEXES = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class OnGPU(Tensor):
    """Tensor that reports the device cuda:0."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGPU:
        same = torch.is_inference_mode_enabled() == inner.is_inference()
        with nullcontext() if same else torch.inference_mode(inner.is_inference()):
            made = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=DEVICE,
            )
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    # PyTorch's Python methods would do these on the device itself.
    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        return aten.copy_.default(self, source, non_blocking)

    def item(self) -> Any:
        return aten._local_scalar_dense.default(self)

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __invert__(self) -> Tensor:
        return torch.bitwise_not(self)

    def contiguous(self, **_: Any) -> Tensor:
        if self.is_contiguous():
            return self
        return aten.clone.default(self, memory_format=torch.contiguous_format)

    def nonzero(self) -> Tensor:
        return aten.nonzero.default(self)

    def tolist(self) -> Any:
        return aten._to_copy.default(self, device=torch.device("cpu")).tolist()

    def __getitem__(self, index: Any) -> Tensor:
        return current.index(aten.index, lambda inner, index: inner[index], self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        current.index(aten.index_put_, Tensor.__setitem__, self, index, value)

    def __deepcopy__(self, memo: dict) -> Tensor:
        made = OnGPU(self.inner.clone())
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(made, self.requires_grad)
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnGPU({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("used outside of fake_gpu()")


class Graph:
    """Stand-in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: list[Tensor] = []  # tensors made inside of it
        self.before: dict[
            int, tuple[Any, Any]
        ] = {}  # address -> written storage and its former content

    def replay(self) -> None:
        replays.append(self)
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for func, args, kwargs, outs in self.calls:
                for new, out in zip(tensors_of(func(*args, **kwargs)), outs, strict=True):
                    if new.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
                        out.copy_(new)
        self.forget()

    def forget(self) -> None:
        """Invalidate the tensors made inside, because another graph of the pool may write to
        their memory."""
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for tensor in self.made:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


replays: list[Graph] = []
reads: list[torch.Size] = []  # shapes that the host has read
waits: list[torch.Size] = []  # those of them for which it has waited
copied: list[Callable[[], Any]] = []  # functions that complete non-blocking copies to the host
current: GPU


def tensors_of(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts: Any = ()
    if isinstance(tree, dict):
        parts = tree.values()
    elif isinstance(tree, tuple | list):
        parts = tree
    return [leaf for part in parts for leaf in tensors_of(part)]


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: tree_map(change, part) for name, part in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(tree_map(change, part) for part in tree)
    return change(tree)


class GPU(TorchDispatchMode):
    """Dispatch mode that runs operators of tensors on the simulated GPU."""

    graph: Graph | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        given = tensors_of((args, kwargs))
        mine = [t for t in given if isinstance(t, OnGPU)]
        device = kwargs.get("device")
        there = bool(mine) if device is None else torch.device(device).type == "cuda"
        if not there and not mine:
            return func(*args, **kwargs)
        self.check(func, packet, args, given, mine, there)
        if packet in WAITS or (mine and not there):
            reads.append(mine[0].shape)
            if not kwargs.get("non_blocking"):
                waits.append(mine[0].shape)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        if packet is aten._fused_sdp_choice:
            return 0  # attention by plain operators
        wrappers = {id(t.inner): t for t in mine}
        args, kwargs = tree_map(lambda t: t.inner if isinstance(t, OnGPU) else t, (args, kwargs))
        if self.graph is not None:
            self.keep_written(func, args, kwargs)
        out = func(*args, **kwargs)
        if self.graph is not None and (there or mine):
            self.note(func, args, kwargs, out)
        if not there:
            if id(out) in wrappers:  # `to` the CPU, on which it is already
                out = out.clone()
            return self.on_its_way(out) if kwargs.get("non_blocking") else out

        def wrapped(leaf: Any) -> Any:
            if id(leaf) in wrappers:
                return wrappers[id(leaf)]
            return OnGPU(leaf) if isinstance(leaf, Tensor) else leaf

        return tree_map(wrapped, out)

    def index(self, packet, run, target: OnGPU, index: Any, *value: Any) -> Any:
        by = tensors_of(index)
        given = [target, *by, *tensors_of(value)]
        self.check(
            packet, packet if by else aten.copy_, (target, index, *value), given, [target], True
        )
        args = tree_map(lambda t: t.inner if isinstance(t, OnGPU) else t, (target, index, *value))
        if self.graph is not None and value:
            storage = target.inner.untyped_storage()
            self.graph.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = run(*args)
        if self.graph is not None:
            self.note(run, args, {}, out)
        return out if out is None else OnGPU(out)

    def check(
        self, func, packet, args, given: list[Tensor], mine: list[OnGPU], there: bool
    ) -> None:
        others = [t for t in given if not isinstance(t, OnGPU) and t.dim()]
        indexed = (
            packet in INDEXES
            and isinstance(args[0], OnGPU)
            and all(isinstance(t, OnGPU) or not t.dim() for t in tensors_of(args[2:]))
        )
        if mine and others and packet not in COPIES and not indexed:
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, found cuda:0 and cpu"
            )
        if self.graph is None:
            return
        moves = (packet in COPIES and (others or not there)) or packet is aten.lift_fresh
        masks = packet in INDEXES and any(t.dtype == torch.bool for t in tensors_of(args[1]))
        if packet in WAITS or moves or masks or (packet in INDEXES and others):
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")

    def on_its_way(self, copy: Tensor) -> Tensor:
        """Fill a copy to the host with garbage until its event has been waited for."""
        arrived = copy.clone()
        copied.append(lambda: copy.copy_(arrived))
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            return copy.fill_(torch.nan if copy.is_floating_point() else 0)

    def keep_written(self, func, args, kwargs) -> None:
        """Save the storages that an operator writes: nothing is computed during a capture, so
        they are restored afterwards."""
        assert self.graph is not None
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(value, Tensor)
            ):
                storage = value.untyped_storage()
                self.graph.before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def note(self, run, args, kwargs, out) -> None:
        assert self.graph is not None
        outs = tensors_of(out)
        self.graph.calls.append((run, args, kwargs, outs))
        read = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}
        self.graph.made += [
            t for t in outs if t.untyped_storage().data_ptr() not in read and t.numel()
        ]

    @contextmanager
    def capture(self, graph: Graph, **settings: Any) -> Iterator[None]:
        assert self.graph is None and settings["capture_error_mode"] == "thread_local"
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None
        made = {t.untyped_storage().data_ptr() for t in graph.made}
        for address, (storage, before) in graph.before.items():
            if address not in made:
                storage.copy_(before)
        graph.forget()


class Stream:
    """Stand-in for torch.cuda.Stream."""

    def __init__(self, device: Any = None):
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    """Stand-in for torch.cuda.Event."""

    def __init__(self) -> None:
        self.before: list[Callable[[], Any]] = []

    def record(self, stream: Stream | None = None) -> None:
        self.before = list(copied)

    def synchronize(self) -> None:
        for complete in self.before:
            complete()


@contextmanager
def fake_gpu(monkeypatch) -> Iterator[torch.device]:
    """Install the simulated GPU and yield its device."""
    global current
    gpu, cuda = GPU(), torch.cuda
    current = gpu
    replays.clear()
    reads.clear()
    waits.clear()
    copied.clear()
    for name, value in {
        "_lazy_init": lambda: None,
        "set_device": lambda device: None,
        "Stream": Stream,
        "current_stream": Stream,
        "CUDAGraph": Graph,
        "Event": Event,
        "graph_pool_handle": object,
        "graph": gpu.capture,
        "synchronize": lambda device=None: None,
        "stream": lambda stream: torch.no_grad(),
    }.items():
        monkeypatch.setattr(cuda, name, value)
    # what is compiled is computed by operators; Triton's kernels would run on a GPU
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    monkeypatch.setattr("dcar.decoding.readers.gpu_backend", lambda device: CompiledBackend())
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with gpu:
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
