"""Batches of complete sequences, as training reads them: text, then speech."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class SpeechBatch(TypedDict):
    """Padded batch of sequences. It is a dict, so that loaders, Accelerate and DeepSpeed can move
    it."""

    text_ids: Tensor  # [B, N]
    text_lengths: Tensor  # [B]
    speech_ids: Tensor  # [B, S]: prompt (closed by BOS if the config has it), target without EOS
    speech_lengths: Tensor  # [B], with prompt
    prompt_lengths: Tensor  # [B], with BOS
    # [P] speech positions that carry loss, as indices b * S + t: from the last of the prompt on.
    # They are determined on the CPU, because on a GPU the host would wait for them.
    positions: Tensor
    speech_inputs: NotRequired[Tensor]  # [B, S] read in place of speech_ids: noisy inputs
    states: NotRequired[Tensor]  # [B, S, D] hidden states of a frozen trunk, computed before


def pad(rows: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return lists of ids as ids [B, longest], padded with 0, and lengths [B]."""
    ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def speech_batch(
    texts: Sequence[Sequence[int]],
    speech: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    device: torch.device | str = "cpu",
) -> SpeechBatch:
    """Return the batch of these text ids, and speech ids of which the first ones are the
    prompt."""
    text_ids, text_lengths = pad(texts, device)
    speech_ids, speech_lengths = pad(speech, device)
    longest = speech_ids.shape[1]
    positions = [
        torch.arange(row * longest + prompt - 1, row * longest + len(ids))
        for row, (ids, prompt) in enumerate(zip(speech, prompt_lengths, strict=True))
    ]
    return SpeechBatch(
        text_ids=text_ids,
        text_lengths=text_lengths,
        speech_ids=speech_ids,
        speech_lengths=speech_lengths,
        prompt_lengths=torch.tensor(prompt_lengths, device=device),
        positions=torch.cat(positions).to(device),
    )
