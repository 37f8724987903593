"""Interface of recognisers, and functions that they share.

All take float32 mono waveforms at any sample rate and return plain text, "" for silence. A waveform
that is empty or not finite raises AudioError.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from copy import copy
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch

from dcar.audio import ENCODER_SAMPLE_RATE, SILENCE_PEAK, resample
from dcar.errors import RewardError
from dcar.text.languages import DEFAULT
from dcar.tokens.base import by_length, check_waveform
from dcar.voices.speech import windows

T = TypeVar("T")

SHORTEST = ENCODER_SAMPLE_RATE // 10
"""Samples that a recogniser needs at 16 kHz, one analysis window; shorter waveforms are padded
with silence."""

SOUNDS = re.compile(r"\[[^\]]*\]|\([^)]*\)|[♪♫]+")
"""Sounds that Whisper describes instead of words: [Music], (upbeat music), [BLANK_AUDIO]. Nobody
says these; Whisper's own normaliser removes them."""

WINDOW_SECONDS = 30.0
"""Longest window that is transcribed at once: recognisers are trained on recordings of up to about
this length, and Whisper reads no more."""

GPU_BATCH_SECONDS = 300.0
"""Padded audio in one batch on a GPU, in seconds: a calculated 6 GB for the convolutions of
HuBERT-Large."""


@runtime_checkable
class Recognizer(Protocol):
    """Model that transcribes speech. `name` identifies its weights too: stored transcripts are
    found again by it. A recogniser of several languages, or of one that must be checked, also has
    `in_language(code)`, which returns a recogniser for one."""

    name: str

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """Return one transcript per float32 mono waveform [samples]; it may be "". Raises
        AudioError for an empty waveform or one with NaN."""
        ...


def in_language(recognizer: Any, language: str) -> Any:
    """Return a recogniser for speech in a language (code of ISO 639): that of its method
    `in_language`, or itself without one. Raises ConfigError if it does not transcribe the
    language."""
    chosen = getattr(recognizer, "in_language", None)
    return recognizer if chosen is None else chosen(language)


def by_language(
    recognizer: Any, languages: Sequence[str], ask: Callable[[Any, list[int]], Sequence[T]]
) -> list[T]:
    """Return one answer per row of several languages, in their order. ask: function from the
    recogniser for a language and the indices of its rows to their answers."""
    answers: dict[int, T] = {}
    for language in dict.fromkeys(languages):
        rows = [i for i, own in enumerate(languages) if own == language]
        of_rows = ask(in_language(recognizer, language), rows)
        if len(of_rows) != len(rows):
            raise ValueError(f"{len(of_rows)} results for {len(rows)} inputs")
        answers |= zip(rows, of_rows, strict=True)
    return [answers[i] for i in range(len(languages))]


def unknown_characters(recognizer: Any, texts: Sequence[tuple[str, str]]) -> str:
    """Return a sentence on the characters that a recogniser does not know, which its transcripts
    never have; "" if it knows all, or has no alphabet. texts: the language of each, and its words.
    Raises ConfigError for a language that it does not transcribe."""

    def ask(own: Any, rows: list[int]) -> list[set[str]]:
        return [own.unknown(texts[i][1]) if hasattr(own, "unknown") else set() for i in rows]

    by_text = [*filter(None, by_language(recognizer, [language for language, _ in texts], ask))]
    if not by_text:
        return ""
    counts = Counter(c for unknown in by_text for c in unknown)
    return (
        f"recogniser {recognizer.name} does not know {len(counts)} characters of {len(by_text)} of "
        f"{len(texts)} texts ({' '.join(c for c, _ in counts.most_common(20))})"
    )


class InLanguage:
    """Base of recognisers that transcribe speech in one language at a time."""

    name: str
    language = DEFAULT

    def check_language(self, language: str) -> None:
        """Raise ConfigError for another language that this recogniser does not transcribe."""

    def in_language(self, language: str) -> Self:
        """Return this recogniser for speech in a language. Raises ConfigError if it does not
        transcribe it."""
        if language == self.language:
            return self
        self.check_language(language)
        other = copy(self)
        other.language = language
        return other


