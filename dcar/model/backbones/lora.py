"""LoRA on the language model of a decoder (Hu et al. 2021, by `peft`), trained together with the
heads.

`backbone.train` of `dcar train` selects what is trained:

    heads   only the additional heads are trained (Medusa-1). The language model and its output
            layer are frozen, so car-1 and the target of every lossless verifier do not change.
    lora    low-rank adapters on the language model, all heads, and the speech embedding if new
    joint   everything

Checkpoints of a run contain the adapters in place. At its end the adapters are merged into the
weights, so that every later command reads a plain decoder, and also written in peft's own layout
(`adapter/`), named as for the published causal model, with the heads in a separate file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dcar.config import setting
from dcar.errors import ConfigError
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder, inject, peft_config

MODES = ("joint", "lora", "heads")
PREFIX = "base_model.model.model."  # where peft finds the trunk of a causal language model
ADAPTER, HEADS = "adapter_model.safetensors", "heads.safetensors"


@dataclass
class LoraSettings:
    """Settings of adapters: y = W x + (alpha / rank) B A dropout(x)."""

    rank: int = setting(16, "Rank of B A.", minimum=1)
    alpha: float = setting(32.0, "Scale of the adapters: alpha / rank.", above=0)
    dropout: float = setting(
        0.0, "Dropout rate of the adapters' inputs in training.", minimum=0, below=1
    )
    targets: list[str] = setting(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "Layers of the language model that get adapters.",
    )


def add_lora(decoder: BackboneDecoder, settings: LoraSettings) -> BackboneDecoder:
    """Add untrained adapters to a decoder (B = 0, so its output does not change)."""
    if decoder.config.lora:
        raise ConfigError(
            "lora: this decoder already has adapters; merge them first, or resume its own run"
        )
    if settings.rank < 1 or not settings.targets:
        raise ConfigError(
            f"backbone.lora.rank={settings.rank} with {len(settings.targets)} targets: set "
            "backbone.lora.rank to at least 1 and name at least one layer in backbone.lora.targets"
        )
    inject(decoder.backbone, asdict(settings))
    decoder.config.lora = asdict(settings)
    return decoder


def set_trainable(decoder: BackboneDecoder, mode: str) -> None:
    """Freeze everything that `mode` (joint, lora, heads) does not train; see the top of this
    file."""
    if (mode == "lora") != bool(decoder.config.lora):
        raise ConfigError(
            f"backbone.train={mode}, but the decoder has "
            f"{'' if decoder.config.lora else 'no '}adapters"
        )
    if mode == "heads" and decoder.config.num_prediction_heads == 1:
        raise ConfigError(
            "backbone.train=heads trains the additional heads, but this decoder has none; convert "
            "the model with heads=7, or train lora or joint"
        )
    new = decoder.config.source == "text-lm"
    if mode == "heads" and new:
        raise ConfigError(
            "backbone.train=heads freezes the language model, but this one was never trained on "
            "speech: train lora or joint"
        )
    for name, parameter in decoder.named_parameters():
        if mode == "joint":
            trained = True
        elif mode == "lora":
            trained = (
                "lora_" in name
                or name.startswith("heads.")
                or new
                and name.startswith("speech_embedding.")
            )
        else:
            trained = name.startswith("heads.") and not name.startswith("heads.base.")
        parameter.requires_grad_(trained)


def save_adapter(decoder: BackboneDecoder, directory: str | Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors as peft does
    (PeftModel.from_pretrained on the published causal model reads them), and heads and speech
    embedding in heads.safetensors."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config = peft_config(decoder.config.lora)
    config.inference_mode = True
    config.save_pretrained(str(path))
    tensors = {k: v.detach().cpu().contiguous() for k, v in decoder.state_dict().items()}
    adapter = {
        PREFIX + k.removeprefix("backbone.").replace(".default", ""): v
        for k, v in tensors.items()
        if "lora_" in k
    }
    save_file(adapter, path / ADAPTER, metadata={"format": "pt"})
    rest = {k: v for k, v in tensors.items() if not k.startswith("backbone.")}
    save_file(rest, path / HEADS, metadata={"format": "pt"})


def merge(decoder: BackboneDecoder) -> BackboneDecoder:
    """Return a decoder without adapters that computes the same: W + (alpha / rank) B A, in
    float32."""
    scale = decoder.config.lora["alpha"] / decoder.config.lora["rank"]
    merged: dict[str, Tensor] = {}
    state = decoder.state_dict()
    for name, tensor in state.items():
        if "lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            stem = name.removesuffix(".base_layer.weight")
            a, b = (
                state[f"{stem}.lora_A.default.weight"].float(),
                state[f"{stem}.lora_B.default.weight"].float(),
            )
            tensor = tensor.float() + scale * (b @ a)
        merged[name.replace(".base_layer.", ".")] = tensor.float()
    plain = BackboneDecoder(BackboneConfig(**{**asdict(decoder.config), "lora": None}))
    plain.load_state_dict(merged)
    return plain.to(decoder.speech_embedding.weight.device).train(decoder.training)
