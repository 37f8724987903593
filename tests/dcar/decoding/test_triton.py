"""Triton kernels against plain PyTorch, in Triton's interpreter, and compiled for an H100 without
one.

The interpreter must be chosen before Triton is imported. So one test runs the others of this file
in a process of its own."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from held import check
from sm90 import Launches, compiled_kernels
from test_language import hold, with_adapters
from test_reader import check as check_reader
from test_reader import plain_of
from tiny_backbones import architecture, tiny_backbone
from tiny_decoders import tiny_decoder
from tiny_methods import KINDS
from torch import Tensor

from dcar import ties
from dcar.decoding import Engine, Prompt, decode, engine
from dcar.decoding.backend import Backend
from dcar.decoding.columns import CausalMask, columns_of
from dcar.decoding.gpu.backend import GPUBackend
from dcar.decoding.language import LanguageReader, RotaryLayers
from dcar.decoding.reader import CARReader
from dcar.sampling import SamplingConfig
from heads.layers import KVCache

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.needs("triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="not in the interpreter")

if INTERPRETED:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    from dcar.decoding.gpu.attention import attend, rotate
    from dcar.decoding.gpu.language import GPURotaryLayers
    from dcar.decoding.gpu.product import MAX_ROWS, product
    from dcar.decoding.gpu.projection import project
    from dcar.decoding.gpu.sampling import largest
    from dcar.decoding.gpu.stack import GPUStack

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder, a, b, *others):
        """Multiply bfloat16 as float32: the interpreter of triton 3.7 multiplies their bits."""

        def wide(x):
            if x.dtype.scalar != tl.bfloat16:
                return x
            made = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None)
            return interpreter.TensorHandle(made.view(np.float32), tl.float32)

        return multiply(builder, wide(a), wide(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def interpret(marked: str) -> None:
    """Run the tests of this file in Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", marked, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr


@compiled
def test_in_the_interpreter():
    interpret("not slow")


@compiled
@pytest.mark.slow
def test_more_in_the_interpreter():
    interpret("slow")


# --- kernels --------------------------------------------------------------------------------------


def near(found: Tensor, expected: Tensor) -> bool:
    """Compare with numbers in float64 that were not rounded on the way."""
    step = torch.finfo(found.dtype).eps * (16 if found.dtype == torch.float32 else 2)
    return bool((found.double() - expected).abs().max() <= step * expected.abs().max())


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def plain_product(x, weight, bias=None, *, norm=None, gate=None, gelu=False, residual=None):
    """See `product`."""
    x, weight = x.double(), weight.double()
    if norm is not None:
        gain, shift, epsilon = norm
        shape = gain.shape
        if shift is None:
            x = F.rms_norm(x, shape, gain.double(), epsilon)
        else:
            x = F.layer_norm(x, shape, gain.double(), shift.double(), epsilon)
    y = x @ weight.T
    if bias is not None:
        y = y + bias.double()
    if gate is not None:
        y = y * F.silu(x @ gate.double().T)
    if gelu:
        y = F.gelu(y, approximate="tanh")
    return y if residual is None else y + residual.double()


@interpreted
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        *((rows, torch.float32) for rows in (1, 2, 7, 16, 17)),
        (7, torch.bfloat16),
        (1, torch.float16),
    ],
)
def test_product(rows, dtype):
    """Widths that are no power of two, outputs that do not fill the last block."""
    torch.manual_seed(rows)
    for width, outputs in ((96, 40), (272, 16)):
        x, residual = numbers(rows, width, dtype=dtype), numbers(rows, outputs, dtype=dtype)
        weight, gate = numbers(2, outputs, width, dtype=dtype) / width**0.5
        bias, (gain, shift) = numbers(outputs, dtype=dtype), numbers(2, width, dtype=dtype)
        for how in (
            dict(bias=bias, norm=(gain, shift, 1e-5)),
            dict(bias=bias, norm=(gain, shift, 1e-5), gelu=True),
            dict(bias=bias, residual=residual),
            dict(norm=(gain, None, 1e-6), gate=gate),
            dict(norm=(gain, None, 1e-6), bias=bias),
            dict(),
        ):
            assert near(product(x, weight, **how), plain_product(x, weight, **how)), list(how)