def to_recognizer_rate(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return a waveform [samples] float32 at 16 kHz, at least one analysis window long. Raises
    AudioError for an empty, non-finite or non-mono waveform."""
    wave = resample(check_waveform(wave, "recognizer"), sample_rate, ENCODER_SAMPLE_RATE)
    return np.pad(wave, (0, SHORTEST - len(wave))) if len(wave) < SHORTEST else wave


def in_windows(
    transcribe: Callable[[list[np.ndarray]], list[str]],
    waves: Sequence[np.ndarray],
    sample_rate: int,
    seconds: float = WINDOW_SECONDS,
) -> list[str]:
    """Return the transcripts of waveforms of any length, without descriptions of sounds. Those
    longer than `seconds` are transcribed in windows (`dcar.voices.speech.windows`); digital silence
    is not transcribed.

    transcribe: function from waveforms at 16 kHz to their transcripts. Raises AudioError for an
    empty, non-finite or non-mono waveform.
    """
    rate = ENCODER_SAMPLE_RATE
    ready = [to_recognizer_rate(wave, sample_rate) for wave in waves]
    parts = [
        [
            to_recognizer_rate(part, rate)
            for part in windows(wave, rate, seconds)
            if np.abs(part).max() >= SILENCE_PEAK
        ]
        for wave in ready
    ]
    texts = iter(transcribe([part for of_wave in parts for part in of_wave]))
    words = (" ".join(next(texts) for _ in of_wave) for of_wave in parts)
    return [" ".join(SOUNDS.sub(" ", text).split()) for text in words]


def transcripts(
    recognizer: Recognizer,
    waves: Sequence[np.ndarray],
    sample_rate: int,
    languages: Sequence[str] = (),
) -> list[str]:
    """Return the transcript of every waveform, "" for one without samples.

    languages: of the waveforms, the default one if not given. See `Recognizer.transcribe`.
    """
    filled = [i for i, wave in enumerate(waves) if len(wave)]
    spoken = by_language(
        recognizer,
        [languages[i] if languages else DEFAULT for i in filled],
        lambda own, rows: own.transcribe([waves[filled[i]] for i in rows], sample_rate),
    )
    texts = [""] * len(waves)
    for i, text in zip(filled, spoken, strict=True):
        texts[i] = text
    return texts


def batches(
    waves: Sequence[np.ndarray],
    device: str | torch.device,
    cpu_seconds: float = 0.0,
    equal: bool = False,
) -> Iterator[list[int]]:
    """Yield indices of waveforms at 16 kHz in order of length, in batches for a device.

    A batch contains at most GPU_BATCH_SECONDS of padded audio, or `cpu_seconds` on a CPU, where 0
    means one waveform at a time. equal: see `by_length`.
    """
    seconds = cpu_seconds if torch.device(device).type == "cpu" else GPU_BATCH_SECONDS
    return by_length([len(wave) for wave in waves], seconds * ENCODER_SAMPLE_RATE, equal)


def ctc_collapse(best: Sequence[int], dropped: Container[int]) -> list[int]:
    """Collapse the best symbols of all frames by CTC's rule: equal neighbours become one, then
    blanks and the other `dropped` symbols are removed."""
    return [s for i, s in enumerate(best) if (i == 0 or s != best[i - 1]) and s not in dropped]


def check_reward_recognizer(recognizer: str, wer: float, limit: float) -> None:
    """Raise RewardError if a recogniser transcribes the resynthesised recordings with a corpus
    WER above `limit`: its transcripts of rollouts would be noise. NaN, if nothing was
    transcribed, passes; failed rewards are counted elsewhere."""
    if not wer > limit:
        return
    raise RewardError(
        f"recogniser {recognizer} makes {100 * wer:.0f} % errors on the corpus' own "
        f"recordings, resynthesised from their tokens, more than max_reward_wer={limit:g}: as a "
        "reward it would be noise. Choose one of: (1) another recogniser: recognizer=moonshine or "
        "whisper-base (if it is neither the judge nor the tokenizer) with "
        "reward_funcs=[wer,range_penalty] or [wer,cer,range_penalty], because these return "
        "transcripts but no likelihoods; a CTC model, recognizer=nemo:<path> or ctc:<path>, "
        "supports log_likelihood too; (2) a recogniser trained on this speech: dcar prepare "
        "mode=resynthesize, then python -m launch.starter.train_recognizer; (3) a better vocoder "
        "or tokenizer, if these are at fault (see dcar analyse what=vocoder); (4) in DCPO, the "
        "reward of tokens: reward_funcs=[token_likelihood], as in "
        f"launch/recipes/dcpo_starter.yaml; (5) max_reward_wer={math.ceil(10 * wer) / 10:g}, to "
        "use it nevertheless"
    )
