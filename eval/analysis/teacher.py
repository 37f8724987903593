"""Teacher forcing: hidden states of the decoder along the true tokens, the ground of every fit and analysis here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dcar.decoding.batch import pad
from dcar.errors import DataError
from dcar.model.draft import AnyDecoder
from dcar.prompts.items import PromptItem


@torch.no_grad()
def teacher_forced(model: AnyDecoder, items: Sequence[PromptItem],
                   batch_size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """For every item: hidden [n, D] of the last prompt position and all tokens, targets [n]: the tokens, then the end.

    hidden[t] predicts targets[t + k - 1] by head k. The prompts are those of decoding. DataError for an utterance
    whose tokens lie outside the codebook.
    """
    device, config = model.norm.weight.device, model.config
    bos = (config.speech_vocab_size + 1,) if config.bos else ()
    for start in range(0, len(items), batch_size):
        chosen = items[start : start + batch_size]
        for item in chosen:
            if any(not 0 <= token < config.eos for token in item.reference_tokens):
                raise DataError(f"{item.prompt.utterance_id}: a token lies outside the codebook of {config.eos}; "
                                "prepare the corpus with the decoder's tokenizer")
        text, text_lengths = pad([i.prompt.text_ids for i in chosen], device)
        speech, lengths = pad([(*i.prompt.prompt_ids, *bos, *i.reference_tokens) for i in chosen], device)
        prompt_lengths = torch.tensor([len(i.prompt.prompt_ids) + len(bos) for i in chosen], device=device)
        hidden = model.speech_hidden(text, text_lengths, speech, lengths, prompt_lengths)
        for row, item in enumerate(chosen):
            targets = torch.tensor([*item.reference_tokens, config.eos], device=device)
            yield hidden[row, int(prompt_lengths[row]) - 1 : int(lengths[row])], targets
