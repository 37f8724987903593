"""Recognisers in stage two: what they hear of rollouts and of the recordings, and whether they hear well enough.

A recogniser is asked once about a rollout, however many rewards need the answer. The recordings, resynthesised from
their own tokens, give WER_gt of the paper's reward; a recogniser with too many errors on them is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from tqdm import tqdm

from dcar.decoding import DecodeResult
from dcar.errors import ConfigError, RewardError
from dcar.prompts.items import PromptItem
from dcar.recognition.base import Recognizer
from dcar.recognition.ctc import Alignment
from dcar.text.wer import NORMALIZER, WordErrors, corpus_wer, word_errors
from dcar.tracking import write_json
from dcar.vocoder.base import Vocoder
from dcar.vocoder.voicing import isolate, voice_each
from rl.credit import Located

logger = logging.getLogger(__name__)

NAN = float("nan")


@dataclass
class RolloutRecord:
    """One rollout on its way to a reward: text -> decisions -> tokens -> waveform -> transcript."""

    item: PromptItem
    member: int  # index within the group
    forced: int  # chunk size that every decision was forced to; 0 = sampled from the policy
    result: DecodeResult
    wave: np.ndarray | None = None  # None: not synthesised yet, or the vocoder failed
    sample_rate: int = 0
    transcript: str | None = None
    errors: WordErrors | None = None
    failure: str | None = None  # first cause why a reward is missing
    alignments: dict[Any, Alignment] = field(default_factory=dict)  # of its text, by the recognisers that gave one
    located: dict[Any, Located] = field(default_factory=dict)  # by the rewards that `locate`, where they could

    @property
    def has_places(self) -> bool:
        """Whether there is speech to say where something was lost, and a recording to measure it by."""
        return bool(self.result.tokens) and len(self.item.reference_tokens) > 0


def transcripts(waves: Sequence[np.ndarray], sample_rate: int, recognizer: Recognizer) -> list[str | Exception]:
    """Its transcript; "" for a wave without samples, an exception where it failed."""
    spoken = [i for i, wave in enumerate(waves) if len(wave)]
    heard: list[str | Exception] = [""] * len(waves)
    answers = isolate(lambda rows: recognizer.transcribe([waves[i] for i in rows], sample_rate), spoken)
    for i, text in zip(spoken, answers, strict=True):
        heard[i] = text
    return heard


def synthesise(records: Sequence[RolloutRecord], vocoder: Vocoder) -> None:
    """Give every rollout its waveform; where the vocoder fails, or gives no finite numbers, the cause is noted."""
    waves = voice_each(vocoder, [r.result.tokens for r in records], [r.item.speaker_embedding for r in records])
    for record, wave in zip(records, waves, strict=True):
        record.sample_rate = vocoder.sample_rate
        if isinstance(wave, Exception):
            record.failure = record.failure or cause(wave)
        elif not np.isfinite(wave).all():
            record.failure = record.failure or "the vocoder gave samples that are not finite"
        else:
            record.wave = wave


def cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def transcribe(records: Sequence[RolloutRecord], recognizer: Recognizer) -> None:
    """Fill in transcript and word errors of the rollouts that have a waveform and were not transcribed yet."""
    ready = [r for r in records if r.wave is not None and r.transcript is None and r.failure is None]
    if not ready:
        return
    rate = max(r.sample_rate for r in ready)
    for record, text in zip(ready, transcripts([r.wave for r in ready], rate, recognizer), strict=True):  # type: ignore[misc]
        if isinstance(text, Exception):
            record.failure = record.failure or cause(text)
        else:
            record.transcript, record.errors = text, word_errors(record.item.text, text)


def align(records: Sequence[RolloutRecord], recognizer: Any) -> None:
    """Fill in alignment, transcript and word errors of the rollouts that have a waveform and were not aligned by this
    recogniser yet, from one pass of it."""
    ready = [r for r in records if r.wave is not None and r.failure is None and recognizer not in r.alignments]
    spoken = [r for r in ready if len(r.wave)]  # type: ignore[arg-type]
    for record, alignment in zip(spoken, told(spoken, recognizer.align), strict=True):
        if alignment is not None:
            record.alignments[recognizer] = alignment
    for record in ready:
        if record.failure is None and record.transcript is None:
            record.transcript = record.alignments[recognizer].heard if len(record.wave) else ""  # type: ignore[arg-type]
            record.errors = word_errors(record.item.text, record.transcript)


def told(records: Sequence[RolloutRecord], ask: Callable[..., Sequence[Any]]) -> list[Any]:
    """What a method of a recogniser says of the sound and the text of every rollout; None, and the rollout has the
    cause, where it failed."""
    answers = isolate(lambda rows: ask([r.wave for r in rows], rows[0].sample_rate, [r.item.text for r in rows]),
                      list(records))
    for record, answer in zip(records, answers, strict=True):
        if isinstance(answer, Exception):
            record.failure = record.failure or cause(answer)
    return [None if isinstance(answer, Exception) else answer for answer in answers]


def check_aligns(reward: str, recognizer: Any) -> None:
    """ConfigError where a reward is to say where it was lost, by a recogniser that does not align texts."""
    if not hasattr(recognizer, "align"):
        raise ConfigError(f"reward {reward}: recogniser {recognizer.name} does not align texts, so there is no "
                          "credit=decision by it: set credit=utterance, or use a CTC recogniser (starter, encoder:…, "
                          "nemo:… or ctc:…)")


class Unheard:
    """In place of a recogniser that nothing of a run asks, so that its packages need not be there."""

    def __init__(self, name: str):
        self.name = name

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """Nothing asks for this; a ConfigError where something does."""
        raise ConfigError(f"recogniser {self.name} was not loaded, because no reward and no evaluation asks it; give "
                          "it in Python: DCPOTrainer(recognizer=…)")


HEARD_FOR_CHECK = 50
"""Recordings at most by which a recogniser is checked whose rewards need no WER of theirs."""

HEARD_AT_ONCE = 64
"""Recordings that are voiced, heard and stored together."""


def ground_truth_errors(items: Sequence[PromptItem], vocoder: Vocoder,
                        recognizer: Recognizer) -> dict[str, list[int] | None]:
    """Word errors of every recording, resynthesised from its own tokens: id -> [S, D, I, N], None where it failed."""
    found: dict[str, list[int] | None] = {}
    for start in range(0, len(items), HEARD_AT_ONCE):
        part = items[start : start + HEARD_AT_ONCE]
        waves = voice_each(vocoder, [i.reference_tokens for i in part], [i.speaker_embedding for i in part])
        good = [j for j, wave in enumerate(waves) if not isinstance(wave, Exception)]
        texts = dict(zip(good, transcripts([waves[j] for j in good], vocoder.sample_rate, recognizer), strict=True))  # type: ignore[misc]
        for j, item in enumerate(part):
            text = texts.get(j)
            entry = None
            if isinstance(text, str):
                e = word_errors(item.text, text)
                entry = [e.substitutions, e.deletions, e.insertions, e.reference_words]
            found[item.prompt.utterance_id] = entry
    return found


def check_hears(recognizer: str, wer: float, limit: float) -> None:
    """RewardError where a recogniser transcribes the resynthesised recordings with a corpus WER above `limit`: what it
    says of rollouts would be noise. NaN, where nothing was transcribed, is left to those who count failed rewards."""
    if not wer > limit:
        return
    raise RewardError(
        f"recogniser {recognizer} makes {100 * wer:.0f} % word errors on the corpus' own speech, spoken by the vocoder "
        f"from its tokens, more than max_reward_wer={limit:g}: as a reward it would be noise. Ways out: (1) another "
        "recogniser: recognizer=moonshine or whisper-base (if it is neither the judge nor the tokenizer) with "
        "reward_funcs=[wer,range_penalty] or [wer,cer,range_penalty], because they give transcripts and no "
        "likelihoods; a CTC model, recognizer=nemo:<path> or ctc:<path>, serves log_likelihood too; (2) one trained on "
        "this speech: dcar prepare mode=resynthesize, then dcar train-recognizer kind=encoder; (3) if vocoder and "
        "tokens are at fault (dcar analyse what=vocoder tells), train those; (4) in DCPO the reward that reads tokens: "
        "reward_funcs=[token_likelihood], as in launch/recipes/dcpo_starter.yaml; (5) "
        f"max_reward_wer={math.ceil(10 * wer) / 10:g} to use it nevertheless")


def _stored_errors(path: Path) -> tuple[Any, dict[str, list[int] | None]] | None:
    """Fingerprint and errors by utterance that `GroundTruth.add` wrote; None, with a line, where they are damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        errors = stored["errors"]
        for counts in errors.values():
            if counts is not None and not (len(counts) == 4 and all(type(n) is int and n >= 0 for n in counts)
                                           and counts[3]):
                raise ValueError(f"counts {counts}")
        return stored["fingerprint"], errors
    except (OSError, ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        logger.warning("%s: damaged (%s); the recordings are heard again", path, error)
        return None


class GroundTruth:
    """WER_gt of the training utterances, computed once per recogniser and kept in a file."""

    def __init__(self, path: Path, recognizer: str, items: Sequence[PromptItem]):
        self.path, self.items = path, items
        digest = hashlib.sha256(f"{recognizer} {NORMALIZER}".encode())
        for item in items:
            digest.update(json.dumps([item.prompt.utterance_id, item.text, list(map(int, item.reference_tokens)),
                                      item.prompt_utterance_id]).encode())
        self.fingerprint = digest.hexdigest()
        self.errors: dict[str, list[int] | None] = {}
        if path.is_file():
            stored = _stored_errors(path)
            if stored is not None and stored[0] == self.fingerprint:
                self.errors = stored[1]

    def missing(self, rank: int = 0, processes: int = 1) -> list[PromptItem]:
        """This process's share of what is not in the file."""
        return [i for i in self.items if i.prompt.utterance_id not in self.errors][rank::processes]

    def add(self, errors: Mapping[str, list[int] | None], save: bool) -> None:
        self.errors.update(errors)
        if save:
            write_json(self.path, {"fingerprint": self.fingerprint, "errors": self.errors})

    def measure(self, vocoder: Vocoder, recognizer: Recognizer, rank: int = 0, processes: int = 1) -> None:
        """Hear what is missing, shared among the processes; the file grows with it."""
        todo = self.missing()  # the same in all processes
        with tqdm(desc="recordings", total=len(todo), unit="utt", disable=bool(rank) or not todo) as bar:
            while self.missing():
                part = self.missing(rank, processes)[:HEARD_AT_ONCE]
                found: dict[str, Any] = {}
                for heard in gather_object([ground_truth_errors(part, vocoder, recognizer)]):
                    found.update(heard)
                self.add(found, save=not rank)
                bar.update(len(found))

    def rates(self) -> dict[str, float]:
        return {k: sum(e[:3]) / e[3] for k, e in self.errors.items() if e is not None}

    def corpus(self) -> float:
        """Corpus WER of the resynthesised recordings."""
        score = corpus_wer([None if e is None else WordErrors(e[0], e[1], e[2], e[3]) for e in self.errors.values()])
        return score.wer if math.isfinite(score.wer) else NAN
