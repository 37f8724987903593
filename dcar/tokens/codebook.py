"""The codebook of the tokenizer that a prepared corpus was made with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dcar.errors import DataError
from dcar.sources.shipped import resolve
from dcar.tokens.kmeans import read_kmeans


def codebook_of(tokenizer: Mapping[str, Any], source: str | Path) -> np.ndarray | None:
    """Centroids [V, P] of the tokenizer that a prepared corpus names (`prepared.json`, "tokenizer"); None if it is of a
    kind that has none (S3, codecs).

    source: the prepared corpus, for messages. Raises DataError where the tokenizer is gone or no longer the one that
    made the tokens.
    """
    spec = str(tokenizer["spec"])
    if ":" in spec and not Path(spec).exists():
        return None
    folder = resolve(spec, "tokenizer")
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"{source}: its tokenizer {folder} is not there any more; put it back: its codebook is needed")
    card, tensors = read_kmeans(folder)
    if card["checksum"] != tokenizer["checksum"]:
        raise DataError(f"{source}: {folder} is not the tokenizer that made its tokens; prepare the corpus again")
    return tensors["centroids"]
