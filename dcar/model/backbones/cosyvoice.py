"""Language models of CosyVoice, loaded from their `llm.pt` (FunAudioLLM/CosyVoice,
cosyvoice/llm/llm.py).

CosyVoice 2 (class Qwen2LM): sos, text (prompt text first), task id, speech. Here the task id is the
start symbol of speech, which closes the prefix (`bos` false), and sos its first vector. Of the V +
3 outputs the first V + 1 are kept: codes and end of speech. The other two (one unused, one that
requests more text in streaming) are never right if the text is complete; leaving them out
conditions the distribution on that.

CosyVoice-300M (class TransformerLM): sos, speaker vector, text, task id, speech. The speaker vector
is left out, as in CosyVoice's own instruct mode: the voice comes from the prompt's speech. The
layer that made it from an x-vector is dropped.
"""

import logging
import re
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcar.errors import CheckpointError
from dcar.model.backbones.cosyvoice_lm import MODEL_TYPE
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder
from dcar.sources.hub import read_weights
from heads.checkpoint import misfit, read_config

logger = logging.getLogger(__name__)

TRUNK = "llm.model.model."
SPEECH = (
    "llm_embedding.weight",
    "speech_embedding.weight",
    "llm_decoder.weight",
    "llm_decoder.bias",
)
# folder next to llm.pt with the configuration and text tokenizer of Qwen2
BLANK = "CosyVoice-BlankEN"
FIX = (
    "download FunAudioLLM/CosyVoice2-0.5B and give its folder, which holds llm.pt and "
    "CosyVoice-BlankEN/"
)
FIX_300M = (
    "download FunAudioLLM/CosyVoice-300M and give its folder, which holds llm.pt and cosyvoice.yaml"
)
NAMES = (  # tensors of CosyVoice-300M -> of `CosyVoiceLM`
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


def read_tensors(path: Path, fix: str) -> dict[str, Tensor]:
    """Return the tensors of an llm.pt; nothing in the file is executed. Raises AssetError or
    CheckpointError, ending in `fix`."""
    loaded = read_weights(path, "the language model of CosyVoice", fix)
    # training adds `epoch` and `step`
    return {k: v for k, v in loaded.items() if isinstance(v, Tensor)}


def check_cosyvoice2(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError, naming the version found, unless it is CosyVoice 2."""
    if any(k.startswith(("text_encoder.", "llm.encoders.")) for k in tensors):
        raise CheckpointError(
            f"{path}: expected CosyVoice 2 (keys {TRUNK}*), found CosyVoice 1 (CosyVoice-300M: "
            f"keys text_encoder.*, llm.encoders.*): convert it with kind=cosyvoice, or {FIX}"
        )
    if (
        any(k.startswith(TRUNK) for k in tensors)
        and SPEECH[0] not in tensors
        and SPEECH[1] in tensors
    ):
        raise CheckpointError(
            f"{path}: expected CosyVoice 2, found CosyVoice 3 (no {SPEECH[0]}; its special symbols "
            f"are rows of speech_embedding and are numbered differently); {FIX}"
        )
    check_tensors(
        path, tensors, "CosyVoice 2", (f"{TRUNK}embed_tokens.weight", f"{TRUNK}norm.weight"), 0, FIX
    )
    if len(tensors[SPEECH[1]]) <= 3:
        raise CheckpointError(f"{path}: shapes do not fit together: no speech codes; {FIX}")


def check_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    version: str,
    needed: tuple[str, ...],
    more_outputs: int,
    fix: str,
) -> None:
    """Raise CheckpointError if tensors of speech or other `needed` ones are missing, or those of
    speech do not fit together: there must be as many outputs as speech embeddings, and
    `more_outputs`."""
    if missing := [k for k in (*SPEECH, *needed) if k not in tensors]:
        raise CheckpointError(
            f"{path}: expected the tensors of {version}, missing {missing[:4]}; found "
            f"{sorted(tensors)[:3]} …; {fix}"
        )
    rows, width = tensors[SPEECH[1]].shape
    outputs = rows + more_outputs
    expected = {SPEECH[0]: (2, width), SPEECH[2]: (outputs, width), SPEECH[3]: (outputs,)}
    if wrong := [
        f"{k} {tuple(tensors[k].shape)} instead of {v}"
        for k, v in expected.items()
        if tuple(tensors[k].shape) != v
    ]:
        raise CheckpointError(f"{path}: shapes do not fit together: {'; '.join(wrong)}; {fix}")


def read_architecture(folder: Path, embeddings: Tensor) -> dict[str, Any]:
    """Return the configuration of the Qwen2 inside, from `folder`/config.json; its vocabulary is
    that of the weights."""
    path = folder / "config.json"
    architecture = read_config(folder, FIX)
    if architecture.get("model_type") != "qwen2":
        raise CheckpointError(
            f"{path}: expected model_type qwen2, found {architecture.get('model_type')!r}; {FIX}"
        )
    if (width := architecture.get("hidden_size")) != embeddings.shape[1]:
        raise CheckpointError(
            f"{path}: hidden_size {width}, but the weights are {embeddings.shape[1]} wide: the "
            f"configuration is of another model; {FIX}"
        )
    return {**architecture, "vocab_size": embeddings.shape[0]}


def load_cosyvoice2(
    source: Path, architecture: Path, speech_vocab_size: int = 0, **settings: Any
) -> BackboneDecoder:
    """Build a decoder with CosyVoice 2's weights; its additional heads are new.

    source: folder of CosyVoice2-0.5B, or an llm.pt. architecture: folder with Qwen2's config.json.
    speech_vocab_size: if given, required of the checkpoint. `settings` are passed to
    BackboneConfig. Raises AssetError, CheckpointError.
    """
    path = source / "llm.pt" if source.is_dir() else source
    tensors = read_tensors(path, FIX)
    check_cosyvoice2(path, tensors)
    shape = read_architecture(architecture, tensors[f"{TRUNK}embed_tokens.weight"])
    trunk = {k.removeprefix(TRUNK): v for k, v in tensors.items() if k.startswith(TRUNK)}
    codes = len(tensors["speech_embedding.weight"]) - 3
    return decoder_of(
        path,
        tensors,
        trunk,
        codes,
        speech_vocab_size,
        architecture=shape,
        source="cosyvoice2",
        **settings,
    )


def decoder_of(
    path: Path,
    tensors: dict[str, Tensor],
    trunk: dict[str, Tensor],
    codes: int,
    wanted: int,
    **settings: Any,
) -> BackboneDecoder:
    """Build a decoder with the weights of an llm.pt of either version.

    trunk: weights of its language model, by our names; codes: number of its codes, which must equal
    `wanted` unless that is 0. Raises CheckpointError if it does not, or the trunk does not fit.
    """
    if wanted and wanted != codes:
        raise CheckpointError(
            f"{path}: expected {wanted} speech codes, found {codes}; prepare the corpus with the "
            "tokenizer of this checkpoint, or give the checkpoint of your tokenizer"
        )
    config = BackboneConfig(
        speech_vocab_size=codes, base_head_bias=True, sequence_start=True, **settings
    )
    decoder = BackboneDecoder(config)
    load_trunk(decoder, trunk, str(path))
    with torch.no_grad():
        table = decoder.speech_embedding.weight
        rows = tensors["speech_embedding.weight"][: codes + 1]
        # ends an utterance and is never read; the first version has no row for it
        table[config.eos] = 0
        table[: len(rows)] = rows
        # sos, task id
        table[config.start + 1], table[config.start] = tensors["llm_embedding.weight"]
        decoder.heads.base.weight.copy_(tensors["llm_decoder.weight"][: codes + 1])
        decoder.heads.base.bias.copy_(tensors["llm_decoder.bias"][: codes + 1])
    return decoder.eval()


def load_trunk(decoder: BackboneDecoder, trunk: dict[str, Tensor], where: str) -> None:
    """Fill the language model. Raises CheckpointError for anything missing, left over or
    misshapen."""
    if differences := misfit(decoder.backbone.state_dict(), trunk):
        raise CheckpointError(
            f"{where}: the weights do not fit their configuration: {differences}; give the "
            "config.json of the same checkpoint"
        )
    decoder.backbone.load_state_dict({k: v.float() for k, v in trunk.items()})


def load_cosyvoice1(source: Path, speech_vocab_size: int = 0, **settings: Any) -> BackboneDecoder:
    """Build a decoder with the weights of CosyVoice-300M (-SFT, -Instruct); its additional heads
    are new.

    source: its folder, or an llm.pt. speech_vocab_size: if given, required of the checkpoint.
    `settings` are passed to BackboneConfig. Raises AssetError, CheckpointError.
    """
    path = source / "llm.pt" if source.is_dir() else source
    tensors = read_tensors(path, FIX_300M)
    check_cosyvoice1(path, tensors)
    check_yaml(path.parent / "cosyvoice.yaml")
    trunk = {
        reduce(lambda name, rule: re.sub(rule[0], rule[1], name), NAMES, k): v
        for k, v in tensors.items()
        if k not in SPEECH and not k.startswith("spk_embed_affine_layer.")
    }
    return decoder_of(
        path,
        tensors,
        trunk,
        len(tensors["speech_embedding.weight"]),
        speech_vocab_size,
        architecture=read_sizes(tensors),
        source="cosyvoice",
        **settings,
    )


def check_cosyvoice1(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError, naming what was found, unless it is the language model of
    CosyVoice-300M."""
    if any(k.startswith("llm.model.") for k in tensors):
        raise CheckpointError(
            f"{path}: expected CosyVoice 1 (keys llm.encoders.*), found CosyVoice 2 or 3 (keys "
            f"llm.model.*): convert it with kind=cosyvoice2, or {FIX_300M}"
        )
    layer = ("self_attn.pos_bias_u", "feed_forward.w_1.weight")
    check_tensors(
        path,
        tensors,
        "CosyVoice-300M",
        (
            "text_embedding.weight",
            "text_encoder.embed.out.0.weight",
            "text_encoder_affine_layer.weight",
            "llm.embed.out.0.weight",
            *(f"{part}.encoders.0.{k}" for part in ("text_encoder", "llm") for k in layer),
        ),
        1,
        FIX_300M,
    )


def check_yaml(path: Path) -> None:
    """Raise CheckpointError if cosyvoice.yaml has settings that the weights do not show and
    `CosyVoiceLM` does not support; warn if the file is missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        logger.warning(
            "%s is missing: assuming CosyVoice-300M (causal text encoder, ReLU in the language "
            "model)",
            path,
        )
        return
    model = text.partition("\nflow:")[0]  # text encoder and language model come first
    stated = {
        "static_chunk_size": ["1", "1"],
        "input_layer": ["linear", "linear_legacy"],
        "pos_enc_layer_type": ["rel_pos_espnet"] * 2,
        "selfattention_layer_type": ["rel_selfattn"] * 2,
        "activation_type": [],
    }
    for key, wanted in stated.items():
        values = [v.strip("'\"") for v in re.findall(rf"^\s+{key}:\s*(\S+)", model, re.M)]
        if values != wanted:
            raise CheckpointError(
                f"{path}: expected {key} {wanted or 'not to be set'} for text encoder and language "
                f"model, found {values}: a model of another kind; {FIX_300M}"
            )


def read_sizes(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the architecture, from the shapes of the weights."""

    def stack(prefix: str) -> dict[str, int]:
        first = f"{prefix}.encoders.0."
        layers = {int(k.split(".")[2]) for k in tensors if k.startswith(f"{prefix}.encoders.")}
        return {
            "hidden_size": tensors[f"{first}self_attn.linear_q.weight"].shape[0],
            "num_hidden_layers": max(layers) + 1,
            "num_attention_heads": tensors[f"{first}self_attn.pos_bias_u"].shape[0],
            "intermediate_size": tensors[f"{first}feed_forward.w_1.weight"].shape[0],
        }

    vocab_size, input_size = tensors["text_embedding.weight"].shape
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": vocab_size,
        **stack("llm"),
        "text_encoder": {"input_size": input_size, **stack("text_encoder")},
    }
