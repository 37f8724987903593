"""The heads in Medusa's layout: what vLLM would compute of the files, refusals."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_decoders import tiny_decoder
from torch import nn

from dcar.errors import ConfigError
from dcar.model.medusa import export_medusa, main
from heads.multi_token import MultiTokenHeads
from heads.shared import SharedHeads


class ResidualBlock(nn.Module):
    """Of vLLM's medusa.py, as its documentation describes it: x + SiLU(linear(x)), num_hidden_layers times."""

    def __init__(self, size: int, layers: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Reader(nn.Module):
    """A model with the parameter names that vLLM loads by, built from config.json alone."""

    def __init__(self, config: dict):
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(config["hidden_size"], config["num_hidden_layers"],
                                                  config["medusa_fc_bias"]) for _ in range(config["num_heads"]))
        self.lm_heads = nn.ModuleList(nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
                                      for _ in range(config["num_heads"]))


@pytest.fixture
def exported(tmp_path):
    decoder = tiny_decoder(4)
    decoder.save_pretrained(tmp_path / "car")
    main([f"decoder={tmp_path / 'car'}", f"out={tmp_path / 'medusa'}"])
    return decoder, tmp_path / "medusa"


def test_a_reader_with_vllms_names_computes_our_heads(exported):
    decoder, folder = exported
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    assert config["num_heads"] == 3 and config["dcar_decoder_checksum"] == decoder.checksum()
    reader = Reader(config)
    reader.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    hidden = torch.randn(5, 32)
    ours = decoder.heads(hidden)
    for head in range(3):
        assert torch.allclose(reader.lm_heads[head](reader.blocks[head](hidden)), ours[:, head + 1], atol=1e-4)


def test_what_the_layout_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="share their weights"):
        export_medusa(MultiTokenHeads(8, 5, 3, blocks=2, share_blocks=True), tmp_path / "x")
    with pytest.raises(ConfigError, match="base head alone"):
        export_medusa(MultiTokenHeads(8, 5, 1), tmp_path / "x")
    with pytest.raises(ConfigError, match="2 additional heads share one stack.*model.heads=independent"):
        export_medusa(SharedHeads(8, 5, 3), tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="decoder is not set"):
        main([f"out={tmp_path}"])
