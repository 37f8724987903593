"""Passes of language models on the ragged cache, against the models' own forward over each plain sequence."""

from collections import Counter

import pytest
import torch
from dcar.decoding.fast.graphs import StepGraphs
from tiny_backbones import CODES, architecture, plain_hidden, tiny_backbone
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dcar.decoding.language import REACH, LanguagePasses
from dcar.decoding.tree import DraftTree
from dcar.errors import EngineError
from dcar.model.backbones.decoder import BackboneDecoder, cast_backbone
from dcar.model.backbones.lora import LoraSettings, add_lora, merge
from dcar.model.base import pad
from heads.layers import KVCache

KINDS = ("llama", "qwen2", "qwen3", "mistral", "cosyvoice-lm")
TEXTS = ([1, 2, 3, 4, 5], [6, 7], [8, 9, 10])
PROMPTS = ([3, 1, 13], [13], [5, 13])
SPEECH = [[(5 * row + 7 * i + i * i) % CODES for i in range(12)] for row in range(3)]


def with_adapters(decoder: BackboneDecoder) -> BackboneDecoder:
    """A decoder with random adapters on every linear layer of its language model's layers."""
    names = {name.rpartition(".")[2] for name, module in decoder.layers.named_modules()
             if isinstance(module, torch.nn.Linear)}
    add_lora(decoder, LoraSettings(rank=4, targets=sorted(names)))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return decoder.eval()


def prefill(passes: LanguagePasses, capacity: int = 20) -> tuple[KVCache, Tensor]:
    return passes.prefill(*pad(TEXTS, passes.device), *pad(PROMPTS, passes.device), capacity)


def check(decoder: BackboneDecoder, tolerance: float = 1e-4, passes: LanguagePasses | None = None) -> None:
    """Prompts, a draft that is rejected, pieces of unequal lengths, a tree with pending tokens, and what follows it."""
    passes = passes or LanguagePasses(decoder)
    cache, hidden = prefill(passes)
    found = [[*hidden[row, : len(prompt)]] for row, prompt in enumerate(PROMPTS)]
    before = cache.lengths
    passes.read(cache, torch.tensor(SPEECH)[:, 7:11])
    cache.advance(torch.tensor([4, 1, 0]), 4)
    cache.truncate(before)
    read = torch.zeros(3, dtype=torch.long)
    for counts in ([2, 3, 1], [3, 1, 0], [1, 2, 4]):
        index = (read[:, None] + torch.arange(max(counts))).clamp(max=11)
        hidden = passes.read(cache, torch.tensor(SPEECH).gather(1, index))
        cache.advance(torch.tensor(counts), max(counts))
        read += torch.tensor(counts)
        for row, count in enumerate(counts):
            found[row] += [*hidden[row, :count]]
    plain = [[*prompt, *speech[:count]] for prompt, speech, count in zip(PROMPTS, SPEECH, read.tolist(), strict=True)]

    pending, nodes, parents = ([1], [2, 7], [4, 0, 9]), [5, 7, 8, 2, 11], [-1, -1, 0, 1, 2]
    tokens = torch.tensor([[*some, *nodes, 0, 0][:8] for some in pending])
    count = torch.tensor([len(some) for some in pending])
    start = cache.lengths
    hidden = passes.read(cache, tokens, DraftTree(parents).layout(count, 8))
    cache.advance(torch.full((3,), 8), 8)
    paths = [[0], [1], [0, 2], [1, 3], [0, 2, 4]]
    for row, some in enumerate(pending):
        for node, path in enumerate(paths):
            states = plain_hidden(decoder, TEXTS[row], [*plain[row], *some, *(nodes[i] for i in path)])
            assert_close(hidden[row, len(some) + node], states[-1], tolerance)
    kept = ([0, 2, 4], [1], [1, 3])  # nodes of each row
    columns = [[*range(len(some)), *(len(some) + i for i in path)] for some, path in zip(pending, kept, strict=True)]
    cache.gather(start, *pad(columns, "cpu"))
    last = passes.read(cache, torch.tensor([[10], [3], [6]]))
    for row, (some, path, token) in enumerate(zip(pending, kept, (10, 3, 6), strict=True)):
        speech = [*plain[row], *some, *(nodes[i] for i in path), token]
        states = plain_hidden(decoder, TEXTS[row], speech)
        assert_close(torch.stack(found[row]), states[: len(plain[row])], tolerance)
        assert_close(last[row, 0], states[-1], tolerance)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max())


