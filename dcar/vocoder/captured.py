"""CUDA graphs of synthesis, of whole utterances and of pieces.

An utterance is some 270 small kernels, each of which costs more to launch than to run. So
utterances are padded to blocks of rows and length, and each block is captured once. Padding does
not change a row (`VocoderNetwork.forward`).

A piece of a stream is cut out of a window of tokens that reaches as far on both sides as the piece
depends on. What is computed again costs a GPU less than launching what streaming.py does on a CPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict
from functools import partial
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dcar import first_use
from dcar.decoding.columns import power_of_two, round_up
from dcar.decoding.graphs import StepGraphs
from dcar.vocoder.network import VocoderNetwork
from dcar.vocoder.streaming import reach
from heads.checkpoint import weights_signature


class CapturedBlock(NamedTuple):
    """Buffers of a block of windows; see `VocoderNetwork.speak_windows`."""

    tokens: Tensor  # [B, T]
    numbers: Tensor  # [B, 4] lengths and places
    speaker: Tensor  # [B, F]
    gains: Tensor  # [B, bands]
    phase: Tensor  # [B, 1]
    waves: Tensor  # [B, samples]
    after: Tensor  # [B, 1] phase


def padded_length(length: int) -> int:
    """Round up to one of four lengths an octave: few graphs, and at most a quarter is padding."""
    return round_up(length, max(8, power_of_two(length) // 8))


class CapturedSynthesis:
    """Synthesis of one vocoder by CUDA graphs, or without them on the same blocks."""

    def __init__(self, network: VocoderNetwork, graphs: bool | None = None):
        self.device = network.device
        self.graphs = StepGraphs(graphs, self.device)
        self._blocks: dict[tuple[int, int], CapturedBlock] = {}
        self._signature: Hashable = None
        self._lock = Lock()

    def __call__(
        self,
        network: VocoderNetwork,
        tokens: Tensor,
        numbers: Tensor,
        speaker: Tensor,
        gains: Tensor,
        phase: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return waveforms [B, T * samples_per_token] on the host, and phases [B, 1], of checked
        windows.

        On the host: tokens [B, T], numbers [B, 4] (length, and the places of
        `VocoderNetwork.speak_windows`), speaker [B, F]. On the device: gains [B, bands], and phase
        [B, 1], by default 0.
        """
        with self._lock:  # threads may share a vocoder
            block = self._run(network, tokens, numbers, speaker, gains, phase)
            rows, length = tokens.shape
            samples = length * network.config.samples_per_token
            return block.waves[:rows, :samples].cpu(), block.after[:rows].clone()

    def _run(
        self,
        network: VocoderNetwork,
        tokens: Tensor,
        numbers: Tensor,
        speaker: Tensor,
        gains: Tensor,
        phase: Tensor | None,
    ) -> CapturedBlock:
        """Synthesise in the buffers of a block, and return it."""
        if self._signature != (signature := weights_signature(network)):
            self._signature = signature
            self.graphs.reset()
            self._blocks.clear()
        rows, length = tokens.shape
        key = power_of_two(rows), padded_length(length)
        if key not in self._blocks:
            self._blocks[key] = self._block(network, *key)
        block = self._blocks[key]
        block.numbers.zero_()
        block.phase.zero_()
        block.tokens[:rows, :length].copy_(tokens, non_blocking=True)
        block.numbers[:rows].copy_(numbers, non_blocking=True)
        block.speaker[:rows].copy_(speaker, non_blocking=True)
        block.gains[:rows].copy_(gains)
        if phase is not None:
            block.phase[:rows].copy_(phase)
        speak = partial(self._speak, network, block)
        if self.graphs.enabled:
            self.graphs.run(key, speak)
        else:
            speak()
        return block

    def _block(self, network: VocoderNetwork, rows: int, length: int) -> CapturedBlock:
        config = network.config

        def zeros(columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=self.device)

        return CapturedBlock(
            tokens=zeros(length, torch.long),
            numbers=zeros(4, torch.long),
            speaker=zeros(config.speaker_dim),
            gains=zeros(config.mel_bands),
            phase=zeros(1, torch.float64),
            waves=zeros(length * config.samples_per_token),
            after=zeros(1, torch.float64),
        )

    @staticmethod
    def _speak(network: VocoderNetwork, block: CapturedBlock) -> None:
        lengths, places = block.numbers[:, 0], block.numbers[:, 1:]
        waves, after = network.speak_windows(
            block.tokens, lengths, block.speaker, block.gains, places, block.phase
        )
        block.waves.copy_(waves.clamp(-1.0, 1.0))
        block.after.copy_(after)


_captured: WeakKeyDictionary[VocoderNetwork, CapturedSynthesis] = WeakKeyDictionary()


def captured_synthesis(network: VocoderNetwork) -> CapturedSynthesis:
    """Return the synthesis of a vocoder on its present device."""
    captured = _captured.get(network)
    if captured is None or captured.device != network.device:
        captured = _captured[network] = CapturedSynthesis(network, _graphs_of(network))
    return captured


def _graphs_of(network: VocoderNetwork) -> bool | None:
    """Return False if graphs are wrong on this GPU; else None, the default."""
    if network.device.type == "cpu":
        return None
    case = {"config": asdict(network.config)}
    return None if "graphs" in first_use.sound_parts("vocoder", case, network.device) else False


class WindowedVocoder:
    """Stream of one utterance on a GPU, with the methods of `StreamingVocoder`."""

    @torch.inference_mode()
    def __init__(self, vocoder: VocoderNetwork, speaker: np.ndarray | Tensor):
        """Start an utterance; see `StreamingVocoder`."""
        self._vocoder = vocoder
        self._speaker = torch.as_tensor(speaker, dtype=torch.float32)[None]
        vocoder.check_speaker(self._speaker, 1)
        self._gains = vocoder.equalizer(vocoder.acoustic, self._speaker)
        self._phase: Tensor | None = None
        self._tokens: list[int] = []
        self._returned = 0  # tokens whose samples were returned

    @torch.inference_mode()
    def push(self, tokens: Sequence[int], last: bool = False) -> np.ndarray:
        """Return further samples [n]; see `StreamingVocoder.push`."""
        self._vocoder.check_ids(torch.as_tensor(tokens, dtype=torch.int64))
        self._tokens += tokens
        around = reach(self._vocoder)
        final = len(self._tokens) - (0 if last else around)
        if final <= self._returned:
            return np.zeros(0, np.float32)
        start = max(0, self._returned - around)
        window = torch.tensor([self._tokens[start:]])
        places = start, self._returned - start, final - start
        first, begin, end = (place * self._vocoder.config.samples_per_token for place in places)
        waves, self._phase = captured_synthesis(self._vocoder)(
            self._vocoder,
            window,
            torch.tensor([[window.shape[1], first, begin, end]]),
            self._speaker,
            self._gains,
            self._phase,
        )
        self._returned = final
        return waves[0, begin:end].numpy()
