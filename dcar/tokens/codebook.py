"""The files of a k-means speech tokenizer, read without the encoder that its codes are of, and
embeddings from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from dcar.errors import CheckpointError, DataError, check_format
from dcar.sources.shipped import resolve

FORMAT_VERSION = 1  # of tokenizer.json


def read_kmeans(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """tokenizer.json, and centroids, mean, scale and perhaps projection by name, of a saved k-means
    tokenizer.

    CheckpointError if it is incomplete.
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
        for key in ("type", "name", "checksum", "encoder_sha256"):
            if not isinstance(card[key], str):
                raise ValueError(f"{key} {card[key]!r}")
        if not isinstance(card.get("provenance", {}), dict | None):
            raise ValueError(f"provenance {card['provenance']!r}")
        if odd := [name for name, array in tensors.items() if array.dtype.kind != "f"]:
            raise ValueError(f"{', '.join(odd)} are no numbers")
        if (
            not {"centroids", "mean", "scale"}
            <= tensors.keys()
            <= {"centroids", "mean", "scale", "projection"}
        ):
            raise ValueError(f"tensors {sorted(tensors)}")
        return card, tensors
    except (
        OSError,
        ValueError,
        RecursionError,
        KeyError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as error:
        raise CheckpointError(
            f"{folder}: not a complete speech tokenizer ({type(error).__name__}: {error}); "
            "make one with `dcar fit-tokenizer` or give the folder that it wrote"
        ) from error


def codebook_of(tokenizer: Mapping[str, Any], source: str | Path) -> np.ndarray | None:
    """Centroids [V, P] of the tokenizer that a prepared corpus names (`prepared.json`,
    "tokenizer"); None if it is of a kind that has none (S3, codecs).

    source: the prepared corpus, for messages. Raises DataError where the tokenizer is gone or no
    longer the one that made the tokens.
    """
    spec = str(tokenizer["spec"])
    if ":" in spec and not Path(spec).exists():
        return None
    folder = resolve(spec, "tokenizer")
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"{source}: its tokenizer {folder} is not there any more; put it back: its codebook "
            "is needed"
        )
    card, tensors = read_kmeans(folder)
    if card["checksum"] != tokenizer["checksum"]:
        raise DataError(
            f"{source}: {folder} is not the tokenizer that made its tokens; prepare the corpus "
            "again"
        )
    return tensors["centroids"]


INPUT, OUTPUT = 0, 1
"""Seeds of the two random matrices: what a code looks like coming in and going out need not
agree."""


def spread_out(codebook: np.ndarray | Tensor, size: int, std: float, seed: int = INPUT) -> Tensor:
    """Centroids [V, P] -> table [V, size] of mean 0 and standard deviation `std`: standardised,
    times a random matrix.

    Codes that sound alike then begin alike; rows drawn at random would say that all codes differ
    equally, and two hours of speech are few to learn otherwise from (docs/history.md). Random
    matrices keep distances, near enough (Johnson and Lindenstrauss 1984). The global random state
    stays.
    """
    table = torch.as_tensor(codebook, dtype=torch.float32)
    table = (table - table.mean(0)) / table.std().clamp_min(1e-6)
    random = torch.randn(table.shape[1], size, generator=torch.Generator().manual_seed(seed)).to(
        table.device
    )
    table = table @ random
    return table * (std / table.std())
