"""Low-rank adapters (Hu et al. 2021, by `peft`) put into a language model; `lora.py` trains, saves and merges them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dcar.errors import ConfigError


@dataclass
class LoraSettings:
    """Adapters: y = W x + (alpha / rank) B A dropout(x)."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                                        "down_proj"])


def peft_config(settings: dict[str, Any]):
    from peft import LoraConfig

    return LoraConfig(r=settings["rank"], lora_alpha=settings["alpha"], lora_dropout=settings["dropout"],
                      target_modules=list(settings["targets"]), bias="none")


def inject(backbone: nn.Module, settings: dict[str, Any]) -> None:
    """Put adapters into the language model, in place. ConfigError where no layer has a target's name."""
    from peft import inject_adapter_in_model

    names = {name.rpartition(".")[2] for name, _ in backbone.named_modules()}
    if unknown := sorted(set(settings["targets"]) - names):
        linear = {n.rpartition(".")[2] for n, m in backbone.named_modules() if isinstance(m, nn.Linear)}
        raise ConfigError(f"lora targets {unknown} are no layers of this model; it has {sorted(linear)}")
    inject_adapter_in_model(peft_config(settings), backbone)
