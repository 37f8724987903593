"""Parts for GPUs that are made wrong on purpose are found, named and replaced, on the stand-in of
tests/toys/fake_gpu.py; and the processes that compare them."""

import json

import fake_gpu
import pytest
import torch
from fake_gpu import DEVICE
from tiny_backbones import tiny_backbone
from tiny_data import tiny_vocoder
from tiny_decoders import tiny_decoder

from dcar import first_use, gpu_checks
from dcar.decoding import FixedChunk, Prompt, compiled, decode, readers
from dcar.decoding.backend import Backend
from dcar.decoding.readers import shapes_of
from dcar.model.draft import build_draft
from dcar.optim import scaled_adam
from dcar.optim.tensors import Tensors
from dcar.sampling import SamplingConfig

ALL = first_use.ORDERS["decoding"][0]
PROMPTS = [Prompt(f"u{i}", range(1, 4 + i), range(1, 3 + i)) for i in (2, 9, 4, 3)]
WIDE = dict(speech_vocab_size=40, head_blocks=1)


@pytest.fixture
def tested(monkeypatch):
    """Check in this process, as `python -m dcar.gpu_checks` does in its own."""

    def run(use, case, device, parts):
        monkeypatch.setattr(first_use, "under_test", frozenset(parts))
        try:
            gpu_checks.CHECKS[use](json.loads(json.dumps(case)), torch.device(device))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            monkeypatch.setattr(first_use, "under_test", None)
        return None

    return run


@pytest.fixture
def gpu(monkeypatch, tested, tmp_path):
    """The stand-in, on which parts are compared at first use; verdicts in a folder of the test."""
    with fake_gpu.fake_gpu(monkeypatch) as device:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(first_use, "run_check", tested)
        monkeypatch.setattr(first_use, "_known", {})
        monkeypatch.setattr(gpu_checks, "TOKENS", 6)
        monkeypatch.setattr(gpu_checks, "SAMPLINGS", gpu_checks.SAMPLINGS[::2])
        yield device


def broken_layer(how):
    """Return a layer in place of `masked_layer` with a fault."""
    whole = compiled.masked_layer

    def layer(module, x, *rest):
        y = whole(module, x, *rest)
        if how == "sum":
            return y + 0.2 * y.roll(1, -1)
        if how == "nan":
            return y * torch.nan
        raise RuntimeError("Triton Error [CUDA]: invalid argument")

    return layer


def replay_wrongly(graph):
    """Replay a graph with another result of each operator that makes numbers, as if another graph
    had written to its memory."""
    with torch._C._DisableTorchDispatch(), torch.inference_mode():
        for func, args, kwargs, outs in graph.calls:
            for new, out in zip(fake_gpu.tensors_of(func(*args, **kwargs)), outs, strict=True):
                if new.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
                    out.copy_(new * 0.7 if new.dtype == torch.float32 else new)
    graph.forget()


# --- parts that are right, and wrong --------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("car", torch.bfloat16),
        pytest.param("car", torch.float32, marks=pytest.mark.slow),
        pytest.param("backbone", torch.float32, marks=pytest.mark.slow),
        ("backbone", torch.bfloat16),
    ],
)
def test_right_parts_are_all_used(gpu, kind, dtype):
    decoder = tiny_decoder(**WIDE) if kind == "car" else tiny_backbone()
    case = shapes_of(decoder) | {"dtype": str(dtype).removeprefix("torch.")}
    assert first_use.compare("decoding", case, gpu) == (ALL, [])


