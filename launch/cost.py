"""Bytes and floating-point operations of a decoder, counted from its shape (the arithmetic behind `dcar estimate`).

Notation: T positions of text and speech, D width, F feed-forward width, H query heads, G key-value heads of d, V + 1
outputs, L layers, B blocks a head. A multiply-add is two operations; a backward pass costs twice the forward pass,
once for the gradients of the activations and once for those of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder
from dcar.model.backbones.lora import add_lora, set_trainable
from dcar.model.car import CARConfig, CARDecoder
from heads.costs import head_costs


@dataclass(frozen=True)
class Device:
    """What a device achieves: operations and bytes a second, and seconds of overhead of a decoding pass."""

    flops: float
    bandwidth: float
    overhead: float


@dataclass(frozen=True)
class Tokens:
    """A batch: rows, and per row text positions, speech positions with prompt, and speech positions with a target."""

    rows: float
    text: float
    speech: float
    trained: float

    @property
    def length(self) -> float:
        return self.text + self.speech


def on_meta(make: Callable[[], Any]) -> Any:
    """Build a model that has shapes and no memory."""
    with torch.device("meta"):
        return make()


def meta_model(recipe: Any) -> Any:
    """The model that a recipe of stage one trains, frozen and with adapters as it says."""
    if not recipe.backbone.path:
        decoder = on_meta(lambda: CARDecoder(recipe.model))
        if recipe.freeze_trunk:
            decoder.freeze_trunk()
        return decoder
    decoder = on_meta(lambda: BackboneDecoder(BackboneDecoder.load_config(recipe.backbone.path)))
    if recipe.backbone.train == "lora":
        on_meta(lambda: add_lora(decoder, recipe.backbone.lora))
    set_trainable(decoder, recipe.backbone.train)
    return decoder


def count(model: nn.Module, trained: bool = False) -> int:
    """Parameters, or those that are trained; exact."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


def template(config: CARConfig | BackboneConfig) -> int:
    """Positions that a language model reads around the text."""
    if isinstance(config, CARConfig):
        return 0
    return len(config.text_prefix) + len(config.text_suffix) + int(config.sequence_start) + int(not config.bos)


def training_bytes(model: nn.Module, optimizer: str, storage: str = "float32") -> dict[str, float]:
    """Bytes of parameters, gradients and optimiser state; exact (AdamW: two moments and a step count a tensor;
    ScaledAdam: two moments and the two of the tensor's scale)."""
    frozen = 2 if storage == "bfloat16" else 4
    sizes = [(name, p.numel(), p.requires_grad) for name, p in model.named_parameters()]
    trained = sum(n for _, n, t in sizes if t)
    tensors = sum(t for _, _, t in sizes)
    parameters = sum(n * (frozen if name.startswith("backbone.") and "lora_" not in name else 4)
                     for name, n, _ in sizes)
    return {"parameters": parameters, "gradients": 4 * trained,
            "optimizer": 8 * trained + (4 if optimizer == "adamw" else 8) * tensors}


def kv_bytes(config: CARConfig | BackboneConfig, rows: float, columns: float, element: int = 4) -> float:
    """Bytes of the cache: keys and values of every layer; exact for whole rows and columns."""
    return 2 * config.num_layers * rows * columns * _keys(config) * element


def _keys(config: CARConfig | BackboneConfig) -> int:
    """Width of keys and values."""
    return config.hidden_size if isinstance(config, CARConfig) else config.num_kv_heads * config.head_dim


def _queries(config: CARConfig | BackboneConfig) -> int:
    return config.hidden_size if isinstance(config, CARConfig) else config.num_attention_heads * config.head_dim


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of the layers, adapters left out."""
    return [p for name, p in model.named_parameters() if name.startswith(("backbone.layers.", "layers."))
            and p.dim() == 2 and "lora_" not in name]


def activation_bytes(model: Any, tokens: Tokens, bf16: bool = False, recompute: bool = False,
                     head_positions: float = 1.0) -> float:
    """Bytes that the backward pass needs of the forward pass, with attention that keeps no weights (fused)."""
    config = model.config
    width, ffn, positions, small = config.hidden_size, config.ffn_size, tokens.rows * tokens.length, 2 if bf16 else 4
    if isinstance(config, CARConfig):
        # x and its norm twice; qkv, rotated q and k, attention twice; feed-forward before and behind its activation
        layer = positions * (4 * 2 * width + small * (9 * width + 2 * ffn) + (2 * width if config.dropout else 0))
    else:  # two norms of three float32 tensors, q k v o, gate, its activation, up and their product
        layer = positions * (4 * 2 * 2 * width
                             + small * (2 * width + 4 * _queries(config) + 2 * _keys(config) + 4 * ffn))
    trunk = 0.0
    if trunk_gradients(model):
        trunk = config.num_layers * positions * width * 4 + layer if recompute else config.num_layers * layer
    per_head = small * head_costs(model.heads).kept + 4 * config.output_size
    base = small * width + 4 * config.output_size
    return trunk + tokens.rows * tokens.trained * (
        base + head_positions * (config.num_prediction_heads - 1) * per_head)


def trunk_gradients(model: Any) -> bool:
    """Whether anything before the heads is trained, so that gradients run through the trunk."""
    return any(p.requires_grad for name, p in model.named_parameters() if not name.startswith("heads."))


def layer_flops(model: Any, positions: float, length: float) -> float:
    """Forward operations of all layers over `positions`, each of which attends to `length` columns."""
    matrices = sum(p.numel() for p in _matrices(model))
    return positions * (2 * matrices + 4 * length * model.config.num_layers * _queries(model.config))


def head_flops(model: Any, positions: float, heads: float) -> float:
    """Forward operations of heads 1..`heads` over `positions`."""
    base = model.config.hidden_size * model.config.output_size
    return positions * 2 * (base + (heads - 1) * head_costs(model.heads).multiplications)


def training_flops(model: Any, tokens: Tokens, recompute: bool = False, head_positions: float = 1.0) -> float:
    """Operations of one forward and backward pass of a batch."""
    forward = layer_flops(model, tokens.rows * tokens.length, tokens.length)
    passes = 1 + trunk_gradients(model) * (1 + recompute) + any(p.requires_grad for p in _matrices(model))
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    adapted = (4 if recompute else 3) * 2 * tokens.rows * tokens.length * adapters
    targets = tokens.rows * tokens.trained
    base = head_flops(model, targets, 1)
    extra = (head_flops(model, targets, model.config.num_prediction_heads) - base) * head_positions
    return passes * forward + adapted + 3 * (base + extra)


def decode_seconds(model: Any, device: Device, rows: float, text: float, prompt: float, speech: float,
                   chunk: float) -> float:
    """Seconds to speak a batch: a prefill, then speech / chunk passes, each bound by arithmetic or by reading the
    weights and the cache."""
    config = model.config
    element = 4
    weights = sum(p.numel() for name, p in model.named_parameters()
                  if not name.startswith(("heads.", "text_embedding", "speech_embedding", "backbone.embed_tokens")))
    weights += config.hidden_size * config.output_size + head_costs(model.heads).read(chunk)
    columns = text + prompt + speech / 2
    operations = layer_flops(model, rows * chunk, columns) + head_flops(model, rows, chunk)
    read = element * weights + kv_bytes(config, rows, columns)
    one = max(operations / device.flops, read / device.bandwidth) + device.overhead
    prefill = layer_flops(model, rows * (text + prompt), text + prompt) / device.flops
    return prefill + speech / chunk * one
