"""Kernels that a GPU would run in a decoding step, counted on a machine without one.

    python tests/toys/cuda_kernels.py far car-7 --rows 1 32        # a line of JSON for each case
    python tests/toys/cuda_kernels.py car-7 --cosyvoice --top-k 25 --top-p .8 --window 10
    python tests/toys/cuda_kernels.py vocoder --rows 1 32

A decoder of the paper's size, or one with CosyVoice 2's language model, decodes on PyTorch's fake
tensors, which have shapes but no values, of an H100 that is not there, up to the step in place of
which a CUDA graph would be captured. That step is called, and counted are operators (as ATen
launches them), the kernels of every module that Inductor generates, whenever it is called, and
launches of Triton from Python. Needs Triton and g++. The stand-ins replace parts of torch, so this
has a process to itself.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import logging
import math
import os
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 0)
TOKENS, TEXT, PROMPT = 25, 60, 250  # a step 200 tokens after a prompt of 50
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct Absent final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Absent)
"""
"""Device guard of CUDA, which the CPU build of torch does not have."""
H100 = {
    "name": "NVIDIA H100",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "L2_cache_size": 50 << 20,
    "shared_memory_per_multiprocessor": 233472,
    "total_memory": 80 << 30,
    "is_integrated": 0,
    "gcnArchName": "",
}


class Nothing:
    """Stream, event, or context, none of which does anything."""

    def __init__(self, *given: Any, **named: Any):
        self.device, self.cuda_stream = DEVICE, 0

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: None


def pretend() -> None:
    """Have torch and Triton believe that there is an H100, whose tensors are fake."""
    card = types.SimpleNamespace(**H100)
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": card,
        "get_device_capability": (9, 0),
        "get_device_name": card.name,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "graph_pool_handle": (0, 0),
        "_lazy_init": None,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }.items():
        setattr(torch.cuda, name, lambda *given, value=value, **named: value)
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: None
    for name in ("Stream", "Event", "stream", "current_stream"):
        setattr(torch.cuda, name, type(name, (Nothing,), {}))
    Tensor.pin_memory = lambda self, device=None: self
    torch._C._set_only_lift_cpu_tensors(True)
    if torch.version.cuda is None:
        load_guard()

    # these take functions of torch.cuda by name
    from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from dcar import first_use

    # there is nothing to compare with operators here
    first_use.sound_parts = lambda use, case, device: first_use.ORDERS[use][0]
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
    # these compute with real tensors of the device
    for module, name in (
        (fuse_attention, "_sfdp_init"),
        (pad_mm, "_pad_mm_init"),
        (misc_patterns, "_misc_patterns_init"),
    ):
        setattr(module, name, lambda *given, **named: None)
    joint_graph.constant_fold_uniform_value = lambda graph: None
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_active_torch_device=lambda: DEVICE,
        )
    )
    triton_helpers.set_driver_to_gpu = lambda: None
    nn.functional.scaled_dot_product_attention = attention
    nn.Module._apply = converted


def load_guard() -> None:
    """Compile and load `GUARD`."""
    root = os.path.dirname(torch.__file__)
    with tempfile.TemporaryDirectory() as folder:
        source, library = f"{folder}/guard.cpp", f"{folder}/guard.so"
        with open(source, "w") as file:
            file.write(GUARD)
        options = f"-std=c++20 -shared -fPIC -I{root}/include -L{root}/lib -lc10".split()
        subprocess.run(["g++", source, "-o", library, *options], check=True)
        ctypes.CDLL(library)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The kernel that torch chooses on Hopper for bfloat16."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, attn_mask, False, 0.0, False, False, scale=scale
    )[0]


