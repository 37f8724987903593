"""A table of embeddings from a codebook (`dcar.tokens.codebook.codebook_of`): codes that sound alike begin alike.

A fresh table of random rows says that all codes differ equally, and two hours of speech are few to learn otherwise
from. The k-means centroids say it from the start. What that is worth: docs/history.md.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

INPUT, OUTPUT = 0, 1
"""Seeds of the two random matrices: what a code looks like coming in and going out need not agree."""


def spread_out(codebook: np.ndarray | Tensor, size: int, std: float, seed: int = INPUT) -> Tensor:
    """Centroids [V, P] -> table [V, size] of mean 0 and standard deviation `std`: standardised, times a random matrix.

    Random matrices keep distances, near enough (Johnson and Lindenstrauss 1984). The global random state stays.
    """
    table = torch.as_tensor(codebook, dtype=torch.float32)
    table = (table - table.mean(0)) / table.std().clamp_min(1e-6)
    random = torch.randn(table.shape[1], size, generator=torch.Generator().manual_seed(seed)).to(table.device)
    table = table @ random
    return table * (std / table.std())

