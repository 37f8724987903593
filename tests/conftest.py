"""Shared fixtures: one thread per test process (thread thrashing costs up to 100x on two cores), tiny models."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import tiny_decoder

from dcar.decoding import Prompt
from dcar.model.car import CARDecoder

torch.set_num_threads(1)


@pytest.fixture
def decoder() -> CARDecoder:
    return tiny_decoder()


@pytest.fixture
def prompts() -> list[Prompt]:
    """Seven prompts of different text and prompt lengths for `tiny_decoder`."""
    return [
        Prompt(f"utt{i}", tuple((3 * i + j) % 19 + 1 for j in range(3 + i)), tuple((i + j) % 12 for j in range(i)))
        for i in range(7)
    ]
