"""Passes of language models on the ragged cache, against the models' own forward over each plain
sequence."""

from functools import partial

import pytest
import torch
from test_reader import check
from tiny_backbones import architecture, plain_hidden, tiny_backbone, tiny_prompts

from dcar.decoding import Engine, FixedChunk, decode
from dcar.decoding.compiled import CompiledBackend
from dcar.decoding.language import REACH
from dcar.decoding.reader import Reader
from dcar.decoding.readers import reader_of
from dcar.errors import EngineError
from dcar.model.backbones.decoder import BackboneDecoder, cast_backbone
from dcar.model.backbones.lora import LoraSettings, add_lora, merge
from dcar.sampling import SamplingConfig

KINDS = ("llama", "qwen2", "qwen3", "mistral", "cosyvoice-lm")


def with_adapters(decoder: BackboneDecoder) -> BackboneDecoder:
    """A decoder with random adapters on every linear layer of its language model's layers."""
    names = {
        name.rpartition(".")[2]
        for name, module in decoder.layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    add_lora(decoder, LoraSettings(r=4, target_modules=sorted(names)))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return decoder.eval()


def hold(decoder: BackboneDecoder, tolerance: float = 1e-4, reader: Reader | None = None) -> None:
    """See `check`."""
    check(reader or reader_of(decoder), partial(plain_hidden, decoder), tolerance)


@pytest.mark.parametrize("adapters", ["none", "adapters", "merged"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_the_states_of_its_plain_sequence(kind, adapters):
    decoder = tiny_backbone(kind=kind, bos=kind != "llama")
    if adapters != "none":
        decoder = with_adapters(decoder)
    hold(merge(decoder) if adapters == "merged" else decoder)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_in_bfloat16_with_float32_heads(kind, adapters):
    decoder = with_adapters(tiny_backbone(kind=kind)) if adapters else tiny_backbone(kind=kind)
    hold(cast_backbone(decoder, torch.bfloat16), 0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"head_dim": 16, "num_key_value_heads": 1},
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ],
    ids=lambda changes: str(next(iter(changes.get("rope_parameters", changes).values()))),
)
def test_what_a_configuration_may_change(changes):
    hold(tiny_backbone(architecture=architecture("llama", **changes)))


def test_more_positions_than_the_tables_have_are_refused():
    with pytest.raises(EngineError, match=f"8200 .*{REACH}.*max_tokens"):
        decode(
            tiny_backbone(),
            tiny_prompts(),
            FixedChunk(1),
            SamplingConfig(max_tokens=REACH, max_tokens_per_text_unit=REACH),
        )


def compiled_tokens(kind: str) -> None:
    """Hold compiled passes to plain sequences, and a compiled engine to the eager one."""
    plain = tiny_backbone(kind="qwen2" if kind == "adapters" else kind)
    decoder = with_adapters(plain) if kind == "adapters" else plain
    reader = reader_of(decoder, compile=True)
    hold(decoder, reader=reader)
    sampling = SamplingConfig(temperature=0.9, max_tokens=12)
    for method in (FixedChunk(1), FixedChunk(3)):
        expected = decode(decoder, tiny_prompts(), method, sampling)
        engine = Engine(decoder, method, sampling, 2, compile=True)
        found = engine.decode(tiny_prompts())
        assert [result.tokens for result in found] == [result.tokens for result in expected]
    assert isinstance(reader.backend, CompiledBackend)
    assert all(part._compiled is not None for part in reader.backend._parts.values())


@pytest.mark.parametrize("kind", [*KINDS, "adapters"])
def test_compiled_passes_are_the_same(kind, monkeypatch):
    """Products are joined, and parts are called one by one, by operators."""
    monkeypatch.setattr(torch, "compile", lambda part, **_: part)
    compiled_tokens(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "adapters"])
def test_the_parts_of_a_pass_compile(kind, monkeypatch):
    """Each as a whole: a graph break fails."""
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda part, **_: compile(part, fullgraph=True, backend="eager")
    )
    torch._dynamo.reset()  # else earlier models count as variants
    compiled_tokens(kind)
