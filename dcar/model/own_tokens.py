"""Training on the decoder's own tokens (scheduled sampling).

A decoder that only ever read recordings trusts the tokens before; while it speaks they are its own, errors included.
Here a share of the input's chunks is sampled by its heads from the true past; the targets stay those of the recording.
Scheduled sampling in two passes (Mihaylova and Martins 2019, "Scheduled Sampling
for Transformers"), with chunks as CAR makes them: all tokens of one are drawn from one hidden state, unseen by each
other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.build import Heads

LONGEST_CHUNK = 8  # tokens; longer ones are seldom right, and their targets say little


@torch.no_grad()
def with_own_tokens(heads: Heads, hidden: Tensor, speech_ids: Tensor, speech_lengths: Tensor, prompt_lengths: Tensor,
                    eos: int, share: float) -> Tensor:
    """Inputs [B, S] in which chunks are replaced by the heads' draws, each with probability `share`.

    hidden [B, S, D] is what the decoder makes of speech_ids [B, S]. Every row is cut into chunks of one random size,
    1 to as many as there are heads (at most LONGEST_CHUNK), from a random phase on. The token at position t of a chunk
    that begins at s is drawn from head t - s + 1 at position s - 1, at temperature 1. The prompt stays as it is, and
    so does a token for which the end of speech was drawn.
    """
    rows, size = speech_ids.shape
    device = speech_ids.device
    largest = min(heads.num_heads, LONGEST_CHUNK)
    sizes = torch.randint(1, largest + 1, (rows, 1), device=device)
    position = torch.arange(size, device=device)
    place = position + torch.randint(0, largest, (rows, 1), device=device)
    offset = place % sizes  # of a position within its chunk, from 0
    chosen = torch.rand(rows, size + largest, device=device) < share  # by chunk
    replaced = chosen.gather(1, place // sizes) & (position < speech_lengths[:, None]) \
        & (position - offset >= prompt_lengths[:, None])
    inputs = speech_ids.clone()
    for head in range(1, largest + 1):
        row, column = (replaced & (offset == head - 1)).nonzero(as_tuple=True)
        logits = heads(hidden[row, column - head], only=head)  # of no row, too: sharded weights are gathered by all
        if len(row):
            drawn = logits.float().softmax(-1).multinomial(1)[:, 0]
            inputs[row, column] = torch.where(drawn == eos, speech_ids[row, column], drawn)
    return inputs


@torch.no_grad()
def hear_itself(decoder: Any, text_ids: Tensor, text_lengths: Tensor, inputs: Tensor, speech_lengths: Tensor,
                prompt_lengths: Tensor, share: float) -> Tensor:
    """`with_own_tokens` of a decoder of any kind, after a pass over inputs [B, S]; arguments as its `forward` has."""
    hidden = decoder.speech_hidden(text_ids, text_lengths, inputs, speech_lengths, prompt_lengths)
    return with_own_tokens(decoder.heads, hidden, inputs, speech_lengths, prompt_lengths, decoder.config.eos, share)
