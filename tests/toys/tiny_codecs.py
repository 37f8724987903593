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
from tones import chirp


def needs(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the test if the package is missing, and replace modules that it imports but does not
    need to load a model."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "speechtokenizer":  # its trainer needs a dozen packages that the model does not
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


def save_codec(kind: str, folder: Path) -> Path:
    """Write a tiny codec of transformers with four layers of 16 codes and random codebooks.

    kind: "encodec" (24 kHz, 240 samples per frame), "mimi" (16 kHz, 1,280 samples per frame) or
    "dac" (24 kHz, 320 samples per frame).
    """
    import transformers as t

    torch.manual_seed(0)
    model: Any
    if kind == "encodec":
        model = t.EncodecModel(t.EncodecConfig(
            target_bandwidths=[0.4, 1.6], hidden_size=8, num_filters=2, upsampling_ratios=[6, 5, 4, 2],
            num_lstm_layers=1, codebook_size=16,
        ))  # fmt: skip
    elif kind == "mimi":
        model = t.MimiModel(t.MimiConfig(
            sampling_rate=16_000, hidden_size=16, num_filters=2, upsampling_ratios=[8, 5, 4, 4],
            codebook_size=16, codebook_dim=8, num_quantizers=4, upsample_groups=16,
            vector_quantization_hidden_dimension=8, num_hidden_layers=1, intermediate_size=16,
            num_attention_heads=2, num_key_value_heads=2, sliding_window=250,
        ))  # fmt: skip
    else:
        model = t.DacModel(t.DacConfig(
            encoder_hidden_size=2, downsampling_ratios=[2, 4, 5, 8], decoder_hidden_size=32,
            n_codebooks=4, codebook_size=16, codebook_dim=4, sampling_rate=24_000,
        ))  # fmt: skip
    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv1d | torch.nn.ConvTranspose1d):
            redraw(layer)
    if kind != "dac":
        fit_codebooks(model.eval())
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def redraw(layer: Any) -> None:
    """Draw the weights of a convolution so that a signal keeps its scale, without a bias."""
    weight = torch.randn_like(layer.weight) * (layer.in_channels * layer.kernel_size[0]) ** -0.5
    if torch.nn.utils.parametrize.is_parametrized(layer):
        layer.weight = weight
    else:
        layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.zero_()


@torch.no_grad()
def fit_codebooks(model: Any) -> None:
    """Take the codes of an EnCodec or a Mimi from its encoding of a chirp, so that all are used."""
    wave = torch.from_numpy(chirp(4.0, 0))[None, None]
    if model.config.model_type == "encodec":
        stacks = [(model.quantizer.layers, model.encoder(wave))]
    else:
        latents = model.encoder(wave).latents
        halves = (
            model.quantizer.semantic_residual_vector_quantizer,
            model.quantizer.acoustic_residual_vector_quantizer,
        )
        stacks = [(half.layers, half.input_proj(latents)) for half in halves]
    for layers, residual in stacks:
        for layer in layers:
            chosen = torch.randperm(residual.shape[2])[: layer.codebook.codebook_size]
            for name in ("embed", "embed_sum"):
                if name in layer.codebook._buffers:
                    layer.codebook._buffers[name].copy_(residual[0, :, chosen].T)
            residual = residual - layer.decode(layer.encode(residual))


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
