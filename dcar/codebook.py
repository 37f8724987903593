"""Start embeddings from the tokenizer's codebook: codes that sound alike begin alike.

A fresh table of random rows says that all codes differ equally, and two hours of speech are few to learn otherwise
from. The k-means centroids say it from the start. docs/experiments.md has what that is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcar.errors import DataError
from dcar.tokenizers import SHIPPED_TOKENIZER, read_kmeans

INPUT, OUTPUT = 0, 1
"""Seeds of the two random matrices: what a code looks like coming in and going out need not agree."""


def codebook_of(tokenizer: Mapping[str, Any], source: str | Path) -> np.ndarray | None:
    """Centroids [V, P] of the tokenizer that a prepared corpus names (`prepared.json`, "tokenizer"); None if it is of a
    kind that has none (S3, codecs).

    source: the prepared corpus, for messages. Raises DataError where the tokenizer is gone or no longer the one that
    made the tokens.
    """
    spec = str(tokenizer["spec"])
    if ":" in spec and not Path(spec).exists():
        return None
    folder = SHIPPED_TOKENIZER if spec == "starter" else Path(spec)
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"{source}: its tokenizer {folder} is not there any more; put it back: its codebook is needed")
    card, tensors = read_kmeans(folder)
    if card["checksum"] != tokenizer["checksum"]:
        raise DataError(f"{source}: {folder} is not the tokenizer that made its tokens; prepare the corpus again")
    return tensors["centroids"]


def spread_out(codebook: np.ndarray | Tensor, size: int, std: float, seed: int = INPUT) -> Tensor:
    """Centroids [V, P] -> table [V, size] of mean 0 and standard deviation `std`: standardised, times a random matrix.

    Random matrices keep distances, near enough (Johnson and Lindenstrauss 1984). The global random state stays.
    """
    table = torch.as_tensor(codebook, dtype=torch.float32)
    table = (table - table.mean(0)) / table.std().clamp_min(1e-6)
    random = torch.randn(table.shape[1], size, generator=torch.Generator().manual_seed(seed)).to(table.device)
    table = table @ random
    return table * (std / table.std())
