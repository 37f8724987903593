"""Where an utterance ends: at its first EOS, or at the longest that its text allows; alike in every way of decoding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcar.decoding.records import Prompt
from dcar.sampling import SamplingConfig


def length_limit(prompt: Prompt, sampling: SamplingConfig) -> int:
    """Most tokens that may be generated: tied to the length of the text, as speech is."""
    return min(sampling.max_tokens, math.ceil(sampling.max_tokens_per_text_unit * len(prompt.text_ids)))


def up_to_end(tokens: Tensor, asked: Tensor, eos: int) -> tuple[Tensor, Tensor]:
    """Of tokens [B, k] asked[b] are to be emitted: how many stand before the first EOS [B], and whether there is one
    among them [B]. What is asked for must not exceed the row's limit."""
    width = tokens.shape[1]
    first = torch.where(tokens == eos, torch.arange(width, device=tokens.device), width).amin(1)
    return torch.minimum(asked, first), first < asked
