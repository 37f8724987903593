"""Common parts of all decoders: the type of their configurations, and padded batches of ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dcar.model.backbones.decoder import BackboneConfig
from dcar.model.car import CARConfig

DecoderConfig = CARConfig | BackboneConfig
"""Base class of the configurations of all decoders, including draft models."""


def pad(rows: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return lists of ids as ids [B, longest], padded with 0, and lengths [B]."""
    ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)
