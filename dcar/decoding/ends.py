"""The end of an utterance, the same for the loop and the engine: its first EOS, or the length limit of its text."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcar.decoding.records import Prompt
from dcar.errors import DistributionError
from dcar.sampling import SamplingConfig


def length_limit(prompt: Prompt, sampling: SamplingConfig) -> int:
    """The most tokens that may be generated, proportional to the length of the text."""
    return min(sampling.max_tokens, math.ceil(sampling.max_tokens_per_text_unit * len(prompt.text_ids)))


def up_to_end(tokens: Tensor, asked: Tensor, eos: int) -> tuple[Tensor, Tensor]:
    """How many of the first asked[b] tokens [B, k] come before the first EOS [B], and whether there is an EOS among
    them [B]. `asked` must not exceed the row's limit."""
    width = tokens.shape[1]
    first = torch.where(tokens == eos, torch.arange(width, device=tokens.device), width).amin(1)
    return torch.minimum(asked, first), first < asked


def no_distribution(probs: Tensor) -> Tensor:
    """Which rows of distributions [B, …, V] have one that is NaN or without mass: [B] bool, without a synchronisation.

    `sample` draws something from such a distribution all the same, so the decoders record these rows and raise when
    they synchronise anyway.
    """
    return ~(probs.sum(-1) > 0).view(len(probs), -1).all(1)


def distribution_error(utterance_id: str, position: int) -> DistributionError:
    """The error for the first position without a distribution."""
    return DistributionError(
        f"{utterance_id}: there is no distribution for token {position}, or for the size of the chunk that it "
        "begins (the scores are NaN, or all are minus infinity); check the weights of decoder, draft and "
        "policy, and decode in float32 if they are sound")
