"""Recognisers trained by other projects.

Weights in Python packages: moonshine (the evaluation ASR) and whisper-base. Whisper's encoder makes
the speech tokens, so Whisper alone never evaluates them. Models of `transformers`, from a folder or
a hub name: Whisper, and wav2vec 2.0 or HuBERT with a CTC head.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.errors import ConfigError
from dcar.recognition.base import InLanguage, batches, in_windows, to_recognizer_rate
from dcar.recognition.ctc import CTCRecognizer, spelled
from dcar.sources.hub import from_hub, identified
from dcar.sources.packages import moonshine_files, whisper_base_dir
from dcar.text.languages import language_of

CPU_WINDOWS = 4
GPU_WINDOWS = 16
"""Windows of 30 s that Whisper transcribes at once; keys and values of whisper-large-v3 take 245
MB per window in float16."""


class _OneByOne(ABC):
    """Base of recognisers that transcribe one waveform at a time on the CPU, with a runtime
    other than PyTorch."""

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        return in_windows(
            lambda parts: [self._transcribe(part) for part in parts], waves, sample_rate
        )

    @abstractmethod
    def _transcribe(self, wave: np.ndarray) -> str:
        """Return the text of a waveform [samples] at 16 kHz."""


def _most_tokens(wave: np.ndarray) -> int:
    """Return the token limit of Whisper's text for a waveform, 8 per second plus 8: on noise the
    model would otherwise invent text without end."""
    return 8 + math.ceil(len(wave) / ENCODER_SAMPLE_RATE * 8)


class MoonshineRecognizer(_OneByOne, InLanguage):
    """moonshine tiny-en (MIT) on ONNX Runtime, greedy, one waveform at a time.

    The number of text tokens is capped by duration (6.5 per second + 4), because on noise the model
    would invent text without end. The waveform is padded with silence on both sides: if speech
    begins at once, the model sometimes writes "1.0000…".
    """

    tokens_per_second = 6.5
    silence_seconds = 0.3
    name = f"moonshine-tiny-en-0.1.0-silence-{silence_seconds}"
    _start, _end = 1, 2

    def __init__(self) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        files = moonshine_files()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self._encoder = onnxruntime.InferenceSession(
            str(files.encoder), options, providers=providers
        )
        self._decoder = onnxruntime.InferenceSession(
            str(files.decoder), options, providers=providers
        )
        self._tokenizer = Tokenizer.from_file(str(files.tokenizer))
        # [1, attention heads, length, head size]; heads and sizes are fixed in the graph
        self._empty_past = {
            i.name: np.zeros((1, int(i.shape[1]), 0, int(i.shape[3])), np.float32)
            for i in self._decoder.get_inputs()
            if i.name.startswith("past_key_values")
        }
        self._present = [
            o.name.replace("present", "past_key_values") for o in self._decoder.get_outputs()[1:]
        ]

    def check_language(self, language: str) -> None:
        """Raise ConfigError, because it transcribes one language."""
        raise ConfigError(
            f"recogniser {self.name} transcribes {language_of(self.language).name}, not "
            f"{language_of(language).name}; choose whisper-base, or whisper:…, nemo:… or ctc:… "
            "with a model for it"
        )

    def _transcribe(self, wave: np.ndarray) -> str:
        cap = max(8, int(len(wave) / ENCODER_SAMPLE_RATE * self.tokens_per_second) + 4)
        wave = np.pad(wave, int(self.silence_seconds * ENCODER_SAMPLE_RATE))
        mask = np.ones((1, len(wave)), np.int64)
        states = self._encoder.run(None, {"input_values": wave[None], "attention_mask": mask})[0]
        fixed = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        past = dict(self._empty_past)
        tokens, last = [], self._start
        for step in range(cap):
            step_feed = {
                "input_ids": np.array([[last]], np.int64),
                "use_cache_branch": np.array([step > 0]),
            }
            logits, *present = self._decoder.run(None, step_feed | fixed | past)
            last = int(logits[0, -1].argmax())
            if last == self._end:
                break
            tokens.append(last)
            for name, value in zip(self._present, present, strict=True):
                if step == 0 or ".decoder." in name:  # cross-attention keys are computed once
                    past[name] = value
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()


class _Whisper(InLanguage):
    """Base of both Whispers, which receive the language of the speech."""

    languages: frozenset[str]  # codes that the model knows; an English model knows none

    def check_language(self, language: str) -> None:
        """Raise ConfigError for a language that the model does not know."""
        if language not in self.languages:
            which = "is an English model" if not self.languages else "does not know it"
            raise ConfigError(
                f"recogniser {self.name}: cannot transcribe {language_of(language).name}, it "
                f"{which}; choose whisper-base, whisper:openai/whisper-large-v3, nemo:… "
                "or ctc:…"
            )


class WhisperRecognizer(_Whisper, _OneByOne):
    """whisper-base (MIT), multilingual, through faster-whisper: int8, beam 1, temperature 0, no
    timestamps, no history. It costs the same for every waveform up to 30 s."""

    name = "whisper-base-int8"

    def __init__(self) -> None:
        from faster_whisper import WhisperModel

        self._model = WhisperModel(
            str(whisper_base_dir()), device="cpu", compute_type="int8", cpu_threads=1
        )
        self.languages = frozenset(self._model.supported_languages)

    def _transcribe(self, wave: np.ndarray) -> str:
        segments, _ = self._model.transcribe(
            wave,
            language=self.language,
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=True,
            max_new_tokens=min(_most_tokens(wave[: 30 * ENCODER_SAMPLE_RATE]), 220),
        )
        return " ".join(segment.text.strip() for segment in segments)


class WhisperHFRecognizer(_Whisper):
    """Whisper in transformers: greedy, without timestamps, in batches of windows.

    The number of text tokens is capped by duration (8 per second + 8), because on noise the model
    would invent text without end. float32 on a CPU, float16 on a GPU.
    """

    def __init__(self, source: str | Path, device: str = "cpu") -> None:
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        self.device = torch.device(device)
        self._processor: Any = from_hub(
            WhisperProcessor.from_pretrained, source, "a Whisper processor"
        )
        on_cpu = self.device.type == "cpu"
        dtype = torch.float32 if on_cpu else torch.float16
        self._windows = CPU_WINDOWS if on_cpu else GPU_WINDOWS
        model: Any = from_hub(
            WhisperForConditionalGeneration.from_pretrained, source, "a Whisper model", dtype=dtype
        )
        self.name = identified(f"whisper-hf:{Path(source).resolve().name}", source)
        self._model = model.to(device).eval()
        known = getattr(model.generation_config, "lang_to_id", None) or {}
        self.languages = frozenset(code.strip("<|>") for code in known)

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        return in_windows(self._in_batches, waves, sample_rate)

    def _in_batches(self, windows: list[np.ndarray]) -> list[str]:
        """Return the texts of windows at 16 kHz of at most 30 s."""
        texts = [""] * len(windows)
        # windows of similar length have texts of similar length, so few rows wait for a longer one
        order = sorted(range(len(windows)), key=lambda i: len(windows[i]))
        for first in range(0, len(order), self._windows):
            rows = order[first : first + self._windows]
            for row, text in zip(
                rows, self._transcribe_windows([windows[i] for i in rows]), strict=True
            ):
                texts[row] = text
        return texts

    def _transcribe_windows(self, windows: list[np.ndarray]) -> list[str]:
        """Return the texts of windows of at most 30 s, transcribed in one batch."""
        features = self._processor.feature_extractor(
            windows, sampling_rate=ENCODER_SAMPLE_RATE, return_tensors="pt", device=str(self.device)
        ).input_features
        options: dict[str, Any] = {}
        if getattr(self._model.generation_config, "is_multilingual", False):
            options = {"language": self.language, "task": "transcribe"}
        limit = (
            self._model.config.max_target_positions - 8
        )  # the start tokens count towards the limit
        most = [min(_most_tokens(window), limit) for window in windows]
        with torch.inference_mode():
            ids = self._model.generate(
                features.to(self.device, self._model.dtype),
                do_sample=False,
                num_beams=1,
                max_new_tokens=max(most),
                **options,
            )
        cut = [row[:n] for row, n in zip(ids.tolist(), most, strict=True)]
        return [
            text.strip() for text in self._processor.batch_decode(cut, skip_special_tokens=True)
        ]


class CTCHFRecognizer(CTCRecognizer):
    """CTC model of transformers (`HubertForCTC`, `Wav2Vec2ForCTC`, `WavLMForCTC`), float32.

    It reads one waveform at a time on a CPU, batches on a GPU. Models that normalise each frame by
    itself (`feat_extract_norm` "layer") read padded batches with a mask, which changes
    log-probabilities by rounding only (1e-4). Those that normalise over time ("group") read only
    waveforms of equal length together, because padding would change every frame.
    """

    def __init__(self, source: str | Path, device: str = "cpu") -> None:
        from transformers import AutoModelForCTC, Wav2Vec2Processor

        self.device = device
        self._processor: Any = from_hub(
            Wav2Vec2Processor.from_pretrained, source, "a CTC processor"
        )
        model: Any = from_hub(
            AutoModelForCTC.from_pretrained, source, "a CTC model", dtype=torch.float32
        )
        self.name = identified(f"ctc:{Path(source).resolve().name}", source)
        self._model = model.to(device).eval()
        self._pads = getattr(model.config, "feat_extract_norm", "group") == "layer"
        tokenizer = self._processor.tokenizer
        self.blank = int(tokenizer.pad_token_id)  # the blank is the padding symbol
        self._marks = set(tokenizer.all_special_ids) - {tokenizer.word_delimiter_token_id}
        symbols = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self._vocabulary = [" " if s == tokenizer.word_delimiter_token else str(s) for s in symbols]
        self._capitals = "A" in symbols and "a" not in symbols

    def _log_probs(self, waves: list[np.ndarray], sample_rate: int) -> Iterator[tuple[int, Tensor]]:
        ready = [to_recognizer_rate(wave, sample_rate) for wave in waves]
        for rows in batches(ready, self.device, equal=not self._pads):
            inputs = self._processor(
                [ready[i] for i in rows],
                sampling_rate=ENCODER_SAMPLE_RATE,
                padding=True,
                return_attention_mask=self._pads,
                return_tensors="pt",
            ).to(self.device)
            with torch.inference_mode():
                log_probs = self._model(**inputs).logits.float().log_softmax(-1).cpu()
            lengths = torch.tensor([len(ready[i]) for i in rows])
            frames = self._model._get_feat_extract_output_lengths(lengths).tolist()
            for row, i in enumerate(rows):
                yield i, log_probs[row, : frames[row]]

    @property
    def alphabet(self) -> Sequence[str]:
        return [c.lower() for c in self._vocabulary] if self._capitals else self._vocabulary

    def spell(self, symbols: list[int]) -> str:
        return " ".join(
            "".join(self._vocabulary[s] for s in symbols if s not in self._marks).split()
        )

    def symbols(self, text: str) -> list[int]:
        return spelled(text.upper() if self._capitals else text, self._vocabulary, self.name)
