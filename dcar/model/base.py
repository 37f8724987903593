"""The interface of decoders: what the loop, stage two, exports and comparisons ask of any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dcar.model.backbones.decoder import BackboneConfig
from dcar.model.car import CARConfig
from heads.layers import KVCache

if TYPE_CHECKING:
    from heads.chunk_scorer import ChunkScorer, LogRatios
    from heads.policy import ChunkPolicy, PolicyReader

DecoderConfig = CARConfig | BackboneConfig
"""What the configurations of all decoders are, those of drafts included."""


class Decoder(Protocol):
    """A `CARDecoder`, a `BackboneDecoder`, a draft of either, or a `FastDecoder` of one."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def norm(self) -> Any:
        """Behind the last layer; its weight says the device and dtype."""

    @property
    def heads(self) -> Callable[..., Tensor]:
        """See `PredictionHeads.forward`."""

    def prefill(self, text_ids: Tensor, text_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor,
                capacity: int) -> tuple[KVCache, Tensor]:
        """See `CARDecoder.prefill`."""

    def extend(self, cache: KVCache, tokens: Tensor, counts: Tensor,
               layout: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """See `CARDecoder.extend`."""

    def policy_reader(self, policy: ChunkPolicy, hidden: Tensor, capacity: int) -> PolicyReader:
        """A policy for the batch whose hidden states [B, …] are given, of at most `capacity` positions a row."""

    def log_ratios(self, chunk_scorer: ChunkScorer) -> LogRatios:
        """A chunk scorer with the weights that it has now: the module, or what computes the same in fewer kernels."""

    def checksum(self) -> str: ...


def pad(rows: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Lists of ids -> ids [B, longest] padded with 0, lengths [B]."""
    ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)
