"""What stage two loads: prompts of a prepared corpus that fit the decoder, and the vocoder."""

from __future__ import annotations

import torch

from dcar.model import CARDecoder
from dcar.prompts import load_prompts
from dcar.vocoders import Vocoder
from dcar.vocoders import load_vocoder as load_any_vocoder

__all__ = ["load_prompts", "load_vocoder"]


def load_vocoder(name: str, base: CARDecoder, device: str | torch.device = "cpu") -> Vocoder:
    """The shipped vocoder ("starter"), one from a folder, or a codec (`dcar.vocoders`); refused if it speaks tokens of
    another tokenizer than the decoder's."""
    vocoder = load_any_vocoder(name, str(device))
    vocoder.check_tokenizer(base.config.tokenizer)
    return vocoder
