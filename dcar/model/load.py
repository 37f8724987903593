"""Load decoders and drafts of either kind, policies and text tokenizers; "starter" is what ships with the package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from dcar.errors import CheckpointError, TextError
from dcar.model.backbones.decoder import TEXT_TOKENIZER_FOLDER, BackboneConfig, BackboneDecoder
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import AnyDecoder, BackboneDraft, DraftDecoder
from dcar.sources.shipped import resolve
from dcar.text.phonemes import TEXT_TOKENIZER, text_to_ids
from heads.policy import ChunkPolicy

Shipped = Literal["decoder", "far"]
"""Which of the shipped decoders "starter" means: the one with seven heads, or the next-token decoder."""


def _class_of(directory: str | Path) -> type[CARDecoder] | type[BackboneDecoder]:
    path = Path(directory) / "config.json"
    remedy = "give the directory of a decoder, as `dcar train` and `dcar convert-backbone` write it"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or not UTF-8
        raise CheckpointError(f"{path}: cannot read the model's configuration ({error}); {remedy}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: a model's configuration is a mapping, not {json.dumps(raw)[:40]}; {remedy}")
    kind: Any = raw.get("model_type")
    if kind in ("qwen2", "llama", "mistral", "qwen3"):
        raise CheckpointError(f"{path}: this is a '{kind}' language model as it was published; make a decoder of it "
                              f"first: dcar convert-backbone kind=… source={directory} out=…")
    known = {c.model_type: c for c in (BackboneDecoder, BackboneDraft, DraftDecoder)}
    return known.get(str(kind), CARDecoder)


def load_decoder(directory: str | Path, device: str | torch.device = "cpu",
                 starter: Shipped = "decoder") -> AnyDecoder:
    """A decoder or a draft of either kind, in eval mode, by what its config.json says. CheckpointError if it is none.

    directory "starter" is the shipped decoder called `starter`.
    """
    folder = resolve(str(directory), starter)
    return _class_of(folder).from_pretrained(folder, device)


def load_decoder_config(directory: str | Path, starter: Shipped = "decoder") -> CARConfig | BackboneConfig:
    """Its configuration alone."""
    folder = resolve(str(directory), starter)
    return _class_of(folder).load_config(folder)


def load_policy(directory: str | Path, device: str | torch.device = "cpu") -> ChunkPolicy:
    """A policy in eval mode; "starter" is the shipped one, "starter-t0.4" the one trained at temperature 0.4.
    CheckpointError if the folder holds none."""
    return ChunkPolicy.from_pretrained(resolve(str(directory), "policy"), device)


class TextTokenizer:
    """Byte-pair ids of a text; `name` identifies tokenizer and version, for `config.phonemes`."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError("the model's tokenizer has no tokenizer.json (a slow tokenizer); convert it with "
                                  "transformers' AutoTokenizer(...).save_pretrained first")
        digest = hashlib.sha256(backend.to_str().encode()).hexdigest()[:16]
        self.name, self.size = f"{TEXT_TOKENIZER}{digest}", len(tokenizer)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> TextTokenizer:
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(source)))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{source}: no text tokenizer ({str(error).splitlines()[0]}); give the folder of the "
                                  "published model, with tokenizer.json") from error

    def __call__(self, text: str) -> list[int]:
        """Ids of a text without special tokens around it. TextError if there are none."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise TextError("there is nothing to speak in this text; give some words")
        return list(ids)


def text_encoder(directory: str | Path, starter: Shipped = "decoder") -> Callable[[str], list[int]]:
    """What turns text into the ids that the decoder in `directory` reads: its own tokenizer, or phonemes."""
    directory = resolve(str(directory), starter)
    config = load_decoder_config(directory)
    if not config.phonemes.startswith(TEXT_TOKENIZER):
        return text_to_ids
    tokenizer = TextTokenizer.from_pretrained(directory / TEXT_TOKENIZER_FOLDER)
    if tokenizer.name != config.phonemes:
        raise CheckpointError(f"{directory}/{TEXT_TOKENIZER_FOLDER}: is {tokenizer.name}, but the decoder was trained "
                              f"with {config.phonemes}; copy the folder from where the model was converted")
    return tokenizer