@pytest.mark.parametrize("adapters", ["none", "adapters", "merged"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_the_states_of_its_plain_sequence(kind, adapters):
    decoder = tiny_backbone(kind=kind, bos=kind != "llama")
    if adapters != "none":
        decoder = with_adapters(decoder)
    check(merge(decoder) if adapters == "merged" else decoder)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_in_bfloat16_with_float32_heads(kind, adapters):
    decoder = with_adapters(tiny_backbone(kind=kind)) if adapters else tiny_backbone(kind=kind)
    check(cast_backbone(decoder, torch.bfloat16), 0.05)


@pytest.mark.parametrize("changes", [
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                         "original_max_position_embeddings": 64}},
    {"head_dim": 16, "num_key_value_heads": 1},
    {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
], ids=lambda changes: str(next(iter(changes.get("rope_parameters", changes).values()))))
def test_what_a_configuration_may_change(changes):
    check(tiny_backbone(architecture=architecture("llama", **changes)))


def test_weights_are_those_of_the_modules():
    """Trained, they are read as they are now; nothing was copied."""
    decoder = tiny_backbone()
    passes = LanguagePasses(decoder)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)
    check(decoder, passes=passes)


def test_more_positions_than_the_tables_have_are_refused():
    with pytest.raises(EngineError, match=f"9 positions of text and {REACH} of speech exceed"):
        prefill(LanguagePasses(tiny_backbone()), REACH)


class Count(TorchDispatchMode):
    """Operators that are kernels on a GPU; views are not."""

    def __init__(self):
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.overloadpacket is not torch.ops.aten._unsafe_view:
            self.kernels[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "kernels"), [("llama", 21), ("qwen2", 21), ("qwen3", 23), ("cosyvoice-lm", 21)])
def test_kernels_a_layer(kind, kernels, monkeypatch):
    """Reading four tokens of three rows, with a norm counted as one kernel, as it is on a GPU."""
    monkeypatch.setattr("dcar.decoding.language.rms_norm", lambda norm, x: x * norm.weight)
    found = []
    for layers in (2, 3):
        passes = LanguagePasses(tiny_backbone(architecture=architecture(kind, num_hidden_layers=layers), kind=kind))
        cache, _ = prefill(passes)
        with Count() as count:
            passes.read(cache, torch.tensor(SPEECH)[:, :4])
        found.append(count.kernels)
    assert (found[1] - found[0]).total() == kernels


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "cosyvoice-lm"])
def test_a_captured_pass_is_replayed_on_new_tokens(kind, tree, device):
    """A host read or an operator whose shape depends on data could not be captured."""
    here, there = (LanguagePasses(tiny_backbone(kind=kind).to(where)) for where in ("cpu", device))
    layout = DraftTree([-1, -1]).layout(torch.tensor([1, 2, 1]), 4) if tree else None
    on_device = layout and tuple(part.to(device) for part in layout)
    (one, hidden), (other, expected) = prefill(there), prefill(here)
    assert torch.allclose(hidden.cpu(), expected, atol=1e-4)
    tokens, out = torch.zeros(3, 4, dtype=torch.long, device=device), torch.zeros(3, 4, 32).to(device)
    one.longest, lengths = one.capacity - 4, one.lengths
    graphs = StepGraphs(True, device)
    for first in (0, 4, 1):
        drawn = torch.tensor(SPEECH)[:, first : first + 4]
        tokens.copy_(drawn)
        lengths.copy_(other.lengths.to(device))
        graphs.run("pass", lambda: out.copy_(there.read(one, tokens, on_device)), (), "as it is")
        assert torch.allclose(out.cpu(), here.read(other, drawn, layout), atol=1e-4)
        other.advance(torch.tensor([2, 4, 0]), 4)
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "adapters"])
def test_a_pass_compiles_without_a_graph_break(kind):
    passes = LanguagePasses(with_adapters(tiny_backbone()) if kind == "adapters" else tiny_backbone(kind=kind))
    torch._dynamo.reset()  # else earlier models count as recompilations
    compiled = torch.compile(passes.read, fullgraph=True, backend="eager")
    cache, _ = prefill(passes)
    for layout in (None, DraftTree([-1, 0]).layout(torch.tensor([1, 2, 1]), 4)):
        tokens = torch.tensor(SPEECH)[:, :4]
        expected = passes.read(cache, tokens, layout)
        assert torch.allclose(compiled(cache, tokens, layout), expected, atol=1e-5)
