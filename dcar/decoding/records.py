"""Inputs and outputs of decoding, the same for every method.

`Prompt` is one utterance to decode: ids of its text and the speech tokens of a voice. `PromptBatch`
is a padded batch of them. `DecodeResult` is the outcome: tokens, chunk sizes, decisions, and costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dcar.errors import DataError, DistributionError, TextError
from dcar.model.base import DecoderConfig
from dcar.model.batch import pad
from dcar.sampling import SamplingConfig


@dataclass(frozen=True)
class Prompt:
    """Utterance to decode: its text and the speech tokens of the prompt (BOS is added by the
    decoder).

    Ids may be given as any sequence of integers (a list, an array); they are kept as tuples, so
    that a prompt can be hashed and compared.
    """

    utterance_id: str
    text_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("text_ids", "prompt_ids"):
            object.__setattr__(self, name, tuple(int(i) for i in getattr(self, name)))


class PromptBatch(NamedTuple):
    """Arguments of `prefill`."""

    text_ids: Tensor  # [B, N]
    text_lengths: Tensor  # [B]
    prompt_ids: Tensor  # [B, P], closed by BOS where the model has it
    prompt_lengths: Tensor  # [B]


def batch_of(
    prompts: Sequence[Prompt], config: DecoderConfig, device: torch.device | str
) -> PromptBatch:
    """Return the prompts as a batch for a model of this configuration."""
    bos = (config.speech_vocab_size + 1,) if config.bos else ()
    return PromptBatch(
        *pad([p.text_ids for p in prompts], device),
        *pad([p.prompt_ids + bos for p in prompts], device),
    )


def check_prompt(prompt: Prompt, config: DecoderConfig) -> None:
    """Raise TextError or DataError for a prompt that the model cannot read."""
    if not prompt.text_ids:
        raise TextError(
            f"{prompt.utterance_id}: the text has no phonemes; give words that can be pronounced"
        )
    if max(prompt.text_ids) >= config.text_vocab_size:
        raise DataError(
            f"{prompt.utterance_id}: text id {max(prompt.text_ids)} is outside the model's "
            f"{config.text_vocab_size}; text and model come from different phoneme inventories"
        )
    if (
        prompt.prompt_ids
        and not 0 <= min(prompt.prompt_ids) <= max(prompt.prompt_ids) < config.speech_vocab_size
    ):
        raise DataError(
            f"{prompt.utterance_id}: a prompt token is outside the codebook of "
            f"{config.speech_vocab_size}; tokenize the prompt with the model's own tokenizer"
        )
    if not prompt.prompt_ids and not config.bos:
        raise DataError(
            f"{prompt.utterance_id}: this model has no BOS and needs at least one prompt token"
        )


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


@dataclass
class Choice:
    """Choice of a chunk rule, for every row: how many tokens [B] of the next chunk are kept."""

    sizes: Tensor  # [B]
    chosen: Tensor | None = None  # [B] which of N candidates
    log_probs: Tensor | None = None  # [B] of what was chosen, under a policy


@dataclass
class Decision:
    """Decision of a method in one step, for every row: the first sizes[b] of tokens [B, n] are
    emitted. Of these the first accepted[b] were drafted, so their keys and values are in the cache
    already."""

    sizes: Tensor  # [B]
    tokens: Tensor  # [B, n]
    accepted: Tensor | None = None  # [B]
    # [B, L] of a tree: the nodes that were accepted, from the root on, padded with 0
    path: Tensor | None = None
    chosen: Tensor | None = None  # [B] of a chunk rule, as the next one
    log_probs: Tensor | None = None  # [B]
    features: Tensor | None = None  # [B, N, n, F] of the candidates


@dataclass
class DecodeResult:
    """Outcome of decoding one utterance, and its costs.

    A chunk is one decision: sizes[m] tokens were chosen at speech position decision_positions[m]
    (0-based, the prompt included), and emitted[m] were kept before EOS or the length limit.
    """

    utterance_id: str
    method: str
    seed: int
    tokens: list[int]  # generated, without prompt and EOS
    truncated: bool  # the length guard ended it, not EOS
    # forward passes of the decoder that yielded tokens; the first is the prefill
    passes: int
    # forward passes of a draft model for this utterance, its prefill included
    draft_passes: int = 0
    # per pass that verified a draft: tokens drafted,
    proposed: list[int] = field(default_factory=list)
    # and how many of them, from the first on, were accepted
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    decision_positions: list[int] = field(default_factory=list)
    # of the policy, also for forced sizes
    log_probs: list[float] = field(default_factory=list)
    # [S, D] of all consumed speech positions, prompt first, if recorded
    hidden: Tensor | None = None
    prompt_length: int = 0
    # [decisions, N, n, F] what decisions after the draw saw, if `hidden` is recorded
    features: Tensor | None = None
    # which of N > 1 chunks drawn side by side was spoken, by decision
    chosen: list[int] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        return len(self.tokens) / max(1, self.passes)
