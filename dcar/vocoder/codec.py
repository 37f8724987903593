"""Codecs that turn their own tokens into sound: X-codec2, SpeechTokenizer's first layer.

Both carry the voice in their tokens (SpeechTokenizer's first layer hardly: it sounds like one voice), so the
speaker features are not used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dcar.sources.hub import from_hub
from dcar.tokens.codec import load_speechtokenizer
from dcar.vocoder.base import CodecVocoder
from heads.checkpoint import tensors_checksum


class XCodec2Vocoder(CodecVocoder):
    """Decoder of X-codec2 (LLaSA's codes), through transformers."""

    name, tokenizer_names = "xcodec2", ("xcodec2",)

    def __init__(self, source: str | Path, device: str = "cpu") -> None:
        from transformers import Xcodec2Model

        model: Any = from_hub(Xcodec2Model.from_pretrained, source, "an X-codec2 model")
        self.model, self.device = model.to(device).eval(), device
        self.sample_rate = int(model.config.sampling_rate)
        self.token_rate = self.sample_rate // int(model.config.hop_length)
        self.vocab_size = int(np.prod(model.config.quantization_levels))
        self.tokenizer_checksum = tensors_checksum(self.model.state_dict())

    def speak(self, tokens: Any, speaker: np.ndarray) -> Any:
        return self.model.decode(audio_codes=tokens[None, None].to(self.device)).audio_values


class SpeechTokenizerVocoder(CodecVocoder):
    """Decoder of SpeechTokenizer from its first layer alone: words in one neutral voice."""

    name, tokenizer_names = "speechtokenizer", ("speechtokenizer",)

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        model, config = load_speechtokenizer(folder)
        self.model, self.device = model.to(device).eval(), device
        self.sample_rate = int(config["sample_rate"])
        self.token_rate = self.sample_rate // int(np.prod(config["strides"]))
        self.vocab_size = int(config["codebook_size"])
        self.tokenizer_checksum = tensors_checksum(self.model.state_dict())

    def speak(self, tokens: Any, speaker: np.ndarray) -> Any:
        return self.model.decode(tokens[None, None].to(self.device))
