"""Shared fixtures: one thread per test process (thread thrashing costs up to 100x on two cores), tiny models."""

from __future__ import annotations

import pytest
import torch

from dcar.decoding import Prompt
from dcar.model import CARConfig, CARDecoder

torch.set_num_threads(1)


def tiny_decoder(heads: int = 4, seed: int = 0, **changes) -> CARDecoder:
    """A random decoder of a few thousand parameters; sharpened so that its laws are far from uniform."""
    torch.manual_seed(seed)
    settings = dict(
        text_vocab_size=20, speech_vocab_size=12, hidden_size=32, num_layers=2, num_attention_heads=2, ffn_size=64,
        num_prediction_heads=heads, head_blocks=2, zero_init_heads=False, bos=True, speech_position_scale=0.5,
    )
    model = CARDecoder(CARConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        model.heads.base.weight.mul_(3)
        model.heads.projection.mul_(3)
    return model


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