@pytest.mark.parametrize(
    "how",
    [
        "sum",
        pytest.param("nan", marks=pytest.mark.slow),
        pytest.param("launch", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_part_is_replaced_and_named_and_speech_is_right(gpu, monkeypatch, caplog, how):
    sampling = SamplingConfig(temperature=0.5, max_tokens=16, max_tokens_per_text_unit=2)
    decoder = tiny_decoder(**WIDE)
    expected = [r.tokens for r in decode(decoder, PROMPTS, FixedChunk(3), sampling, seed=3)]
    monkeypatch.setattr(compiled, "masked_layer", broken_layer(how))
    for _ in range(2):  # the second process reads the verdict
        monkeypatch.setattr(first_use, "_known", {})
        monkeypatch.setattr(first_use, "run_check", first_use.run_check if _ == 0 else None)
        moved = tiny_decoder(**WIDE).to(gpu)
        spoken = decode(moved, PROMPTS, FixedChunk(3), sampling, seed=3)
        assert [r.tokens for r in spoken] == expected
        backend = readers.reader_of(moved).backend
        assert type(backend) is Backend and backend.captured
    lines = [r.getMessage() for r in caplog.records if "please report" in r.getMessage()]
    assert len(lines) == 2 and "device stand-in, driver" in lines[0]
    assert "compilation, graphs, kernels: " in lines[0] and lines[0] == lines[1]


def test_wrong_graphs_are_not_used(gpu, monkeypatch, caplog):
    monkeypatch.setattr(fake_gpu.Graph, "replay", replay_wrongly)
    decoder = tiny_decoder(**WIDE).to(gpu)
    assert not readers.reader_of(decoder).backend.captured
    assert readers.reader_of(decoder).backend.compiled
    assert "replaced by plain operators" in caplog.text


def test_a_vocoder_with_wrong_graphs_is_found(gpu, monkeypatch):
    case = {"config": tiny_vocoder().config.__dict__}
    assert first_use.compare("vocoder", case, gpu) == (frozenset({"graphs"}), [])
    monkeypatch.setattr(fake_gpu.Graph, "replay", replay_wrongly)
    parts, faults = first_use.compare("vocoder", case, gpu)
    assert not parts
    assert "graphs: Differs: the waveform is off" in faults[0]


@pytest.mark.parametrize("wrong", [False, True])
def test_an_optimizer_with_wrong_kernels_is_found(tested, monkeypatch, wrong):
    class Kernels(Tensors):
        def multiply(self, factors):
            super().multiply(factors * (1.001 if wrong else 1.0))

    monkeypatch.setattr(
        scaled_adam,
        "tensors_of",
        lambda *lists: (Kernels if first_use.under_test else Tensors)(*lists),
    )
    fault = tested("optimizer", {}, "cpu", {"kernels"})
    assert (fault is not None and "are off by" in fault) if wrong else fault is None


# --- processes ------------------------------------------------------------------------------------


def test_a_hang_and_a_crash_are_faults(monkeypatch):
    case = shapes_of(tiny_decoder(**WIDE))
    monkeypatch.setattr(first_use, "LIMIT_S", 0.2)
    assert first_use.run_check("decoding", case, DEVICE, ALL) == "no result after 0.2 s"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_without_a_gpu_says_so():
    fault = first_use.run_check("optimizer", {}, DEVICE, {"kernels"})
    assert fault == "no CUDA device is seen"


def test_verdicts_depend_on_the_device_the_versions_and_the_code(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(first_use, "run_check", lambda *case: asked.append(case))
    case = shapes_of(tiny_decoder(**WIDE))

    def ask() -> int:
        monkeypatch.setattr(first_use, "_known", {})
        assert first_use.sound_parts("decoding", case, gpu) == ALL
        return len(asked)

    assert [ask(), ask()] == [1, 1]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert [ask(), ask()] == [2, 2]
    monkeypatch.setattr(first_use, "_code", lambda: "edited")
    assert ask() == 3
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert ask() == 4


def test_full_memory_is_no_verdict(gpu, monkeypatch, caplog):
    case = shapes_of(tiny_decoder(**WIDE))
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    for fault in (full, None):
        monkeypatch.setattr(first_use, "run_check", lambda *case, fault=fault: fault)
        monkeypatch.setattr(first_use, "_known", {})
        assert first_use.sound_parts("decoding", case, gpu) == ALL
    assert caplog.text.count("its memory is full") == 1


def test_wrong_parts_are_not_used_because_memory_is_full_later(gpu, monkeypatch):
    faults = iter(["Differs: other tokens", *["torch.OutOfMemoryError: out of memory"] * 4])
    monkeypatch.setattr(first_use, "run_check", lambda *case: next(faults))
    case = shapes_of(tiny_decoder(**WIDE))
    assert first_use.sound_parts("decoding", case, gpu) == frozenset()


def test_a_draft_is_compared_as_a_decoder_of_its_shape():
    target = tiny_decoder(**WIDE)
    draft = build_draft(tiny_decoder(num_layers=4, **WIDE))
    assert "target_checksum" not in shapes_of(draft)["config"]
    made = gpu_checks.made_decoder(json.loads(json.dumps(shapes_of(draft))))
    assert made.config.num_prediction_heads == 1
    assert made.config.hidden_size == target.config.hidden_size


def test_without_a_gpu_nothing_is_compared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(first_use, "run_check", None)
    monkeypatch.setattr(first_use, "_known", {})
    assert first_use.sound_parts("vocoder", {}, DEVICE) == {"graphs"}
