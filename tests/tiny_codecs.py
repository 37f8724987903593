"""Tiny codecs in the published formats."""

import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch


def needs(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips without the package; stands in for what it imports without needing it to load a
    model."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "speechtokenizer":  # its trainer wants a dozen packages that the model does not
        trainer: Any = types.ModuleType("speechtokenizer.trainer")
        trainer.SpeechTokenizerTrainer = None
        monkeypatch.setitem(sys.modules, "speechtokenizer.trainer", trainer)
    if importlib.util.find_spec("torchaudio") is None:
        for name in ("torchaudio", "torchaudio.functional", "torchaudio.functional.functional"):
            empty: Any = types.ModuleType(name)
            empty.__spec__ = importlib.machinery.ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, empty)


def save_xcodec2(folder: Path) -> Path:
    from transformers import Wav2Vec2BertConfig, Xcodec2Config, Xcodec2Model

    torch.manual_seed(0)
    semantic = Wav2Vec2BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        feature_projection_input_dim=160, conv_depthwise_kernel_size=3, position_embeddings_type=None,
        output_hidden_size=16,
    )  # fmt: skip
    config = Xcodec2Config(
        hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8, encoder_hidden_size=2, semantic_model_config=semantic.to_dict(), quantization_dim=48,
        quantization_levels=[4, 4, 4],
    )  # fmt: skip
    Xcodec2Model(config).eval().save_pretrained(folder)
    return folder


def save_speechtokenizer(folder: Path) -> Path:
    from speechtokenizer.model import SpeechTokenizer as Model

    config = {"n_filters": 2, "dimension": 16, "strides": [8, 5, 4, 2], "lstm_layers": 1, "bidirectional": True,
              "dilation_base": 2, "residual_kernel_size": 3, "n_residual_layers": 1, "activation": "ELU",
              "sample_rate": 16_000, "n_q": 2, "semantic_dimension": 24, "codebook_size": 8}  # fmt: skip
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = Model(config)
    for layer in model.quantizer.vq.layers:
        torch.nn.init.normal_(layer._codebook.embed)
        layer._codebook.inited.fill_(1)
    torch.save(model.state_dict(), folder / "SpeechTokenizer.pt")
    return folder
