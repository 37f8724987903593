"""Where an utterance ends: at its first EOS, or at the longest that its text allows; alike in every way of decoding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcar.decoding.records import Prompt
from dcar.errors import DistributionError
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


def no_distribution(probs: Tensor) -> Tensor:
    """Which rows of distributions [B, …, V] hold one that is none: NaN, or without mass. [B] bool; nothing waits for
    the device.

    `sample` draws something from such a distribution all the same, so whoever decodes notes these rows and looks at
    the note when it waits for the device anyway.
    """
    return ~(probs.sum(-1) > 0).flatten(1).all(1) if probs.dim() > 2 else ~(probs.sum(-1) > 0)


def distribution_error(utterance_id: str, position: int) -> DistributionError:
    """What to say of the first distribution that was none."""
    return DistributionError(
        f"{utterance_id}: there is no distribution for token {position}, or for the size of the chunk that it "
                    "begins (the scores are NaN, or all are minus infinity); check the weights of decoder, draft and "
                    "policy, and decode in float32 if they are sound")