def converted(self: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """`nn.Module._apply` without an exchange in place, which fake tensors do not support."""
    for child in self.children():
        child._apply(change)
    for table in (self._parameters, self._buffers):
        for name, tensor in table.items():
            if tensor is not None and (made := change(tensor)) is not tensor:
                table[name] = nn.Parameter(made, False) if name in self._parameters else made
    return self


# --- kernels --------------------------------------------------------------------------------------


@dataclass
class Kernel:
    """Launch of a kernel: the bytes that it moves, and those of the largest tensor that it writes
    as a whole."""

    name: str
    moved: int
    written: int = 0


FREE = "empty empty_like new_empty empty_strided new_empty_strided _unsafe_view lift_fresh detach"
LOOKUPS = ("index_select", "embedding", "gather", "index")
WRITES_AT = ("index_copy_", "scatter_", "index_put_", "scatter_add_")
LAUNCHES = {"sort": 3, "topk": 2, "baddbmm": 2, "index_add": 2, "scatter": 2, "masked_fill": 2}
"""Kernels of operators that launch more than one."""


def bytes_of(tensor: Any) -> int:
    """Return the bytes that a tensor shows, each once."""
    shown = (n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s or n == 1)
    return math.prod(shown) * tensor.element_size()


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass
class Counts:
    """What was launched, and the modules that Inductor generated: names of their kernels."""

    launched: list[Kernel] = field(default_factory=list)
    modules: list[list[str]] = field(default_factory=list)


class Operators(TorchDispatchMode):
    """Record the kernels of operators outside of compiled modules."""

    def __init__(self, counts: Counts):
        super().__init__()
        self.counts, self.silent = counts, False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.silent or func.namespace == "prim" or TracingContext.try_get() is not None:
            return func(*args, **kwargs)
        given = tensors((args, kwargs))
        if not any(t.is_cuda for t in given):
            for t in given:
                t.constant = None  # or it would be computed with its value
        elif func._can_decompose():
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        name, returns, made = func.overloadpacket.__name__, func._schema.returns, tensors(out)
        view = returns and all(r.alias_info and not r.alias_info.is_write for r in returns)
        if view or name in FREE.split() or not any(t.is_cuda for t in (*given, *made)):
            return out
        new = [t for t in made if not any(t is old for old in given)]
        if name in LOOKUPS:
            moved = 2 * sum(map(bytes_of, made)) + sum(map(bytes_of, given[1:]))
        elif name in WRITES_AT:
            moved = 2 * sum(map(bytes_of, given[1:]))
        else:
            moved = sum(map(bytes_of, (*given, *new)))
        count = LAUNCHES.get(name, 1)
        if name in ("mm", "addmm", "bmm") and given[-2].shape[-1] >= 4096:
            count = 2  # a sum of parts
        self.counts.launched += [Kernel(name, moved // count)] * count
        return out


class Generated(Exception):
    """Raised in place of compiling what Inductor has generated."""


def kernels_of(graph: Any) -> list[Kernel]:
    """Generate the code of an Inductor graph. Return its kernels."""
    from torch._inductor import ir
    from torch._inductor.dependencies import MemoryDep, StarDep
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    def number(size: Any) -> int:
        return int(V.graph.sizevars.optimization_hint(size))

    def moved(node: Any) -> int:
        """Bytes that a kernel reads from outside and writes for others; where it writes at
        indices, as many as it reads."""
        total, scattered = 0, 1
        inside = {buffer.get_name() for buffer in node.get_outputs()}
        for dependency in node.read_writes.reads | node.read_writes.writes:
            name = dependency.name
            if name in V.graph.removed_buffers or (
                dependency in node.read_writes.reads and name in inside
            ):
                continue
            if not isinstance(dependency, MemoryDep):
                scattered = 2
                continue
            free = dependency.index.free_symbols
            touched = [
                number(n)
                for v, n in zip(dependency.var_names, dependency.size, strict=True)
                if v in free
            ]
            whole = V.graph.get_dep_size_hint(StarDep(name))
            total += min(math.prod(touched) * V.graph.get_dtype(name).itemsize, whole)
        return scattered * total

    def written(node: Any) -> int:
        sizes = [
            number(dependency.get_numel()) * V.graph.get_dtype(dependency.name).itemsize
            for dependency in node.read_writes.writes
            if isinstance(dependency, MemoryDep) and dependency.name not in V.graph.removed_buffers
        ]
        return max(sizes, default=0)

    def external(node: Any) -> list[Kernel]:
        name = str(getattr(node, "python_kernel_name", None) or type(node).__name__)
        operator = name.removeprefix("torch.ops.aten.").partition(".")[0]
        count = LAUNCHES.get(operator, 1)
        given = [leaf for leaf in tree_leaves(node.inputs) if hasattr(leaf, "get_size")]
        shapes = [(tensor.get_size(), tensor.get_stride(), tensor.get_dtype()) for tensor in given]
        moved = sum(
            math.prod(number(n) for n, s in zip(size, stride, strict=True) if number(s) or n == 1)
            * dtype.itemsize
            for size, stride, dtype in shapes
        )
        return [Kernel(name, moved // count)] * count

    graph.codegen()
    found = []
    with V.set_graph_handler(graph):
        for node in graph.scheduler.nodes:
            if isinstance(node, ExternKernelSchedulerNode):
                if not isinstance(node.node, ir.MultiOutput):
                    found += external(node.node)
            elif not isinstance(node, NopKernelSchedulerNode):
                found.append(Kernel(node.get_name(), moved(node), written(node)))
    return found


@contextmanager
def inductor(counts: Counts, operators: Operators) -> Iterator[None]:
    """Have Inductor stop where it has generated code. The modules compute by operators, which are
    not counted, and count their kernels whenever they are called."""
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor import config
    from torch._inductor.exc import InductorError
    from torch._inductor.graph import GraphLowering

    compile_inner, compile_outer = compile_fx.compile_fx_inner, compile_fx.compile_fx
    compile_to_module = GraphLowering._compile_to_module

    def inner(module: Any, example_inputs: Any, **options: Any) -> Callable[[list[Any]], Any]:
        by_operators = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
        kernels: list[Kernel] = []

        def stop(graph: Any) -> None:
            kernels.extend(kernels_of(graph))
            raise Generated

        GraphLowering._compile_to_module = stop
        try:
            compile_inner(module, example_inputs, **options)
        except InductorError as error:
            if not isinstance(error.inner_exception, Generated):
                raise
        finally:
            GraphLowering._compile_to_module = compile_to_module
        counts.modules.append([kernel.name for kernel in kernels])

        def run(given: list[Any]) -> list[Any]:
            counts.launched += kernels
            arguments = list(given)
            given.clear()
            operators.silent = True
            try:
                return list(by_operators(*arguments))
            finally:
                operators.silent = False

        run._boxed_call = True
        return run

    def outer(module: Any, inputs: Any, inner_compile: Any = inner, **options: Any) -> Any:
        return compile_outer(module, inputs, inner_compile, **options)

    compile_fx.compile_fx = outer
    try:
        with config.patch(force_disable_caches=True, compile_threads=1, shape_padding=False):
            yield
    finally:
        compile_fx.compile_fx = compile_outer


@contextmanager
def launches(counts: Counts) -> Iterator[None]:
    """Count launches of Triton from Python. Of a KV cache, an argument of four dimensions, those
    that attend read all, and the others what they write."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {id(t): t for t in tensors((args, kwargs))}.values()
        reads = "attend" in self.__name__
        moved = sum(bytes_of(t) for t in given if t.dim() < 4 or reads)
        counts.launched.append(Kernel(self.__name__, moved))

    original, JITFunction.run = JITFunction.run, run
    try:
        yield
    finally:
        JITFunction.run = original


# --- a step ---------------------------------------------------------------------------------------


@contextmanager
def made(mode: FakeTensorMode, dtype: torch.dtype) -> Iterator[None]:
    """Make tensors on the card."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mode, DEVICE:
            yield
    finally:
        torch.set_default_dtype(before)


def cosyvoice(heads: int) -> nn.Module:
    """Make a decoder with the language model of CosyVoice 2."""
    import transformers.modeling_utils

    import dcar.decoding.language as language
    from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder

    shape = {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    }
    transformers.modeling_utils.get_torch_context_manager_or_global_device = lambda: DEVICE
    # computed with real numbers; here only the shape counts
    language.rotations = lambda backbone: torch.empty(language.REACH, 2, 2, 64)
    config = BackboneConfig({"model_type": "qwen2", **shape}, "made up", 6561, heads, bos=False)
    return BackboneDecoder(config)


def method_of(name: str, mode: FakeTensorMode, cosyvoice2: bool) -> tuple[nn.Module, Any]:
    """Return a decoder of the paper's size, or CosyVoice 2's, and the method, both on the card."""
    import dcar.decoding.readers as readers
    from dcar.decoding import FixedChunk, PolicyChunk
    from dcar.decoding.tree import DraftTree
    from dcar.model.car import CARConfig, CARDecoder
    from eval.verifiers.drafters import HeadDrafter
    from eval.verifiers.pcg import GroupVerifier
    from eval.verifiers.sd import SpeculativeDecoding
    from eval.verifiers.vadusa import Vadusa, build_tree
    from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
    from heads.policy import (
        CandidatePolicy,
        CandidatePolicyConfig,
        HiddenPolicy,
        HiddenPolicyConfig,
    )

    readers.weights_signature = id
    heads = 1 if name == "far" else 7
    shape = CARConfig(
        bos=True,
        hidden_size=1024,
        num_layers=12,
        num_attention_heads=8,
        ffn_size=4096,
        speech_vocab_size=2048,
        num_prediction_heads=heads,
    )
    with made(mode, torch.bfloat16):
        model = cosyvoice(heads) if cosyvoice2 else CARDecoder(shape)
    model.eval().requires_grad_(False)
    if name == "far" or name.startswith("car-"):
        return model, FixedChunk(1 if name == "far" else int(name[4:]))
    if name == "sd":
        return model, SpeculativeDecoding(drafter=HeadDrafter(3))
    if name == "pcg":
        return model, GroupVerifier(0.1, groups_of(2049, 64, mode), drafter=HeadDrafter(3))
    if name == "vadusa-2":
        method = Vadusa(2, build_tree(0.4 * 0.5 ** torch.arange(4.0).expand(6, 4), 16))
        parents = method.tree.parents.tolist()
        with mode:
            there = DraftTree(parents, DEVICE)
        method.tree.to = lambda device: there
        return model, method
    if name == "dcar":  # the paper's
        with made(mode, torch.bfloat16):
            policy = HiddenPolicy(HiddenPolicyConfig(1024, heads, width=None))
        return model, PolicyChunk(policy.eval().requires_grad_(False))
    if name != "dcar@n4":
        raise SystemExit(f"unknown method '{name}'")
    with made(mode, torch.float32):
        scorer = ChunkScorer(ChunkScorerConfig(1024, heads, 2049))
        config = CandidatePolicyConfig(1024, heads, chunk_scorer=scorer.config)
        policy = CandidatePolicy(config).eval().requires_grad_(False)
    return model, PolicyChunk(policy, num_candidates=4)


def groups_of(ids: int, largest: int, mode: FakeTensorMode) -> Any:
    """Return made-up groups of `largest` ids each on the card, every id in two of them."""
    from eval.verifiers.pcg import TokenGroups

    count = 2 * ids // largest
    members = torch.arange(count)[:, None] * largest // 2 + torch.arange(largest)
    starts = torch.arange(count + 1) * largest
    by_id = torch.arange(ids + 1) * count * largest // ids
    here = TokenGroups(starts, members.flatten().int() % ids, by_id, members.flatten().int())
    there = object.__new__(TokenGroups)
    with mode:
        for name, value in vars(here).items():
            on_card = isinstance(value, Tensor)
            there.__dict__[name] = torch.empty_like(value, device=DEVICE) if on_card else value
    return there


class Captured(Exception):
    """Raised where a CUDA graph of a step would be captured."""


def count(
    name: str,
    rows: int,
    sampling: Any,
    counts: Counts,
    operators: Operators,
    cosyvoice2: bool = False,
) -> dict[str, Any]:
    """Count the kernels of a step of a method with so many rows: `kernels`, `megabytes` that they
    move, `written`: the most bytes that a generated kernel writes to one tensor, and `modules`
    that were generated for it. Methods of a process share modules and thus `counts`; the bytes of
    a shared one are those of the shapes that it was generated for."""
    import dcar.decoding.graphs as graphs
    from dcar.decoding import Engine, Prompt

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counts.modules.clear()
    model, method = method_of(name, mode, cosyvoice2)
    prompts = [Prompt(f"u{i}", [1] * TEXT, [1] * PROMPT) for i in range(rows)]
    keep = method.keep
    kept: list[Any] = []
    method.keep = lambda state: kept.append(state) or keep(state)

    def run(self: Any, key: Any, step: Callable[[], None], *rest: Any) -> None:
        counts.launched.clear()
        step()
        if kept:  # it was no prefill
            raise Captured

    replay, graphs.StepGraphs.run = graphs.StepGraphs.run, run
    try:
        with (
            mode,
            torch.inference_mode(),
            inductor(counts, operators),
            launches(counts),
            operators,
        ):
            list(Engine(model, method, sampling, rows).run(prompts))
    except Captured:
        pass
    finally:
        graphs.StepGraphs.run = replay
    return {
        "method": name,
        "rows": rows,
        "kernels": len(counts.launched),
        "megabytes": round(sum(kernel.moved for kernel in counts.launched) / 1e6, 1),
        "written": max(kernel.written for kernel in counts.launched),
        "modules": len(counts.modules),
    }


def count_vocoder(rows: int, counts: Counts, operators: Operators) -> dict[str, Any]:
    """Count the kernels of a piece of speech by the vocoder of the default size, 128 tokens of each
    row: `kernels` and `megabytes` of its graph, and `launched` by the host around it."""
    from dcar.decoding.graphs import StepGraphs
    from dcar.vocoder.acoustic import VocoderConfig
    from dcar.vocoder.captured import CapturedSynthesis
    from dcar.vocoder.network import VocoderNetwork

    graphs: list[list[Kernel]] = []

    def run(self: Any, key: Any, step: Callable[[], None], *rest: Any) -> None:
        around = list(counts.launched)
        counts.launched.clear()
        step()
        graphs.append(list(counts.launched))
        counts.launched[:] = around

    network = VocoderNetwork(VocoderConfig()).eval().requires_grad_(False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        network._apply(lambda t: torch.empty_like(t, device=DEVICE))
        tokens, numbers, speaker = (
            torch.zeros(rows, n, dtype=dtype, device="cpu")
            for n, dtype in ((128, torch.long), (4, torch.long), (298, torch.float32))
        )
        gains, phase = torch.zeros(rows, 100, device=DEVICE), torch.zeros(rows, 1, device=DEVICE)
        synthesis = CapturedSynthesis(network)
        given = network, tokens, numbers, speaker, gains, phase
        replay, StepGraphs.run = StepGraphs.run, run
        try:
            with torch.inference_mode():
                synthesis(*given)  # makes its buffers
                counts.launched.clear()
                with operators:
                    synthesis(*given)
        finally:
            StepGraphs.run = replay
    return {
        "method": "vocoder",
        "rows": rows,
        "kernels": len(graphs[-1]),
        "megabytes": round(sum(kernel.moved for kernel in graphs[-1]) / 1e6, 1),
        "launched": len(counts.launched),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--cosyvoice", action="store_true", help="the language model of CosyVoice 2"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--window", type=int, default=0, help="of repetition-aware sampling")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for quiet in ("utils", "runtime.triton_heuristics"):
        logging.getLogger(f"torch._inductor.{quiet}").setLevel(logging.CRITICAL)
    torch.set_float32_matmul_precision("high")  # as commands do on a GPU
    pretend()
    from dcar.sampling import SamplingConfig

    sampling = SamplingConfig(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        repetition_window=given.window,
        min_tokens=0,
        max_tokens=TOKENS,
        max_tokens_per_text_unit=TOKENS,
    )
    counts = Counts()
    operators = Operators(counts)
    for rows in given.rows:
        for name in given.methods:
            if name == "vocoder":
                found = count_vocoder(rows, counts, operators)
            else:
                found = count(name, rows, sampling, counts, operators, given.cosyvoice)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
