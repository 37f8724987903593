"""LoRA on the language model of a decoder (Hu et al. 2021, by `peft`), trained together with the
heads.

`backbone.train` of `dcar train` selects what is trained:

    heads   only the additional heads are trained (Medusa-1). The language model and its output
            layer are frozen, so car-1 and the target of every lossless verifier do not change.
    lora    low-rank adapters on the language model, all heads, and the speech embedding if new
    joint   everything

Checkpoints of a run contain the adapters in place. At its end the adapters are merged into the
weights, so that every later command reads a plain decoder, and also saved by peft (`adapter/`),
with the heads in a separate file; `PeftModel.from_pretrained` reads the folder for the published
causal model.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import save_file

from dcar.config import check, setting
from dcar.errors import ConfigError
from dcar.model.backbones.decoder import BackboneDecoder

MODES = ("joint", "lora", "heads")
HEADS = "heads.safetensors"


@dataclass
class LoraSettings:
    """Settings of adapters, by the names of peft's LoraConfig: y = W x + (lora_alpha / r) B A
    dropout(x)."""

    r: int = setting(16, "Rank of B A.", minimum=1)
    lora_alpha: float = setting(32.0, "Scale of the adapters, divided by r.", above=0)
    lora_dropout: float = setting(
        0.0, "Dropout rate of the adapters' inputs in training.", minimum=0, below=1
    )
    target_modules: list[str] = setting(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "Layers of the language model that get adapters.",
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.target_modules:
            raise ConfigError("backbone.lora.target_modules is empty: name at least one layer")


def add_lora(decoder: BackboneDecoder, settings: LoraSettings) -> BackboneDecoder:
    """Add untrained adapters to a decoder (B = 0, so its output does not change)."""
    if decoder.config.lora:
        raise ConfigError(
            "lora: this decoder already has adapters; merge them first, or resume its own run"
        )
    decoder.add_adapters(asdict(settings))
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
                or (new and name.startswith("speech_embedding."))
            )
        else:
            trained = name.startswith("heads.") and not name.startswith("heads.base.")
        parameter.requires_grad_(trained)


def save_adapter(decoder: BackboneDecoder, directory: str | Path) -> None:
    """Save the adapters by peft, and heads and speech embedding in heads.safetensors."""
    path = Path(directory)
    decoder.adapters.save_pretrained(str(path))
    state = decoder.state_dict().items()
    rest = {k: v.cpu().contiguous() for k, v in state if not k.startswith("backbone.")}
    save_file(rest, path / HEADS, metadata={"format": "pt"})


def merge(decoder: BackboneDecoder) -> BackboneDecoder:
    """Merge a decoder's adapters into its weights, in place and in float32, and return it."""
    decoder.float().adapters.merge_and_unload()
    decoder.config.lora = None
    return decoder
