"""Prompts as a batch: checked against what a model can read, and padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dcar.decoding.records import Prompt
from dcar.errors import DataError, TextError
from dcar.model.base import DecoderConfig


class PromptBatch(NamedTuple):
    """What `prefill` reads."""

    text_ids: Tensor  # [B, N]
    text_lengths: Tensor  # [B]
    prompt_ids: Tensor  # [B, P], closed by BOS where the model has it
    prompt_lengths: Tensor  # [B]


def batch_of(prompts: Sequence[Prompt], config: DecoderConfig, device: torch.device | str) -> PromptBatch:
    """The prompts side by side, as a model of this configuration reads them."""
    bos = (config.speech_vocab_size + 1,) if config.bos else ()
    return PromptBatch(*pad([p.text_ids for p in prompts], device), *pad([p.prompt_ids + bos for p in prompts], device))


def pad(rows: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Lists of ids -> ids [B, longest] padded with 0, lengths [B]."""
    lengths = torch.tensor([len(r) for r in rows], device=device)
    out = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return out.to(device), lengths


def check_prompt(prompt: Prompt, config: DecoderConfig) -> None:
    """Typed errors for a prompt that the model cannot read."""
    if not prompt.text_ids:
        raise TextError(f"{prompt.utterance_id}: the text has no phonemes; give words that can be spoken")
    if max(prompt.text_ids) >= config.text_vocab_size:
        raise DataError(f"{prompt.utterance_id}: text id {max(prompt.text_ids)} is outside the model's "
                        f"{config.text_vocab_size}; text and model come from different phoneme inventories")
    if prompt.prompt_ids and not 0 <= min(prompt.prompt_ids) <= max(prompt.prompt_ids) < config.speech_vocab_size:
        raise DataError(f"{prompt.utterance_id}: a prompt token is outside the codebook of "
                        f"{config.speech_vocab_size}; tokenize the prompt with the model's own tokenizer")
    if not prompt.prompt_ids and not config.bos:
        raise DataError(f"{prompt.utterance_id}: this model has no BOS and needs at least one prompt token")
