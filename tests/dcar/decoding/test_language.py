"""Passes of language models on the ragged cache, against the models' own forward over each plain
sequence."""

from functools import partial

import pytest
import torch
from test_reader import SPEECH, check, prefilled
from tiny_backbones import architecture, plain_hidden, tiny_backbone, tiny_prompts

from dcar.decoding import FixedChunk, decode
from dcar.decoding.language import REACH
from dcar.decoding.reader import Reader
from dcar.decoding.readers import reader_of
from dcar.decoding.tree import DraftTree
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "adapters"])
def test_a_pass_compiles_without_a_graph_break(kind):
    reader = reader_of(
        with_adapters(tiny_backbone()) if kind == "adapters" else tiny_backbone(kind=kind)
    )
    torch._dynamo.reset()  # else earlier models count as recompilations
    compiled = torch.compile(reader.read, fullgraph=True, backend="eager")
    cache, _ = prefilled(reader)
    cache.eager = False
    for layout in (None, DraftTree([-1, 0, 0]).layout):
        tokens = torch.tensor(SPEECH)[:, :4]
        expected = reader.read(cache, tokens, 3, layout)
        assert torch.allclose(compiled(cache, tokens, 3, layout), expected, atol=1e-5)
