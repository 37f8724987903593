"""Text and prompt read by the CPU's own kernels, a pass each: what the decoder itself reads, up to rounding."""

import copy

import pytest
import torch
from dcar.decoding.engine.run import engine_for
from dcar.decoding.fast.cpu.native import NativeStack, kernels
from dcar.decoding.fast.passes import FastDecoder
from tiny_decoders import tiny_decoder
from ways import same

from dcar.decoding import ChunkMethod, FixedChunk, Prompt, decode
from dcar.decoding.records import PromptBatch, batch_of
from dcar.model.car import CARDecoder
from dcar.sampling import SamplingConfig

SAMPLING = SamplingConfig(max_tokens=20, max_tokens_per_text_unit=4)


def prompts_of(lengths: list[tuple[int, int]]) -> list[Prompt]:
    """Prompts of these numbers of phonemes and tokens."""
    return [Prompt(f"u{i}", tuple((5 * i + 3 * j) % 19 + 1 for j in range(text)),
                   tuple((i + 7 * j) % 12 for j in range(speech))) for i, (text, speech) in enumerate(lengths)]


RAGGED = prompts_of([(9, 4), (3, 11), (14, 1), (6, 6)])


@pytest.fixture(autouse=True)
def matrix_unit(monkeypatch):
    """As many rows in bfloat16 as a processor with one takes."""
    monkeypatch.setattr(kernels(torch.bfloat16), "rows", 96)


@pytest.fixture
def kernels_alone(monkeypatch):
    """The decoder's own prefill may not be asked."""
    reference = CARDecoder.prefill

    def refuse(*args):
        raise AssertionError("read by the decoder itself")

    monkeypatch.setattr(CARDecoder, "prefill", refuse)
    return reference


def check(model: CARDecoder, exact: CARDecoder, batch: PromptBatch, reference, atol: float) -> None:
    """Hidden states, keys and values of real positions, and what the cache says of itself; then of the next pass."""
    wanted, states = reference(exact, *batch, 30)
    quick = FastDecoder(model)
    got, hidden = quick.prefill(*batch, 30)
    assert (got.prefix, got.longest, got.capacity) == (wanted.prefix, wanted.longest, wanted.capacity)
    assert hidden.dtype == got.kv.dtype == model.norm.weight.dtype and hidden.shape == states.shape
    for name in ("lengths", "origin", "prefix_lengths"):
        assert torch.equal(getattr(got, name), getattr(wanted, name))
    rows = len(batch.text_ids)
    for b in range(rows):
        text, prompt = int(batch.text_lengths[b]), int(batch.prompt_lengths[b])
        for first, many in ((0, text), (got.prefix, prompt)):
            mine, own = (cache.kv[:, b, first : first + many].float() for cache in (got, wanted))
            assert torch.allclose(mine, own, atol=atol, rtol=0)
        assert torch.allclose(hidden[b, :prompt].float(), states[b, :prompt], atol=atol, rtol=0)
    tokens, counts = torch.arange(3 * rows).view(rows, 3) % 12, torch.full((rows,), 3)
    assert torch.allclose(quick.extend(got, tokens, counts).float(), exact.extend(wanted, tokens, counts), atol=atol,
                          rtol=0)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(0, 4)])
def test_reads_what_the_decoder_reads(dtype, atol, bos, heads, which, kernels_alone):
    """One row, whose text or whose prompt is the longer, and rows that are padded in both."""
    exact = tiny_decoder(heads, bos=bos)
    model = copy.deepcopy(exact).to(dtype)
    check(model, exact, batch_of(RAGGED[which], exact.config, "cpu"), kernels_alone, atol)


def test_no_text_sees_speech_and_a_prompt_sees_all_text(kernels_alone):
    quick = FastDecoder(tiny_decoder())
    text, prompt = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[1, 2, 13]])
    four, three = torch.tensor([4]), torch.tensor([3])
    cache, hidden = quick.prefill(text, four, prompt, three, 10)
    other, spoken = quick.prefill(text, four, prompt.flip(1), three, 10)
    assert torch.equal(cache.kv[:, :, :4], other.kv[:, :, :4]) and not torch.equal(hidden, spoken)
    text[0, 3] = 9  # the last one: the first unit of the text and of the prompt see it
    other, spoken = quick.prefill(text, four, prompt, three, 10)
    assert not torch.equal(cache.kv[1, 0, 0], other.kv[1, 0, 0]) and not torch.equal(hidden[:, 0], spoken[:, 0])


@pytest.mark.parametrize("bos", [True, False])
def test_loop_and_engine_speak_the_same_tokens(bos, kernels_alone, monkeypatch):
    model, method = tiny_decoder(bos=bos), ChunkMethod(FixedChunk(3))
    how = dict(seed=4, record_hidden=True, group_size=2)
    spoken = (decode(FastDecoder(model), RAGGED, method, SAMPLING, **how),
              engine_for(model, RAGGED, SAMPLING, batch=3).decode(RAGGED, method, SAMPLING, **how))
    monkeypatch.setattr(CARDecoder, "prefill", kernels_alone)
    for results in spoken:
        same(results, decode(model, RAGGED, method, SAMPLING, **how))


@pytest.mark.parametrize("dtype, where", [(torch.float32, "decoder"), (torch.bfloat16, "kernels")])
def test_weights_that_are_too_large_to_be_read_twice(dtype, where, monkeypatch):
    """In float32, where PyTorch multiplies as fast; and wherever the kernels do not take as many positions."""
    monkeypatch.setattr("dcar.decoding.fast.cpu.native.LARGE", 1)
    model, asked = tiny_decoder().to(dtype), []

    def note(owner, name: str, said: str) -> None:
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: asked.append(said) or own(*args))

    note(CARDecoder, "prefill", "decoder")
    note(NativeStack, "__call__", "kernels")
    quick, few = FastDecoder(model), batch_of(RAGGED[:1], model.config, "cpu")
    quick.prefill(*few, 30)
    assert asked == {"decoder": ["decoder"], "kernels": ["kernels"] * 2}[where]
    asked.clear()
    quick.prefill(*batch_of(prompts_of([(97, 4)]), model.config, "cpu"), 30)
    assert asked == ["decoder"]
