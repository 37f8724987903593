"""What stage two loads: prompts of a prepared corpus that fit the decoder, and the vocoder."""

from __future__ import annotations

import torch

from dcar.model import CARDecoder
from dcar.prompts import load_prompts
from dcar.shipped import resolve
from dcar.vocoder import TokenVocoder

__all__ = ["load_prompts", "load_vocoder"]


def load_vocoder(name: str, base: CARDecoder, device: str | torch.device = "cpu") -> TokenVocoder:
    """'starter' (ships with the project) or a directory; refused if it speaks another tokenizer than the decoder's."""
    vocoder = TokenVocoder.from_pretrained(resolve(name, "vocoder"), device)
    vocoder.check_tokenizer(base.config.tokenizer)
    return vocoder
