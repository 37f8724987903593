"""The step of every method is a program of tensors: no host read, no shape that depends on data,
few kernels."""

from collections.abc import Callable
from typing import Any

import fake_gpu
import pytest
import torch
from kernels import Kernels
from tiny_methods import every_method
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._inductor.exc import TritonMissing

import dcar.decoding.readers
from dcar.decoding import Engine, Prompt, decode
from dcar.decoding.backend import Backend
from dcar.decoding.compiled import masked_layer, summed, summed_with_bias, warn
from dcar.decoding.step import step
from dcar.methods import Models, make_methods
from dcar.model.car import CARConfig, CARDecoder
from dcar.sampling import SamplingConfig
from heads.policy import CandidatePolicy, CandidatePolicyConfig, HiddenPolicy, HiddenPolicyConfig

NAMES = list(every_method()[1])
PROMPTS = [
    Prompt("a", (1, 2, 3, 4, 5, 6), ()),
    Prompt("b", (4, 5, 6, 7), (1, 2, 3, 4)),
    Prompt("c", (7, 8, 9, 1, 2, 3, 4, 5), (5, 6)),
    Prompt("d", (3,), (1,)),
    Prompt("e", (3, 2, 5, 6, 1, 2, 3, 4, 5, 3, 2, 1), (1,)),
]
SAMPLINGS = {
    "plain": SamplingConfig(temperature=0.9, max_tokens=30),
    "greedy": SamplingConfig(temperature=0, max_tokens=20),
    "top-k": SamplingConfig(temperature=0.8, top_k=5, min_tokens=5, max_tokens=20),
}
RECORDS = tuple(
    ("tokens truncated passes draft_passes emitted sizes accepted proposed prompt_length").split()
)
"""Without `chosen`: equal candidates score equally up to rounding, so either may be chosen."""


def records(results) -> list[dict[str, Any]]:
    return [{name: getattr(result, name) for name in RECORDS} for result in results]


@pytest.fixture
def in_torch(monkeypatch):
    """Decoding on the CPU by the operations of a GPU."""
    monkeypatch.setattr(dcar.decoding.readers, "cpu_backend", lambda dtype: Backend())


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_speaks_as_the_cpu(name, monkeypatch):
    """Captured once for each shape and replayed; rows are replaced, batches shrink. The method is
    not changed."""
    model, methods = every_method()
    expected = {
        key: records(decode(model, PROMPTS, methods[name], sampling, seed=3, batch_size=3))
        for key, sampling in SAMPLINGS.items()
    }
    with fake_gpu.fake_gpu(monkeypatch) as device:
        model, methods = every_method(device)
        settings = {key: id(value) for key, value in vars(methods[name]).items()}
        for key, sampling in SAMPLINGS.items():
            results = decode(model, PROMPTS, methods[name], sampling, seed=3, batch_size=3)
            assert records(results) == expected[key], key
        assert settings == {key: id(value) for key, value in vars(methods[name]).items()}
        assert len(fake_gpu.replays) > len(SAMPLINGS)


def test_a_gpu_sums_products_of_a_row_or_a_column(monkeypatch):
    """Others are left to Inductor."""
    torch.manual_seed(0)

    def left(*_):
        raise NotImplementedError

    with fake_gpu.fake_gpu(monkeypatch) as device:
        for a, b in (((1, 64), (64, 9)), ((3, 1, 64), (3, 64, 9)), ((5, 64), (64, 1))):
            a, b, bias = torch.randn(a), torch.randn(b), torch.randn(b[-1])
            there = [t.bfloat16().to(device) for t in (a, b, bias)]
            exact = a.bfloat16().double() @ b.bfloat16().double()
            for found, expected in (
                (summed(left, *there[:2]), exact),
                (summed_with_bias(left, there[2], *there[:2]), exact + bias.bfloat16()),
            ):
                assert found.dtype == torch.bfloat16
                torch.testing.assert_close(found.cpu().double(), expected, rtol=0.01, atol=0.1)
        a, b = torch.ones(2, 64).to(device), torch.ones(64, 3).to(device)
        with pytest.raises(NotImplementedError):
            summed(left, a, b)


