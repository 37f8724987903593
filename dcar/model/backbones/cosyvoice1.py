"""CosyVoice-300M's language model from its `llm.pt` (FunAudioLLM/CosyVoice, cosyvoice/llm/llm.py, class TransformerLM).

Its sequence is sos, speaker vector, text (prompt text first), task id, speech. Here the speaker vector is left out, as
CosyVoice itself does in instruct mode: the voice comes from the prompt's speech. The layer that made it of an x-vector
is not kept.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from dcar.errors import CheckpointError
from dcar.model.backbones.cosyvoice import OWN, decoder_of, read_tensors
from dcar.model.backbones.cosyvoice_lm import MODEL_TYPE
from dcar.model.backbones.decoder import BackboneDecoder

logger = logging.getLogger(__name__)

FIX = "download FunAudioLLM/CosyVoice-300M and give its folder, which holds llm.pt and cosyvoice.yaml"
NAMES = (  # of the checkpoint -> of `CosyVoiceLM`
    (r"^text_embedding\.", "embed_tokens.embedding."),
    (r"^text_encoder_affine_layer\.", "embed_tokens.output."),
    (r"^text_encoder\.", "embed_tokens."),
    (r"^llm\.", ""),
    (r"(^|\.)embed\.out\.0\.", r"\1input."),
    (r"(^|\.)embed\.out\.1\.", r"\1input_norm."),
    (r"(^|\.)after_norm\.", r"\1norm."),
    (r"(^|\.)encoders\.", r"\1layers."),
    (r"\.norm_mha\.", ".norm1."),
    (r"\.norm_ff\.", ".norm2."),
)


def load_cosyvoice1(source: Path, speech_vocab_size: int = 0, **settings: Any) -> BackboneDecoder:
    """A decoder with the weights of CosyVoice-300M (-SFT, -Instruct); its additional heads are new.

    source: its folder, or an llm.pt. speech_vocab_size: if given, what the checkpoint must have. `settings` go into
    BackboneConfig. Raises CheckpointError.
    """
    path = source / "llm.pt" if source.is_dir() else source
    tensors = read_tensors(path, FIX)
    check_version(path, tensors)
    check_yaml(path.parent / "cosyvoice.yaml")
    trunk = {renamed(k): v for k, v in tensors.items() if k not in OWN and not k.startswith("spk_embed_affine_layer.")}
    return decoder_of(path, tensors, trunk, len(tensors["speech_embedding.weight"]), speech_vocab_size,
                      architecture=read_sizes(tensors), source="cosyvoice", **settings)


def renamed(name: str) -> str:
    """The name of a tensor of `llm.pt` in `CosyVoiceLM`."""
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def check_version(path: Path, tensors: dict[str, Tensor]) -> None:
    """CheckpointError that says what was found, unless it is the first version's language model."""
    if any(k.startswith("llm.model.") for k in tensors):
        raise CheckpointError(f"{path}: expected CosyVoice 1 (keys llm.encoders.*), found CosyVoice 2 or 3 (keys "
                              f"llm.model.*): convert it with kind=cosyvoice2, or {FIX}")
    needed = (*OWN, "text_embedding.weight", "text_encoder.embed.out.0.weight", "text_encoder_affine_layer.weight",
              "text_encoder.encoders.0.self_attn.pos_bias_u", "llm.encoders.0.self_attn.pos_bias_u",
              "llm.embed.out.0.weight", "text_encoder.encoders.0.feed_forward.w_1.weight",
              "llm.encoders.0.feed_forward.w_1.weight")
    if missing := [k for k in needed if k not in tensors]:
        raise CheckpointError(f"{path}: expected the tensors of CosyVoice-300M, missing {missing[:4]}; found "
                              f"{sorted(tensors)[:3]} …; {FIX}")
    codes, width = tensors["speech_embedding.weight"].shape
    expected = {OWN[0]: (2, width), OWN[2]: (codes + 1, width), OWN[3]: (codes + 1,)}
    if wrong := [f"{k} {tuple(tensors[k].shape)} instead of {v}" for k, v in expected.items()
                 if tuple(tensors[k].shape) != v]:
        raise CheckpointError(f"{path}: shapes do not fit together: {'; '.join(wrong)}; {FIX}")


def check_yaml(path: Path) -> None:
    """CheckpointError where cosyvoice.yaml says what the weights do not show and `CosyVoiceLM` does not do; a warning
    where the file is not there."""
    try:
        text = path.read_text()
    except OSError:
        logger.warning("%s is not there: taken as of CosyVoice-300M (causal text encoder, ReLU in the language model)",
                       path)
        return
    model = text.partition("\nflow:")[0]  # text encoder and language model come first
    found = {"static_chunk_size": ["1", "1"], "input_layer": ["linear", "linear_legacy"],
             "pos_enc_layer_type": ["rel_pos_espnet"] * 2, "selfattention_layer_type": ["rel_selfattn"] * 2,
             "activation_type": []}
    for key, wanted in found.items():
        values = [v.strip("'\"") for v in re.findall(rf"^\s+{key}:\s*(\S+)", model, re.M)]
        if values != wanted:
            raise CheckpointError(f"{path}: expected {key} {wanted or 'not to be set'} for text encoder and language "
                                  f"model, found {values}: a model of another kind; {FIX}")


def read_sizes(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The architecture, from the shapes of the weights."""
    def stack(prefix: str) -> dict[str, int]:
        first = f"{prefix}.encoders.0."
        layers = {int(k.split(".")[2]) for k in tensors if k.startswith(f"{prefix}.encoders.")}
        return {
            "hidden_size": tensors[f"{first}self_attn.linear_q.weight"].shape[0], "num_hidden_layers": max(layers) + 1,
            "num_attention_heads": tensors[f"{first}self_attn.pos_bias_u"].shape[0],
            "intermediate_size": tensors[f"{first}feed_forward.w_1.weight"].shape[0],
        }

    vocab_size, input_size = tensors["text_embedding.weight"].shape
    return {"model_type": MODEL_TYPE, "vocab_size": vocab_size, **stack("llm"),
            "text_encoder": {"input_size": input_size, **stack("text_encoder")}}
