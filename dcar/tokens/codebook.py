"""Files of a k-means speech tokenizer, read without its encoder, and embeddings made from its
centroids."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from dcar.errors import CheckpointError, DataError, check_format
from dcar.sources.shipped import resolve
from dcar.tokens.origin import TokenizerInfo

FORMAT_VERSION = 1  # version of tokenizer.json


def read_kmeans(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return tokenizer.json and the arrays centroids, mean, scale and, if there is one, projection
    of a saved k-means tokenizer.

    Raises CheckpointError if it is incomplete.
    """
    try:
        card = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        check_format(
            folder / "tokenizer.json",
            card.get("format_version"),
            FORMAT_VERSION,
            CheckpointError,
            "make the tokenizer again with `dcar fit-tokenizer`",
        )
        tensors = load_file(folder / "tokenizer.safetensors")
        required = {"centroids", "mean", "scale"}
        if not required <= tensors.keys() <= required | {"projection"}:
            raise ValueError(
                "the tensors must be centroids, mean, scale and perhaps projection, not "
                f"{sorted(tensors)}"
            )
        return card, tensors
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: not a complete speech tokenizer ({type(error).__name__}: {error}); "
            "make one with `dcar fit-tokenizer` or give the folder that it wrote"
        ) from error


def codebook_of(tokenizer: TokenizerInfo, source: str | Path) -> np.ndarray | None:
    """Return the centroids [V, P] of the tokenizer that made a prepared corpus; None for a
    tokenizer without centroids (S3, codecs).

    source: the prepared corpus, for messages. Raises DataError if the tokenizer is missing or is no
    longer the one that made the tokens.
    """
    spec = tokenizer.spec
    if ":" in spec and not Path(spec).exists():
        return None
    folder = resolve(spec, "tokenizer")
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"{source}: its tokenizer {folder} is missing; restore it, because its codebook is "
            "needed"
        )
    card, tensors = read_kmeans(folder)
    if card["checksum"] != tokenizer.checksum:
        raise DataError(
            f"{source}: {folder} is not the tokenizer that made its tokens; prepare the corpus "
            "again"
        )
    return tensors["centroids"]


INPUT, OUTPUT = 0, 1
"""Seeds of the two random matrices. They differ because a code's input and output embeddings
need not agree."""


def spread_out(codebook: np.ndarray | Tensor, size: int, std: float, seed: int = INPUT) -> Tensor:
    """Turn centroids [V, P] into a table [V, size] of mean 0 and standard deviation `std`:
    standardise them, then multiply by a random matrix.

    Codes that sound alike then start with similar embeddings. Rows drawn at random would treat all
    codes as equally different, and two hours of speech are too few to correct that
    (docs/history.md). Random matrices approximately preserve distances (Johnson and Lindenstrauss
    1984). The global random state is not changed.
    """
    table = torch.as_tensor(codebook, dtype=torch.float32)
    table = (table - table.mean(0)) / table.std().clamp_min(1e-6)
    random = torch.randn(table.shape[1], size, generator=torch.Generator().manual_seed(seed)).to(
        table.device
    )
    table = table @ random
    return table * (std / table.std())