@interpreted
def test_a_norm_of_rows_far_from_zero():
    """Mean 1000, deviation 0.01: in float32 the mean of squares less the squared mean has no
    correct digit."""
    torch.manual_seed(0)
    x = 1000 + 0.01 * numbers(3, 128)
    weight, gain, shift = numbers(16, 128), torch.ones(128), torch.zeros(128)
    found, expected = (f(x, weight, norm=(gain, shift, 1e-12)) for f in (product, plain_product))
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()
    squares = x.square().mean(1) - x.mean(1).square()
    assert not torch.allclose(squares, x.double().var(1, correction=0).float(), rtol=0.5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2, 2, 16), (7, 4, 2, 32), (17, 6, 1, 16)])
@pytest.mark.parametrize("how", ["norms of heads", "LayerNorm, biases", "RMSNorm"])
def test_queries_keys_and_values(shape, dtype, how):
    """Rotation in one kernel with the product, or in one of its own after norms of heads; both
    write to the cache."""
    torch.manual_seed(0)
    (count, heads, shared, size), width = shape, 48
    angle = numbers(40, size // 2)
    cos = torch.cat((angle.cos(), angle.cos()), 1)[:, None].to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), 1)[:, None].to(dtype)
    positions, index = torch.randint(-10, 30, (count,)), torch.randperm(50)[:count]
    before = numbers(50, 2, shared, size, dtype=dtype)
    cache = before.clone()
    places = (cos, sin, -10), positions, index, cache
    if how == "norms of heads":
        qkv = numbers(count, (heads + 2 * shared) * size, dtype=dtype)
        gains = (*numbers(2, size, dtype=dtype), 1e-6)
        queries, exact = rotate(qkv, *places, gains), qkv.double()
    else:
        x, (gain, shift) = numbers(count, width, dtype=dtype), numbers(2, width, dtype=dtype)
        weight = numbers((heads + 2 * shared) * size, width, dtype=dtype) / width**0.5
        bias, norm = None, (gain, None, 1e-6)
        if how != "RMSNorm":
            bias, norm = numbers(len(weight), dtype=dtype), (gain, shift, 1e-5)
        queries = project(x, weight, bias, norm, *places)
        exact = plain_product(x, weight, bias, norm=norm)
    q, k, v = exact.view(count, -1, size).split([heads, shared, shared], 1)
    if how == "norms of heads":
        q, k = (
            F.rms_norm(part, (size,), gain.double(), 1e-6)
            for part, gain in zip((q, k), gains[:2], strict=True)
        )
    c, s = cos[positions + 10].double(), sin[positions + 10].double()
    q, k = (part * c + part.roll(size // 2, -1) * s for part in (q, k))
    assert near(queries, q) and near(cache[index, 0], k) and near(cache[index, 1], v)
    others = torch.ones(50, dtype=torch.bool).index_fill_(0, index, False)
    assert torch.equal(cache[others], before[others])


def plain_attention(queries: Tensor, kv: Tensor, cache: KVCache, tree: Tensor | None) -> Tensor:
    """Attend position by position to a list of the columns that it sees."""
    (count, heads, size), rows, shared = queries.shape, cache.batch, kv.shape[2]
    new, out = count // rows, []
    for n in range(count):
        row, i = divmod(n, new)
        past = [*range(cache.prefix_lengths[row])]
        past += range(cache.prefix, first := cache.prefix + int(cache.lengths[row]))
        seen = torch.arange(new) <= i if tree is None else tree[row % len(tree), i]
        columns = past + [first + j for j in range(new) if seen[j]]
        key, value = kv.double()[row * cache.row_columns + torch.tensor(columns)].unbind(1)
        for head in range(heads):
            own = head // (heads // shared)
            score = key[:, own] @ queries[n, head].double() * size**-0.5
            out.append(score.softmax(0) @ value[:, own])
    return torch.stack(out).view(count, heads * size)


@interpreted
@pytest.mark.parametrize(
    "case",
    [  # new, heads, shared heads, text columns, text of each row, past of each row, branches
        (1, 2, 2, 0, [0], [0], 0),  # nothing before it
        (1, 2, 2, 16, [16], [5], 0),
        (7, 4, 2, 16, [11], [150], 0),  # three parts
        (3, 6, 2, 80, [3, 80, 0], [0, 70, 150], 0),  # a whole part of padding, and no text
        (5, 2, 2, 16, [16, 9], [3, 100], 1),  # one tree for all rows
        (5, 2, 2, 16, [16, 9], [60, 59], 2),  # a tree for each, at the edge of a part
        (16, 14, 2, 16, [16], [33], 1),  # several blocks of queries
    ],
)
def test_attend(case):
    torch.manual_seed(0)
    new, heads, shared, text, texts, pasts, branches = case
    dtype = torch.bfloat16 if branches == 2 or text == 80 else torch.float32
    rows, size, room = len(texts), 16, max(pasts) + new + 3
    cache = KVCache(1, rows, shared, room, size, prefix=text, dtype=dtype)
    cache.prefix_lengths, cache.lengths = torch.tensor(texts), torch.tensor(pasts)
    cache.eager, kv = False, cache.kv[0].normal_()
    queries = numbers(rows * new, heads, size, dtype=dtype)
    tree = None
    if branches:
        tree = (torch.rand(branches, new, new) < 0.5) | torch.eye(new, dtype=torch.bool)
    columns = columns_of(cache, max(pasts), new, CausalMask(kv.device, dtype), tree=tree)
    finished = torch.zeros(MAX_ROWS * heads, dtype=torch.int32)
    expected = plain_attention(queries, kv, cache, tree)
    for last in (columns.last, columns.last + 200):  # programs without columns change nothing
        columns.last = last
        found = attend(queries, kv, columns, finished)
        assert near(found, expected) and not finished.any()


@interpreted
def test_attention_of_a_row_that_has_ended_and_is_longer_than_what_is_read():
    """Values of a row that has ended mean nothing, but are written to the cache, where NaN would
    spread."""
    cache = KVCache(1, 2, 2, 200, 16)
    cache.lengths, cache.eager = torch.tensor([5, 180]), False
    kv, queries = cache.kv[0].normal_(), numbers(2, 2, 16)
    expected = plain_attention(queries, kv, cache, None)
    columns = columns_of(cache, 5, 1, CausalMask(kv.device, kv.dtype))
    finished = torch.zeros(MAX_ROWS * 2, dtype=torch.int32)
    found = attend(queries, kv, columns, finished)
    assert near(found[:1], expected[:1]) and found.isfinite().all() and not finished.any()


# --- sampling -------------------------------------------------------------------------------------


def hard_logits(levels: int, ids: int) -> Tensor:
    """Logits [2, 2, ids]: without ties (levels = 0) or of few levels; one row is mostly impossible,
    one has zeros of both signs, and one a logit that no other comes near."""
    torch.manual_seed(ids + levels)
    shape = (2, 2, ids)
    logits = torch.randint(-levels, levels, shape).float() if levels else numbers(*shape) * 3
    logits[0, 1, 1 + ids // 3 :] = -torch.inf
    logits[1, 0, ::2], logits[1, 0, 1::2] = 0.0, -0.0
    logits[1, 1, ids // 2] = 1e30
    return logits


@interpreted
@pytest.mark.parametrize(("ids", "levels"), [(1, 0), (40, 0), (40, 2), (300, 5), (2049, 0)])
def test_the_set_that_is_kept_is_that_of_a_sort(ids, levels):
    logits = hard_logits(levels, ids)
    for k in {1, min(7, ids), ids}:
        assert torch.equal(largest(logits, k), ties.largest(logits, k)), k
    for probs in (logits.softmax(-1), logits.double().softmax(-1)):
        for k, p in ((0, 0.873), (0, 1e-12), (7, 0.6), (ids + 3, 0.313)):
            found, expected = largest(logits, k, probs, p), ties.largest(logits, k, probs, p)
            assert torch.equal(found, expected), (probs.dtype, k, p)


@interpreted
def test_a_set_is_kept_whose_weight_is_p():
    """Weights whose sums are exact; the token after which they weigh p is the last."""
    weights = torch.tensor([[0.125, 0.25, 0.125, 0.5], [0.25, 0.25, 0.25, 0.25]])
    for p, expected in (
        (0.5, [[3], [0, 1]]),
        (0.75, [[1, 3], [0, 1, 2]]),
        (1.0, [[0, 1, 2, 3]] * 2),
    ):
        found = largest(weights, 0, weights, p)
        assert [row.nonzero()[:, 0].tolist() for row in found] == expected


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warped_distributions(dtype):
    torch.manual_seed(0)
    logits = (numbers(2, 3, 301) * 3).to(dtype)
    logits[0, 1, 7], logits[1, :, 20:] = torch.nan, -torch.inf
    forbidden, history = torch.rand(2, 3) < 0.5, torch.randint(-1, 30, (2, 3, 6))
    again = dict(repetition_window=6, repetition_share=0.3, top_p=0.8)
    for settings in (
        dict(top_k=5),
        dict(top_p=0.9),
        dict(top_k=400, top_p=0.01),
        dict(temperature=0.8, top_k=50, top_p=0.9),
        again,
        dict(again, top_k=25, repetition_mask=True),
        dict(temperature=0),
    ):
        sampling = SamplingConfig(**settings)
        given = sampling, forbidden, 300, history if sampling.repetition_window else None
        found, expected = (backend.probs(logits, *given) for backend in (Interpreted(), Backend()))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9, equal_nan=True)
        assert torch.equal(found > 0, expected > 0), settings


@interpreted
@pytest.mark.parametrize(("window", "mask"), [(1, True), (4, False), (11, True)])
def test_a_chunk_drawn_in_turn(window, mask):
    """Repetitions of tokens before the chunk and within it; one token is all but certain, and one
    has no distribution."""
    torch.manual_seed(window)
    sampling = SamplingConfig(
        temperature=0.8,
        top_k=5,
        top_p=0.8,
        repetition_window=window,
        repetition_share=1 / window if window < 11 else 0.2,
        repetition_mask=mask,
    )
    for ids in (12, 300):
        # the same tokens are likely in all of a row, and some of them were drawn before
        logits = numbers(3, 1, ids) * 3 + numbers(3, 6, ids) / 2
        u = torch.rand(3, 6, dtype=torch.float64)
        history = logits[:, 0].topk(4).indices.gather(1, torch.randint(4, (3, window)))
        history[0, : window // 2] = -1
        logits[0, 1, 3], logits[1, 2, 5], logits[2, 4, 0] = 90.0, 2000.0, torch.nan
        forbidden = torch.rand(3, 6) < 0.5
        given = logits, u, sampling, forbidden, ids - 1, history
        (tokens, probs), (same, expected) = (
            backend.in_turn(*given) for backend in (Interpreted(), Backend())
        )
        assert torch.equal(tokens, same) and int(tokens[2, 4]) == ids
        torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-9, equal_nan=True)
        without = Backend().in_turn(*given[:-1], torch.full_like(history, -1))[1]
        assert not torch.allclose(probs, without, equal_nan=True)


# --- decoding -------------------------------------------------------------------------------------


class Interpreted(GPUBackend):
    """Operations in Triton. What surrounds them is not compiled."""

    def part(self, function):
        return function


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Return a list to which the number of positions of every pass in Triton is added."""
    found: list[int] = []
    inner = GPUStack._read
    monkeypatch.setattr(
        GPUStack, "_read", lambda own, x, *given: found.append(len(x)) or inner(own, x, *given)
    )
    return found


@interpreted
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), pytest.param(torch.bfloat16, 0.1, marks=pytest.mark.slow)],
)
def test_every_row_has_the_states_of_its_plain_sequence(passes, dtype, tolerance):
    exact = tiny_decoder()
    check_reader(CARReader(tiny_decoder().to(dtype), Interpreted()), plain_of(exact), tolerance)
    assert len(passes) > 4 and max(passes) > 10


@interpreted
@pytest.mark.parametrize(
    "kind", ["qwen2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "qwen3"))]
)
def test_language_models(kind, monkeypatch):
    """Grouped queries; biases in Qwen2, norms of heads in Qwen3. Adapters are left to PyTorch."""
    found, inner = [], GPURotaryLayers._read
    monkeypatch.setattr(GPURotaryLayers, "_read", lambda *given: found.append(1) or inner(*given))
    decoder = tiny_backbone(architecture=architecture(kind, head_dim=16))
    hold(decoder, reader=LanguageReader(decoder, Interpreted()))
    assert len(found) > 4
    adapted = with_adapters(decoder)
    assert type(LanguageReader(adapted, Interpreted())._layers) is RotaryLayers


@interpreted
@pytest.mark.parametrize(
    "name",
    [
        "car-3",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in (
                "car-3, window",
                "sd by heads",
                "sd by heads, window",
                "ssd by a draft",
                "tree",
            )
        ),
    ],
)
def test_a_gpu_decodes_what_the_cpu_decodes(passes, name, monkeypatch):
    """Rows are replaced by others; shapes are fixed, as in a CUDA graph. The draft model is read
    in Triton too. A window is that of repetition-aware sampling."""
    name, _, window = name.partition(", ")
    monkeypatch.setattr(engine, "COLUMN_BLOCK", 16)
    prompts = [Prompt(f"u{i}", range(1, 4 + i), range(1, 3 + i)) for i in (2, 5, 4)]
    sampling = SamplingConfig(
        temperature=0.9,
        top_k=8,
        top_p=0.9,
        repetition_window=4 if window else 0,
        repetition_share=0.25,
        max_tokens=8,
        max_tokens_per_text_unit=2,
        min_tokens=4,
    )
    model, method, _ = KINDS[name](lambda part: part)
    expected = decode(model, prompts, method, sampling)
    monkeypatch.setattr("dcar.decoding.readers._backend", lambda weight, compile: Interpreted())
    model, method, _ = KINDS[name](lambda part: part)
    made = Engine(model, method, sampling, 2)
    made.eager = False
    for result, wanted in zip(made.decode(prompts), expected, strict=True):
        check(result, wanted, 1e-4, result.utterance_id)
    assert len(passes) > 4


# --- compiled for an H100 -------------------------------------------------------------------------


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.bfloat16, "tf32"), (torch.float32, "ieee"), (torch.float32, "tf32")],
)
def test_every_kernel_compiles_for_an_h100(dtype, precision, monkeypatch):
    """Layers of the paper's size, and of CosyVoice 2, LLaSA-8B and Qwen3. Nothing but a word or two is
    spilled from registers (`_in_turn`: a few dozen), weights are read 16 bytes at a time, and
    counters order memory."""
    from dcar.decoding.gpu import attention, projection
    from dcar.decoding.gpu import product as products
    from dcar.decoding.gpu import sampling as draws

    compiled_kernels.clear()
    for module, names in (
        (products, ["_product"]),
        (projection, ["_project"]),
        (attention, ["_rotate", "_attend"]),
    ):
        monkeypatch.setattr(module, "precision", lambda dtype: precision, raising=False)
        for name in names:
            monkeypatch.setattr(module, name, Launches(getattr(module, name)))
    make = partial(torch.empty, device="meta", dtype=dtype)
    numbers_of = partial(torch.empty, device="meta", dtype=torch.int64)
    for rows in (1, 32):
        for width, inner, shared, size in (
            (1024, 4096, 8, 128),
            (896, 4864, 2, 64),
            (4096, 14336, 8, 128),
        ):
            norm, bare = (make(width), make(width), 1e-5), (make(width), None, 1e-6)
            x, up, down = make(rows, width), make(inner, width), make(width, inner)
            angles, places = (*[make(64, 3, 1, size)] * 2, -512), [numbers_of(rows)] * 2
            cache, outputs = make(128, 2, shared, size), width + 2 * shared * size
            for how in (norm, bare):
                weight, bias = make(outputs, width), make(outputs)
                projection.project(x, weight, bias, how, angles, *places, cache)
            products.product(x, up, make(inner), norm=norm, gelu=True)
            products.product(x, up, norm=bare, gate=up)
            products.product(make(rows, inner), down, make(width), residual=x)
    for heads, shared, size in ((8, 8, 128), (14, 2, 64), (16, 8, 128)):
        for rows, new, tree in ((1, 1, False), (1, 7, False), (2, 16, True)):
            cache = KVCache(1, rows, shared, 320, size, prefix=64, device="meta", dtype=dtype)
            branches = torch.ones(1, new, new, dtype=torch.bool, device="meta") if tree else None
            columns = columns_of(cache, 300, new, None, tree=branches)
            finished = torch.empty(512, dtype=torch.int32, device="meta")
            attention.attend(make(rows * new, heads, size), cache.kv[0], columns, finished)
        qkv, gains = make(4, (heads + 2 * shared) * size), (make(size), make(size), 1e-6)
        angles = make(64, 3, 1, size), make(64, 3, 1, size), -512
        attention.rotate(qkv, angles, numbers_of(4), numbers_of(4), cache.kv[0], gains)
    for name in ("_kept", "_in_turn"):
        monkeypatch.setattr(draws, name, Launches(getattr(draws, name)))
    for ids in (2049, 6562, draws.MOST_IDS):
        single, double = (make(2, 7, ids, dtype=kind) for kind in (torch.float32, torch.float64))
        draws._launch_kept(single, 50, None, draws.ONE)
        draws._launch_kept(single, 0, single, draws.ONE // 2)
        draws._launch_kept(single, 25, double, draws.ONE // 2)
        for rest in (None, double):
            u, history = make(2, 7, dtype=torch.float64), numbers_of(2, 10)
            draws._launch_in_turn(double, double, rest, history, u, 1)
    for name, ptx in compiled_kernels:
        if name in ("_product", "_project"):
            assert "cp.async.cg.shared.global" in ptx
        if name == "_attend":
            assert "atom.global.gpu.acq_rel.add" in ptx
