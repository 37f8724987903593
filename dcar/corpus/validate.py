"""Validation: every recording decoded, every text phonemised, every bad row reported with file and line."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.corpus.rows import Problem, Utterance
from dcar.errors import AudioError, DataError, TextError
from dcar.text.phonemes import text_to_ids

logger = logging.getLogger(__name__)

MIN_PROMPT_SECONDS = 1.0


def validate_corpus(utterances: list[Utterance], min_seconds: float, max_seconds: float, *, num_workers: int = 1,
                    progress: bool = False) -> list[Problem]:
    """Every bad row in corpus order: repeated id, text that cannot be spoken, audio that is missing, unreadable, not
    finite or silent, duration outside min_seconds…max_seconds, a prompt that is unreadable or shorter than 1 s.

    One row may have several problems. All audio is decoded, `num_workers` files at a time. Recordings of fewer samples
    a second than speech encoders read are no problem, but a warning says how many there are.
    """
    if not 0 <= min_seconds < max_seconds:
        raise DataError(f"durations from {min_seconds} to {max_seconds} s: need 0 <= min_seconds < max_seconds")
    found: list[list[Problem]] = [[] for _ in utterances]
    first: dict[str, str] = {}
    for problems, u in zip(found, utterances, strict=True):
        if u.id in first:
            problems.append(Problem(u.id, u.source, f"id {u.id!r} was used before, at {first[u.id]}; make ids unique"))
        else:
            first[u.id] = u.source
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        def look(u: Utterance) -> tuple[list[Problem], int | None]:
            problems, decoded, _ = examine(u, min_seconds, max_seconds)
            return problems, decoded[1] if decoded else None  # of the audio its rate alone, or all would be in memory

        looked = tqdm(pool.map(look, utterances), "validate", len(utterances), unit="utt", disable=not progress)
        low = []
        for problems, (more, rate) in zip(found, looked, strict=True):
            problems += more
            if rate is not None and rate < ENCODER_SAMPLE_RATE:
                low.append(rate)
    if low:
        logger.warning("%d of %d recordings have fewer than %d samples a second (the lowest %d): what speech has above "
                       "half of that is missing, and their tokens may lose words; `dcar analyse what=vocoder` says how "
                       "many", len(low), len(utterances), ENCODER_SAMPLE_RATE, min(low))
    return [p for problems in found for p in problems]


Decoded = tuple[np.ndarray, int]


def examine(u: Utterance, min_seconds: float,
            max_seconds: float) -> tuple[list[Problem], Decoded | None, Decoded | None]:
    """Problems of an utterance, and its audio and its prompt's as decoded (waveform, rate), None if there is none."""
    problems = []
    decoded = prompt = None

    def report(message: str) -> None:
        problems.append(Problem(u.id, u.source, message))

    for label, text in (("text", u.text), ("prompt_text", u.prompt_text)):
        if text is not None:
            try:
                text_to_ids(text)
            except TextError as error:
                hint = "" if text.strip() else ", or have recordings heard: transcribe=whisper-base"
                report(f"utterance {u.id}: {label}: {error}{hint}")
    try:
        decoded = u.load()
        seconds = len(decoded[0]) / decoded[1]
        if not min_seconds <= seconds <= max_seconds:
            report(f"utterance {u.id}: {seconds:.2f} s, outside {min_seconds:g}…{max_seconds:g} s; cut or remove it")
        elif u.duration is not None and abs(seconds - u.duration) > 0.05 + 0.01 * seconds:
            report(f"utterance {u.id}: {seconds:.2f} s, but the corpus says {u.duration:.2f} s; is the audio cut?")
        if u.sample_rate is not None and decoded[1] != u.sample_rate:
            report(f"utterance {u.id}: the file has {decoded[1]} Hz, the manifest says {u.sample_rate} Hz; make the "
                   "manifest again from these files, or point audio_root to its own")  # fmt: skip
    except AudioError as error:
        report(str(error))
    try:
        prompt = u.load_prompt()
        if prompt is not None and len(prompt[0]) / prompt[1] < MIN_PROMPT_SECONDS:
            report(f"utterance {u.id}: the prompt {u.prompt_audio} is {len(prompt[0]) / prompt[1]:.2f} s, at least "
                   f"{MIN_PROMPT_SECONDS:g} s are needed")  # fmt: skip
    except AudioError as error:
        report(str(error))
    return problems, decoded, prompt
