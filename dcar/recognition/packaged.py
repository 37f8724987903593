"""Recognisers whose weights come in Python packages: moonshine (the evaluation ASR) and whisper-base.

Whisper's encoder makes the speech tokens, so Whisper alone never evaluates them.
"""

from __future__ import annotations

import math

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.recognition.base import to_recognizer_rate
from dcar.sources.packages import moonshine_files, whisper_base_dir


class MoonshineRecognizer:
    """moonshine tiny-en (MIT) on ONNX Runtime, greedy, one waveform at a time.

    The number of text tokens is capped by duration (6.5 per second + 4): on noise the model would go on inventing.
    """

    name = "moonshine-tiny-en-0.1.0"
    tokens_per_second = 6.5
    _start, _end = 1, 2

    def __init__(self, threads: int = 1) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        files = moonshine_files()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self._encoder = onnxruntime.InferenceSession(str(files.encoder), options, providers=providers)
        self._decoder = onnxruntime.InferenceSession(str(files.decoder), options, providers=providers)
        self._tokenizer = Tokenizer.from_file(str(files.tokenizer))
        self._encoder_masked = any(i.name == "attention_mask" for i in self._encoder.get_inputs())
        inputs = self._decoder.get_inputs()
        self._decoder_masked = any(i.name == "encoder_attention_mask" for i in inputs)
        # [1, heads, length, head size]; the heads and sizes are fixed in the graph.
        self._empty_past = {
            i.name: np.zeros((1, int(i.shape[1]), 0, int(i.shape[3])), np.float32)
            for i in inputs
            if i.name.startswith("past_key_values")
        }
        self._present = [o.name.replace("present", "past_key_values") for o in self._decoder.get_outputs()[1:]]

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        return [self._transcribe(to_recognizer_rate(wave, sample_rate)) for wave in waves]

    def _transcribe(self, wave: np.ndarray) -> str:
        mask = np.ones((1, len(wave)), np.int64)
        feed: dict[str, np.ndarray] = {"input_values": wave[None]}
        if self._encoder_masked:
            feed["attention_mask"] = mask
        fixed: dict[str, np.ndarray] = {"encoder_hidden_states": self._encoder.run(None, feed)[0]}
        if self._decoder_masked:
            fixed["encoder_attention_mask"] = mask
        past = dict(self._empty_past)
        tokens, last = [], self._start
        cap = max(8, int(len(wave) / ENCODER_SAMPLE_RATE * self.tokens_per_second) + 4)
        for step in range(cap):
            step_feed = {"input_ids": np.array([[last]], np.int64), "use_cache_branch": np.array([step > 0])}
            logits, *present = self._decoder.run(None, step_feed | fixed | past)
            last = int(logits[0, -1].argmax())
            if last == self._end:
                break
            tokens.append(last)
            for name, value in zip(self._present, present, strict=True):
                if step == 0 or ".decoder." in name:  # cross-attention keys are computed once
                    past[name] = value
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()


class WhisperRecognizer:
    """whisper-base (MIT) through faster-whisper: int8, beam 1, temperature 0, no timestamps, no history."""

    name = "whisper-base-int8"
    tokens_per_second = 8

    def __init__(self, threads: int = 1) -> None:
        from faster_whisper import WhisperModel

        self._model = WhisperModel(str(whisper_base_dir()), device="cpu", compute_type="int8", cpu_threads=threads)

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`. Costs the same for every waveform up to 30 s."""
        return [self._transcribe(to_recognizer_rate(wave, sample_rate)) for wave in waves]

    def _transcribe(self, wave: np.ndarray) -> str:
        cap = 8 + math.ceil(min(len(wave) / ENCODER_SAMPLE_RATE, 30.0) * self.tokens_per_second)
        segments, _ = self._model.transcribe(wave, language="en", beam_size=1, temperature=0.0,
                                             condition_on_previous_text=False, without_timestamps=True,
                                             max_new_tokens=min(cap, 220))
        return " ".join(segment.text.strip() for segment in segments)
