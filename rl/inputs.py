"""What stage two loads: prompts of a prepared corpus that fit the decoder, and the vocoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcar.model.car import CARDecoder
from dcar.prepare.prepared import prepared_info
from dcar.prompts.items import PromptItem
from dcar.prompts.load import corpus_recordings, load_prompts
from dcar.vocoder.base import PromptAudio, Vocoder, check_rates
from dcar.vocoder.load import hears_prompts
from dcar.vocoder.load import load_vocoder as load_any_vocoder

__all__ = ["load_prompts", "load_vocoder"]


def load_vocoder(name: str, base: CARDecoder, data: str, items: Sequence[PromptItem],
                 device: str | torch.device = "cpu") -> Vocoder:
    """The shipped vocoder ("starter"), one from a folder, or another project's (`dcar.vocoder.load`).

    data: the prepared corpus of `items`, whose prompts' recordings a vocoder may have to hear. CheckpointError if it
    speaks tokens of another tokenizer than the decoder's, or at another rate than the corpus has.
    """
    prompts = PromptAudio.of_items(items, corpus_recordings(data)) if hears_prompts(name) else None
    vocoder = load_any_vocoder(name, str(device), prompts)
    vocoder.check_tokenizer(base.config.tokenizer)
    made_by = prepared_info(data)["tokenizer"]
    check_rates(vocoder, made_by["rate_hz"], made_by["name"])
    return vocoder
