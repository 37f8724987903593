"""CUDA graphs of synthesis.

An utterance is some 150 small kernels, each of which costs more to launch than to run. So
utterances are padded to blocks of rows and length, and each block is captured once. Padding does
not change a row (`VocoderNetwork.forward`).
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dcar.decoding.columns import power_of_two, round_up
from dcar.decoding.graphs import StepGraphs
from dcar.vocoder.network import VocoderNetwork
from heads.checkpoint import weights_signature


class Block(NamedTuple):
    """Buffers of a block: tokens [B, T], lengths [B], speakers [B, F], gains [B, bands], waves [B,
    samples]."""

    tokens: Tensor
    lengths: Tensor
    speaker: Tensor
    gains: Tensor
    waves: Tensor


def padded_length(length: int) -> int:
    """Round up to one of four lengths an octave: few graphs, and at most a quarter is padding."""
    return round_up(length, max(8, power_of_two(length) // 8))


class CapturedSynthesis:
    """Synthesis of one vocoder by CUDA graphs, or without them on the same blocks."""

    def __init__(self, network: VocoderNetwork, graphs: bool | None = None):
        self.device = network.renderer.head.weight.device
        self.graphs = StepGraphs(graphs, self.device)
        self._blocks: dict[tuple[int, int], Block] = {}
        self._signature: Hashable = None

    def __call__(
        self,
        network: VocoderNetwork,
        tokens: Tensor,
        lengths: Tensor,
        speaker: Tensor,
        gains: Tensor,
    ) -> Tensor:
        """Return the waveforms [B, T * samples_per_token] of checked tokens [B, T], lengths [B] and
        speakers [B, F] on the host, and gains [B, bands] on the device. They are valid until the
        next call."""
        if self._signature != (signature := weights_signature(network)):
            self._signature = signature
            self.graphs.reset()
            self._blocks.clear()
        rows, length = tokens.shape
        key = power_of_two(rows), padded_length(length)
        if key not in self._blocks:
            self._blocks[key] = self._block(network, *key)
        block = self._blocks[key]
        block.tokens[:rows, :length].copy_(tokens, non_blocking=True)
        block.lengths.zero_()
        block.lengths[:rows].copy_(lengths, non_blocking=True)
        block.speaker[:rows].copy_(speaker, non_blocking=True)
        block.gains[:rows].copy_(gains)
        speak = partial(self._speak, network, block)
        if self.graphs.enabled:
            self.graphs.run(key, speak)
        else:
            speak()
        return block.waves[:rows, : length * network.config.samples_per_token]

    def _block(self, network: VocoderNetwork, rows: int, length: int) -> Block:
        config = network.config
        shapes = (config.speaker_dim,), (config.mel_bands,), (length * config.samples_per_token,)
        return Block(
            torch.zeros(rows, length, dtype=torch.long, device=self.device),
            torch.zeros(rows, dtype=torch.long, device=self.device),
            *(torch.zeros(rows, *shape, device=self.device) for shape in shapes),
        )

    @staticmethod
    def _speak(network: VocoderNetwork, block: Block) -> None:
        waves = network.speak(block.tokens, block.lengths, block.speaker, block.gains)
        block.waves.copy_(waves.clamp(-1.0, 1.0))
