"""Text of language models: their own tokenizer instead of phonemes, in `text_tokenizer/` beside a converted model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from dcar.errors import CheckpointError, TextError
from dcar.text.phonemes import TEXT_TOKENIZER


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
