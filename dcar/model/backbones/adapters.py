"""Low-rank adapters (Hu et al. 2021, by `peft`) put into a language model; `lora.py` trains, saves and merges them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from dcar.config import setting
from dcar.errors import ConfigError


@dataclass
class LoraSettings:
    """Adapters: y = W x + (alpha / rank) B A dropout(x)."""

    rank: int = setting(16, "Rank of B A.", minimum=1)
    alpha: float = setting(32.0, "Scale: alpha / rank.", above=0)
    dropout: float = setting(0.0, "Share of inputs dropped while training.", minimum=0, below=1)
    targets: list[str] = setting(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                                 "Layers of the language model that get adapters.")


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
