"""CosyVoice 2's language model from its `llm.pt` (FunAudioLLM/CosyVoice, cosyvoice/llm/llm.py, class Qwen2LM).

Its sequence is sos, text (prompt text first), task id, speech. Here the task id is the start symbol of speech, which
closes the prefix (`bos` false), and sos its first vector. Of the V + 3 outputs the first V + 1 are kept: codes and
end of speech. The other two (one unused, one that asks for more text in streaming) are never right where the text is
complete; leaving them out conditions the distribution on that.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcar.errors import CheckpointError
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder

TRUNK, OUTPUT = "llm.model.model.", "llm.model.lm_head.weight"
OWN = ("llm_embedding.weight", "speech_embedding.weight", "llm_decoder.weight", "llm_decoder.bias")
BLANK = "CosyVoice-BlankEN"  # folder beside llm.pt with the configuration and text tokenizer of Qwen2
FIX = "download FunAudioLLM/CosyVoice2-0.5B and give its folder, which holds llm.pt and CosyVoice-BlankEN/"


def read_tensors(path: Path, fix: str) -> dict[str, Tensor]:
    """The tensors of an llm.pt; nothing in the file is executed. CheckpointError, which ends with `fix`."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; {fix}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: holds more than tensors ({str(error).splitlines()[0]}), and pickled programs "
                              f"are never run; {fix}") from error
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path}: not a PyTorch checkpoint ({str(error).splitlines()[0]}); {fix}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: a {type(loaded).__name__}, expected a dictionary of tensors; {fix}")
    return {k: v for k, v in loaded.items() if isinstance(v, Tensor)}  # training adds `epoch` and `step`


def check_version(path: Path, tensors: dict[str, Tensor]) -> None:
    """CheckpointError that names the version found, unless it is the second."""
    if any(k.startswith(("text_encoder.", "llm.encoders.")) for k in tensors):
        raise CheckpointError(
            f"{path}: expected CosyVoice 2 (keys {TRUNK}*), found CosyVoice 1 (CosyVoice-300M: keys text_encoder.*, "
            f"llm.encoders.*): convert it with kind=cosyvoice, or {FIX}")
    if any(k.startswith(TRUNK) for k in tensors) and OWN[0] not in tensors and OWN[1] in tensors:
        raise CheckpointError(f"{path}: expected CosyVoice 2, found CosyVoice 3 (no {OWN[0]}; its special symbols are "
                              f"rows of speech_embedding and are numbered differently); {FIX}")
    missing = [k for k in (*OWN, f"{TRUNK}embed_tokens.weight", f"{TRUNK}norm.weight") if k not in tensors]
    if missing:
        raise CheckpointError(f"{path}: expected the tensors of CosyVoice 2, missing {missing}; found "
                              f"{sorted(tensors)[:3]} …; {FIX}")
    width = tensors[OWN[0]].shape[1]
    rows = tensors[OWN[1]].shape[0]
    expected = {OWN[0]: (2, width), OWN[1]: (rows, width), OWN[2]: (rows, width), OWN[3]: (rows,)}
    wrong = [f"{k} {tuple(tensors[k].shape)} instead of {v}" for k, v in expected.items()
             if tuple(tensors[k].shape) != v]
    if wrong or rows <= 3:
        raise CheckpointError(f"{path}: shapes do not fit together: {'; '.join(wrong)}; {FIX}")


def read_architecture(folder: Path, embeddings: Tensor) -> dict[str, Any]:
    """Configuration of the Qwen2 inside, from `folder`/config.json; its vocabulary is that of the weights."""
    path = folder / "config.json"
    try:
        architecture = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot read the configuration of the language model ({error}); {FIX}, or give "
                              "architecture=<folder with Qwen2's config.json>") from error
    if architecture.get("model_type") != "qwen2":
        raise CheckpointError(f"{path}: expected model_type qwen2, found {architecture.get('model_type')!r}; {FIX}")
    if architecture["hidden_size"] != embeddings.shape[1]:
        raise CheckpointError(f"{path}: hidden_size {architecture['hidden_size']}, but the weights are "
                              f"{embeddings.shape[1]} wide: the configuration is of another model; {FIX}")
    return {**architecture, "vocab_size": embeddings.shape[0]}


def load_cosyvoice2(source: Path, architecture: Path | None = None, speech_vocab_size: int = 0,
                    **settings: Any) -> BackboneDecoder:
    """A decoder with CosyVoice 2's weights; its additional heads are new.

    source: folder of CosyVoice2-0.5B, or an llm.pt. architecture: folder with Qwen2's config.json, by default
    CosyVoice-BlankEN beside llm.pt. speech_vocab_size: if given, what the checkpoint must have. `settings` go into
    BackboneConfig. Raises CheckpointError.
    """
    path = source / "llm.pt" if source.is_dir() else source
    tensors = read_tensors(path, FIX)
    check_version(path, tensors)
    shape = read_architecture(architecture or path.parent / BLANK, tensors[f"{TRUNK}embed_tokens.weight"])
    trunk = {k.removeprefix(TRUNK): v for k, v in tensors.items() if k.startswith(TRUNK)}
    codes = len(tensors["speech_embedding.weight"]) - 3
    return decoder_of(path, tensors, trunk, codes, speech_vocab_size, architecture=shape, source="cosyvoice2",
                      **settings)


def decoder_of(path: Path, tensors: dict[str, Tensor], trunk: dict[str, Tensor], codes: int, wanted: int,
               **settings: Any) -> BackboneDecoder:
    """A decoder with the weights of an llm.pt of either version.

    trunk: its language model's, by our names; codes: how many it has, which must be the `wanted` ones where those are
    given (0 = any). CheckpointError where they are others, or the trunk does not fit.
    """
    if wanted and wanted != codes:
        raise CheckpointError(f"{path}: expected {wanted} speech codes, found {codes}; prepare the corpus with the "
                              "tokenizer of this checkpoint, or give the checkpoint of your tokenizer")
    config = BackboneConfig(speech_vocab_size=codes, base_head_bias=True, sequence_start=True, **settings)
    decoder = BackboneDecoder(config)
    load_trunk(decoder, trunk, str(path))
    with torch.no_grad():
        table, rows = decoder.speech_embedding.weight, tensors["speech_embedding.weight"][: codes + 1]
        table[config.eos] = 0  # ends an utterance and is never read; the first version has no row for it
        table[: len(rows)] = rows
        table[config.start + 1], table[config.start] = tensors["llm_embedding.weight"]  # sos, task id
        decoder.heads.base.weight.copy_(tensors["llm_decoder.weight"][: codes + 1])
        decoder.heads.base.bias.copy_(tensors["llm_decoder.bias"][: codes + 1])
    return decoder.eval()


def load_trunk(decoder: BackboneDecoder, trunk: dict[str, Tensor], where: str) -> None:
    """Fill the language model; CheckpointError for anything missing, left over or misshapen."""
    expected = decoder.backbone.state_dict()
    missing, extra = sorted(set(expected) - set(trunk)), sorted(set(trunk) - set(expected))
    shapes = [f"{k} {tuple(trunk[k].shape)} instead of {tuple(v.shape)}" for k, v in expected.items()
              if k in trunk and trunk[k].shape != v.shape]
    if missing or extra or shapes:
        raise CheckpointError(f"{where}: the weights do not fit their configuration: missing {missing[:3]}, unexpected "
                              f"{extra[:3]}, shapes {shapes[:3]}; give the config.json of this very checkpoint")
    decoder.backbone.load_state_dict({k: v.float() for k, v in trunk.items()})