def failed(engine: Engine) -> list[str]:
    """Parts of an engine that could not be compiled."""
    parts = engine.reader.backend._parts.values()
    return [part.function.__name__ for part in parts if part._compiled is None]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_step_compile(name, monkeypatch):
    """Each as a whole: a graph break fails. Inductor is tested below: here tracing is."""
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda part, **_: compile(part, fullgraph=True, backend="eager")
    )
    model, methods = every_method()
    sampling = SAMPLINGS["top-k"]
    expected = records(decode(model, PROMPTS, methods[name], sampling, seed=3, batch_size=3))
    torch._dynamo.reset()
    engine = Engine(model, methods[name], sampling, 3, compile=True)
    assert records(engine.decode(PROMPTS, seed=3)) == expected
    assert not failed(engine)


def medium() -> tuple[Models, SamplingConfig, list[Prompt]]:
    """A decoder of seven heads, two policies and a draft model; one utterance of 84 tokens."""
    torch.manual_seed(0)
    model = CARDecoder(
        CARConfig(
            text_vocab_size=64,
            speech_vocab_size=256,
            hidden_size=64,
            num_layers=2,
            num_attention_heads=2,
            ffn_size=128,
            num_prediction_heads=7,
            bos=True,
        )
    ).eval()
    policies = {
        "before": HiddenPolicy(HiddenPolicyConfig(64, 7, width=64, num_attention_heads=2)).eval(),
        "after": CandidatePolicy(CandidatePolicyConfig(64, 7)).eval(),
    }
    prompt = Prompt("x", tuple(range(1, 21)), tuple(range(10)))
    return (
        Models(model, policies=policies),
        SamplingConfig(temperature=0.9, max_tokens=84),
        [prompt],
    )


MOST = {
    "car-1": 30,
    "car-7": 51,
    "dcar@before": 58,
    "dcar@after": 70,
    "sd": 97,
    "ssd-0.4": 103,
    "pcg-0.42": 266,
}
"""Kernels of a round outside the passes of decoder and policy, before anything is compiled."""


@pytest.mark.parametrize("name", MOST)
def test_kernels_and_host_reads_of_a_round(name, in_torch, monkeypatch):
    """On a GPU every kernel costs 2 to 6 microseconds, and a host read a wait."""
    models, sampling, prompts = medium()
    (entry,) = make_methods([name], models, sampling)
    engine = Engine(entry.decoder, entry.method, sampling)
    engine.eager = False  # shapes as on a GPU
    engine.decode(prompts)
    count, inside, rounds = Kernels(), 0, 0

    def read(of: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            before = count.kernels
            out = of(*args, **kwargs)
            inside += count.kernels - before
            return out

        return counted

    def one(state, method) -> None:
        nonlocal rounds
        rounds += 1
        with count:
            step(state, method)

    assert engine._state is not None
    for reader in (engine.reader, engine._state.shared.get("policy")):
        if hasattr(reader, "read"):
            monkeypatch.setattr(reader, "read", read(reader.read))
    engine._step = one
    engine.decode(prompts)
    assert not count.reads
    assert (count.kernels - inside) / rounds <= MOST[name]


@pytest.mark.slow
def test_methods_share_compiled_layers():
    """Inductor's code decodes the same tokens, and a layer of each kind of shapes is compiled once
    for all layers, methods and lengths."""
    models, sampling, prompts = medium()
    torch._dynamo.reset()
    for name in ("car-1", "car-7", "dcar@before", "dcar@after", "sd"):
        (entry,) = make_methods([name], models, sampling)
        expected = decode(models.decoder, prompts, entry.method, sampling)[0].tokens
        engine = Engine(models.decoder, entry.method, sampling, compile=True)
        assert engine.decode(prompts)[0].tokens == expected
        assert not failed(engine)
    # one position, several, and each again for any number of columns
    assert len(_debug_get_cache_entry_list(masked_layer.__code__)) <= 4


def test_what_cannot_be_compiled_is_computed_by_operators_with_one_warning(monkeypatch, caplog):
    def without_triton(part: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def fail(*args: Any) -> None:
            raise TritonMissing(None)

        return fail

    monkeypatch.setattr(torch, "compile", without_triton)
    warn.cache_clear()
    model, methods = every_method()
    method, sampling = methods["car-4"], SAMPLINGS["top-k"]
    expected = records(decode(model, PROMPTS, method, sampling, seed=3, batch_size=3))
    engine = Engine(model, method, sampling, 3, compile=True)
    assert records(engine.decode(PROMPTS, seed=3)) == expected
    assert len(caplog.records) == 1 and "compile=false" in caplog.text
