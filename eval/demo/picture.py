"""Chunks under the spectrogram and phonemes: where each pass of the decoder ended, and how many tokens it gave."""

from __future__ import annotations

import numpy as np

from dcar.speak.speaker import Spoken
from dcar.tokens.alignment import PhonemeAligner
from eval.report.spectrum import spectrum_picture


def chunk_spans(spoken: Spoken) -> list[tuple[float, float, int]]:
    """Start and end in seconds, and tokens, of every chunk in the wave; the pauses between phrases have none."""
    spans, at = [], 0.0
    for chunks, pause in zip(spoken.chunks, spoken.pauses, strict=True):
        for tokens in chunks:
            spans.append((at, at + tokens / spoken.token_rate, tokens))
            at = spans[-1][1]
        at += pause
    return spans


def phoneme_spans(spoken: Spoken, aligner: PhonemeAligner | None) -> list[tuple[float, float, str]]:
    """Start and end in seconds of every phoneme; none without an aligner."""
    spans, at = [], 0.0
    for phrase, result, pause in zip(spoken.phrases, spoken.results, spoken.pauses, strict=True):
        for span in aligner.align(result.tokens, phrase) if aligner else ():
            spans.append((at + span.start / spoken.token_rate, at + span.end / spoken.token_rate, span.phoneme))
        at += len(result.tokens) / spoken.token_rate + pause
    return spans


def picture(spoken: Spoken, aligner: PhonemeAligner | None = None) -> np.ndarray:
    """[height, width, 3] uint8: spectrogram, phonemes where an aligner can tell them, and a block for every chunk."""
    return spectrum_picture(spoken.wave, spoken.rate, chunk_spans(spoken), phoneme_spans(spoken, aligner),
                            width=7.5)
