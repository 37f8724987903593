"""Text of language models: their own tokenizer instead of phonemes.

A converted model keeps its tokenizer in `text_tokenizer/`. `dcar retokenize` writes a prepared corpus with that
tokenizer's ids in the place of phonemes; everything behind it (training, DCPO, comparison) reads it as any other.

    dcar retokenize data=runs/prepared decoder=runs/cosyvoice2 out=runs/prepared_cosyvoice2
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcar.backbones import load_decoder_config
from dcar.backbones.decoder import TEXT_TOKENIZER_FOLDER
from dcar.config import load_config
from dcar.errors import CheckpointError, ConfigError, DataError, TextError
from dcar.prepared import TEXT_TOKENIZER, check_out_dir, load_prepared, prepared_info, write_json

logger = logging.getLogger(__name__)


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


def text_encoder(directory: str | Path) -> Callable[[str], list[int]]:
    """What turns text into the ids that the decoder in `directory` reads: its own tokenizer, or phonemes."""
    config = load_decoder_config(directory)
    if not config.phonemes.startswith(TEXT_TOKENIZER):
        from dcar.text import text_to_ids

        return text_to_ids
    tokenizer = TextTokenizer.from_pretrained(Path(directory) / TEXT_TOKENIZER_FOLDER)
    if tokenizer.name != config.phonemes:
        raise CheckpointError(f"{directory}/{TEXT_TOKENIZER_FOLDER}: is {tokenizer.name}, but the decoder was trained "
                              f"with {config.phonemes}; copy the folder from where the model was converted")
    return tokenizer


@dataclass
class RetokenizeConfig:
    """Settings of `dcar retokenize`."""

    data: str = ""  # folder written by `dcar prepare`
    decoder: str = ""  # folder written by `dcar convert-backbone`
    out: str = ""  # prepared corpus to write


def retokenize(config: RetokenizeConfig) -> Path:
    """Write the corpus with the decoder's own text ids. ConfigError, DataError, CheckpointError, TextError."""
    for name in ("data", "decoder", "out"):
        if not getattr(config, name):
            raise ConfigError(f"{name} is not set: give {name}=…")
    out = Path(config.out)
    check_out_dir(out)
    if out.exists() and out.resolve() == Path(config.data).resolve():
        raise DataError(f"{out}: is the corpus that is read; choose another folder for out")
    tokenizer = text_encoder(config.decoder)
    if not isinstance(tokenizer, TextTokenizer):
        raise ConfigError(f"{config.decoder} reads phonemes, as the corpus has them; there is nothing to retokenize")
    info = prepared_info(config.data)

    def ids(row: dict[str, Any]) -> dict[str, Any]:
        try:
            prompt = tokenizer(row["prompt_text"]) if row["prompt_text"] else []
            return {"text_ids": tokenizer(row["text"]), "prompt_text_ids": prompt}
        except TextError as error:
            raise TextError(f"{row['source']}: utterance {row['id']}: {error}") from error

    for split in info["counts"]:
        rows = load_prepared(config.data, split)
        features = rows.features.copy()
        features["prompt_text_ids"] = features["text_ids"]
        rows.map(ids, features=features, desc=f"text of {split}").save_to_disk(str(out / split))
    write_json(out / "prepared.json", {**info, "phonemes": {"version": tokenizer.name, "size": tokenizer.size}})
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(f"written to {retokenize(load_config(RetokenizeConfig, arguments))}")
