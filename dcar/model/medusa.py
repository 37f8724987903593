"""The additional heads as a Medusa checkpoint, in the layout that vLLM reads.

    dcar export format=medusa decoder=runs/car out=runs/medusa

vLLM's draft model (vllm/model_executor/models/medusa.py) is what our heads are: per head a stack of residual blocks
z + SiLU(W z + b) and a bias-free output layer. Its files: config.json (num_heads, num_hidden_layers = blocks per head,
medusa_fc_bias) and tensors `blocks.<head>.layers.<block>.{weight,bias}`, `lm_heads.<head>.weight`, as nn.Linear stores
them ([out, in]). Medusa counts the additional heads alone: its head 0 is our head 2.

The target that vLLM runs beside them must be a model of its own that has the same output vocabulary, codes and EOS
(V + 1 ids); vLLM proposes the top token of every head and verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dcar.config import load_config, setting
from dcar.errors import ConfigError
from dcar.model.load import load_decoder
from dcar.tracking import write_json
from heads.build import Heads
from heads.multi_token import MultiTokenHeads

WEIGHTS, CONFIG = "model.safetensors", "config.json"


@dataclass
class MedusaConfig:
    """Settings of `dcar export format=medusa`."""

    decoder: str = setting(meaning="Directory of a decoder with at least two heads; starter = the shipped one.")
    out: str = setting("runs/medusa", "Folder to write.", place="folder")


def medusa_tensors(heads: Heads) -> dict[str, Tensor]:
    """The additional heads by Medusa's names. ConfigError where the layout has no place for them."""
    extra = heads.num_heads - 1
    if extra < 1:
        raise ConfigError("this decoder has the base head alone (FAR); Medusa needs additional heads")
    if not isinstance(heads, MultiTokenHeads):
        raise ConfigError(f"this decoder's {extra} additional heads share one stack, whose input and inner values "
                          "differ by offset (e_k, s_k, b_k); Medusa's layout keeps plain blocks and an output layer "
                          "for each head and cannot hold that: train with model.heads=independent")
    if heads.share_blocks and heads.blocks > 1:
        raise ConfigError(f"the {heads.blocks} blocks of a head share their weights, and Medusa's layout keeps one "
                          "tensor a block: train with model.share_head_blocks=false")
    tensors = {}
    for head in range(extra):
        for block in range(heads.blocks):
            tensors[f"blocks.{head}.layers.{block}.weight"] = heads.block_weight[block, head].T
            tensors[f"blocks.{head}.layers.{block}.bias"] = heads.block_bias[block, head, 0]
        tensors[f"lm_heads.{head}.weight"] = heads.projection[head].T
    return {k: v.detach().cpu().float().contiguous() for k, v in tensors.items()}


def export_medusa(heads: Heads, out: str | Path, checksum: str = "") -> Path:
    """Write config.json and model.safetensors into `out`; `checksum` of the decoder goes into the config."""
    out, tensors = Path(out), medusa_tensors(heads)
    vocabulary, width = heads.base.weight.shape
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": width, "vocab_size": vocabulary,
        "truncated_vocab_size": vocabulary, "num_heads": heads.num_heads - 1, "num_hidden_layers": heads.blocks,
        "medusa_fc_bias": True, "original_lm_head": False, "torch_dtype": "float32", "dcar_decoder_checksum": checksum,
    }
    write_json(out / CONFIG, config)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    config = load_config(MedusaConfig, arguments)
    decoder = load_decoder(config.decoder)
    out = export_medusa(decoder.heads, config.out, decoder.checksum())
    print(f"{out}: {decoder.config.num_prediction_heads - 1} Medusa heads of {decoder.heads.blocks} blocks, "
          f"{decoder.config.output_size} ids")
