"""End of an utterance: its first EOS, or the length limit of its text."""

from __future__ import annotations

import math

from dcar.decoding.records import Prompt
from dcar.errors import DistributionError
from dcar.sampling import SamplingConfig


def length_limit(prompt: Prompt, sampling: SamplingConfig) -> int:
    """Return the maximum number of tokens to generate, proportional to the length of the text."""
    return min(
        sampling.max_tokens, math.ceil(sampling.max_tokens_per_text_unit * len(prompt.text_ids))
    )


def distribution_error(utterance_id: str, position: int) -> DistributionError:
    """Return the error for an utterance without a distribution at a position (on a GPU, some
    steps after it)."""
    return DistributionError(
        f"{utterance_id}: there is no distribution for token {position}, or for the size of the "
        "chunk that it begins (the scores are NaN, or all are minus infinity); check the weights "
        "of decoder, draft and policy, and decode in float32 if they are sound"
    )
