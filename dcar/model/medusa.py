"""The additional heads as a Medusa checkpoint, in the layout that vLLM reads.

    dcar export-medusa decoder=runs/car out=runs/medusa

vLLM's draft model (vllm/model_executor/models/medusa.py) is what our heads are: per head a stack of residual blocks
z + SiLU(W z + b) and a bias-free output layer. Its files: config.json (num_heads, num_hidden_layers = blocks per head,
medusa_fc_bias) and tensors `blocks.<head>.layers.<block>.{weight,bias}`, `lm_heads.<head>.weight`, as nn.Linear stores
them ([out, in]). Medusa counts the additional heads alone: its head 0 is our head 2.

The target that vLLM runs beside them must be a model of its own that has the same output vocabulary, codes and EOS
(V + 1 ids); vLLM proposes the top token of every head and verifies.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcar.config import load_config
from dcar.errors import CheckpointError, ConfigError
from dcar.model.load import load_decoder
from heads.multi_token import MultiTokenHeads

logger = logging.getLogger(__name__)
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@dataclass
class MedusaConfig:
    """Settings of `dcar export-medusa`."""

    decoder: str = ""  # directory of a decoder with at least two heads; "starter" = the shipped one
    out: str = "runs/medusa"


def medusa_tensors(heads: MultiTokenHeads) -> dict[str, Tensor]:
    """The additional heads by Medusa's names. ConfigError where the layout has no place for them."""
    extra = heads.num_heads - 1
    if extra < 1:
        raise ConfigError("this decoder has the base head alone (FAR); Medusa needs additional heads")
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


def export_medusa(heads: MultiTokenHeads, out: str | Path, checksum: str = "") -> Path:
    """Write config.json and model.safetensors into `out`; `checksum` of the decoder goes into the config."""
    out, tensors = Path(out), medusa_tensors(heads)
    vocabulary, width = heads.base.weight.shape
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": width, "vocab_size": vocabulary,
        "truncated_vocab_size": vocabulary, "num_heads": heads.num_heads - 1, "num_hidden_layers": heads.blocks,
        "medusa_fc_bias": True, "original_lm_head": False, "torch_dtype": "float32", "dcar_decoder_checksum": checksum,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    return out


def load_medusa(directory: str | Path, base: Tensor) -> MultiTokenHeads:
    """Heads from a Medusa checkpoint, with the given base head [V + 1, D]. CheckpointError where it does not fit.

    Reads what `export_medusa` and vLLM's tools write, `medusa_` and `medusa_heads.` prefixes included.
    """
    path = Path(directory)
    try:
        config = json.loads((path / CONFIG).read_text())
        tensors = {k.replace("medusa_heads.", ""): v for k, v in load_file(path / WEIGHTS).items()}
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: no Medusa checkpoint ({error}); give a folder with config.json and "
                              "model.safetensors") from error
    extra, blocks = (int(config.get(f"medusa_{name}", config.get(other, 0))) for name, other in (
        ("num_heads", "num_heads"), ("num_layers", "num_hidden_layers")))
    bias = bool(config.get("medusa_fc_bias", False))
    vocabulary, width = base.shape
    if "token_map" in tensors or config.get("original_lm_head"):
        what = "a reduced vocabulary" if "token_map" in tensors else "one output layer for all heads"
        raise CheckpointError(f"{path}: a Medusa checkpoint with {what}; CAR heads have a full output layer each: "
                              "export it without")
    shapes: dict[str, tuple[int, ...]] = {f"lm_heads.{h}.weight": (vocabulary, width) for h in range(extra)}
    for h in range(extra):
        for b in range(blocks):
            shapes[f"blocks.{h}.layers.{b}.weight"] = (width, width)
            if bias:
                shapes[f"blocks.{h}.layers.{b}.bias"] = (width,)
    wrong = [f"{k} {tuple(tensors[k].shape)} instead of {s}" for k, s in shapes.items()
             if k in tensors and tuple(tensors[k].shape) != s]
    if set(tensors) != set(shapes) or wrong or extra < 1:
        raise CheckpointError(f"{path}: expected {extra} heads of {blocks} blocks, {vocabulary} x {width}; missing "
                              f"{sorted(set(shapes) - set(tensors))[:3]}, unexpected "
                              f"{sorted(set(tensors) - set(shapes))[:3]}, shapes {wrong[:3]}; give the heads of this "
                              "decoder")
    heads = MultiTokenHeads(width, vocabulary, extra + 1, blocks)
    with torch.no_grad():
        heads.base.weight.copy_(base)
        heads.block_bias.zero_()
        for h in range(extra):
            heads.projection[h] = tensors[f"lm_heads.{h}.weight"].T
            for b in range(blocks):
                heads.block_weight[b, h] = tensors[f"blocks.{h}.layers.{b}.weight"].T
                if bias:
                    heads.block_bias[b, h, 0] = tensors[f"blocks.{h}.layers.{b}.bias"]
    return heads.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(MedusaConfig, arguments)
    if not config.decoder:
        raise ConfigError("decoder is not set: give decoder=<directory of a decoder>")
    decoder = load_decoder(config.decoder)
    out = export_medusa(decoder.heads, config.out, decoder.checksum())
    print(f"{out}: {decoder.config.num_prediction_heads - 1} Medusa heads of {decoder.heads.blocks} blocks, "
          f"{decoder.config.output_size} ids")


if __name__ == "__main__":
    main()
