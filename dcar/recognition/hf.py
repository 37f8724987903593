"""Recognisers of `transformers`: Whisper, and wav2vec 2.0 or HuBERT with a CTC head; from a folder or a hub name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.recognition.base import to_recognizer_rate
from dcar.recognition.ctc import CTCRecognizer, spelled
from dcar.sources.hub import from_hub

if TYPE_CHECKING:
    from torch import Tensor


class WhisperHFRecognizer:
    """Whisper, greedy, English, without timestamps, one waveform at a time; audio over 30 s is cut every 30 s.

    The number of text tokens is capped by duration (8 per second + 8): on noise the model would go on inventing.
    """

    tokens_per_second = 8
    window_seconds = 30

    def __init__(self, source: str | Path, device: str = "cpu") -> None:
        import torch
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        self.name, self.device = f"whisper-hf:{Path(str(source)).name}", device
        self._processor: Any = from_hub(WhisperProcessor.from_pretrained, source, "a Whisper processor")
        dtype = torch.float32 if device == "cpu" else torch.float16
        model: Any = from_hub(WhisperForConditionalGeneration.from_pretrained, source, "a Whisper model", dtype=dtype)
        self._model = model.to(device).eval()

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        return [self._transcribe(to_recognizer_rate(wave, sample_rate)) for wave in waves]

    def _transcribe(self, wave: np.ndarray) -> str:
        size = self.window_seconds * ENCODER_SAMPLE_RATE
        texts = [self._window(wave[start : start + size]) for start in range(0, len(wave), size)]
        return " ".join(text for text in texts if text)

    def _window(self, wave: np.ndarray) -> str:
        import torch

        features = self._processor(wave, sampling_rate=ENCODER_SAMPLE_RATE, return_tensors="pt").input_features
        cap = 8 + math.ceil(len(wave) / ENCODER_SAMPLE_RATE * self.tokens_per_second)
        options: dict[str, Any] = {}
        if getattr(self._model.generation_config, "is_multilingual", False):
            options = {"language": "en", "task": "transcribe"}
        limit = self._model.config.max_target_positions - 8  # the start tokens count too
        with torch.inference_mode():
            ids = self._model.generate(features.to(self.device, self._model.dtype), do_sample=False, num_beams=1,
                                       max_new_tokens=min(cap, limit), **options)
        return str(self._processor.batch_decode(ids, skip_special_tokens=True)[0]).strip()


class CTCHFRecognizer(CTCRecognizer):
    """A CTC model of transformers (`HubertForCTC`, `Wav2Vec2ForCTC`, `WavLMForCTC`), one waveform at a time."""

    def __init__(self, source: str | Path, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCTC, Wav2Vec2Processor

        self.name, self.device = f"ctc:{Path(str(source)).name}", device
        self._processor: Any = from_hub(Wav2Vec2Processor.from_pretrained, source, "a CTC processor")
        model: Any = from_hub(AutoModelForCTC.from_pretrained, source, "a CTC model", dtype=torch.float32)
        self._model = model.to(device).eval()
        tokenizer = self._processor.tokenizer
        self.blank = int(tokenizer.pad_token_id)  # the blank is the padding symbol
        self._marks = set(tokenizer.all_special_ids) - {tokenizer.word_delimiter_token_id}
        symbols = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self._vocabulary = [" " if s == tokenizer.word_delimiter_token else str(s) for s in symbols]
        self._capitals = "A" in symbols and "a" not in symbols

    def _log_probs(self, waves: list[np.ndarray], sample_rate: int) -> Iterator[tuple[int, Tensor]]:
        import torch

        for index, wave in enumerate(waves):
            wave = to_recognizer_rate(wave, sample_rate)
            inputs = self._processor(wave, sampling_rate=ENCODER_SAMPLE_RATE, return_tensors="pt").input_values
            with torch.inference_mode():
                yield index, self._model(inputs.to(self.device)).logits[0].float().log_softmax(-1).cpu()

    def spell(self, symbols: list[int]) -> str:
        return " ".join("".join(self._vocabulary[s] for s in symbols if s not in self._marks).split())

    def symbols(self, text: str) -> list[int]:
        return spelled(text.upper() if self._capitals else text, self._vocabulary, self.name)
