"""Recognisers in stage two: transcripts of rollouts and of recordings, and a check of the
recogniser's accuracy.

A recogniser transcribes each rollout once, even if several rewards need the result. The recordings,
resynthesised from their own tokens, give WER_gt of the paper's reward; a recogniser with too many
errors on them is refused.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from accelerate.utils import gather_object

from dcar.decoding import DecodeResult
from dcar.errors import ConfigError, RewardError
from dcar.progress import Progress
from dcar.prompts.items import PromptItem
from dcar.recognition.base import Recognizer, by_language, transcripts, unknown_characters
from dcar.recognition.ctc import Alignment
from dcar.text.languages import normalizers_of
from dcar.text.wer import WordErrors, corpus_wer, word_errors
from dcar.tracking import write_json
from dcar.vocoder.base import Vocoder
from dcar.vocoder.voicing import isolate, voice_each
from rl.credit import Located

logger = logging.getLogger(__name__)

NAN = float("nan")
T = TypeVar("T")


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
    failure: str | None = None  # first reason why a reward is missing
    # alignments of its text, by recogniser
    alignments: dict[Any, Alignment] = field(default_factory=dict)
    # costs by place, by reward
    located: dict[Any, Located] = field(default_factory=dict)

    @property
    def has_places(self) -> bool:
        """True if the rollout has tokens and a recording, so that losses can be located."""
        return bool(self.result.tokens) and len(self.item.reference_tokens) > 0

    @property
    def is_silent(self) -> bool:
        """True if its waveform has no samples, so that no recogniser is needed."""
        return self.wave is not None and not len(self.wave)

    def set_transcript(self, transcript: str) -> None:
        """Store a transcript and its word errors."""
        self.transcript = transcript
        self.errors = word_errors(self.item.text, transcript, self.item.language)

    def fail(self, cause: str) -> None:
        """Store the reason why a reward is missing, unless there is one already."""
        self.failure = self.failure or cause


def synthesise(records: Sequence[RolloutRecord], vocoder: Vocoder) -> None:
    """Add the waveform to every rollout, or the cause if the vocoder fails or returns samples
    that are not finite."""
    waves = voice_each(
        vocoder,
        [r.result.tokens for r in records],
        [r.item.speaker_embedding for r in records],
        [r.item.text for r in records],
    )
    for record, wave in zip(records, waves, strict=True):
        record.sample_rate = vocoder.sample_rate
        if isinstance(wave, Exception):
            record.fail(cause(wave))
        elif not np.isfinite(wave).all():
            record.fail("the vocoder returned samples that are not finite")
        else:
            record.wave = wave


def cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def answers(
    records: Sequence[RolloutRecord], ask: Callable[[list[RolloutRecord]], Sequence[T]]
) -> Iterator[tuple[RolloutRecord, T]]:
    """Yield the rollouts that contain sound, each with the recogniser's result that `ask`
    returns; store the cause in those for which it failed."""
    voiced = [r for r in records if r.wave is not None and not r.is_silent]
    for record, answer in zip(voiced, isolate(ask, voiced), strict=True):
        if isinstance(answer, Exception):
            record.fail(cause(answer))
        else:
            yield record, answer


def of_texts(recognizer: Any, method: str) -> Callable[[list[RolloutRecord]], Sequence[Any]]:
    """Return a function of rollouts that calls a method of a recogniser, for each language, with
    their waveforms, sampling rate and texts."""

    def ask(records: list[RolloutRecord]) -> Sequence[Any]:
        return by_language(
            recognizer,
            [r.item.language for r in records],
            lambda own, rows: getattr(own, method)(
                [records[i].wave for i in rows],
                records[0].sample_rate,
                [records[i].item.text for i in rows],
            ),
        )

    return ask


def transcribe(records: Sequence[RolloutRecord], recognizer: Recognizer) -> None:
    """Add transcript and word errors to the rollouts that have a waveform and no transcript yet."""
    ready = [
        r for r in records if r.wave is not None and r.transcript is None and r.failure is None
    ]

    def texts(rows: Sequence[RolloutRecord]) -> list[str]:
        waves = [r.wave for r in rows if r.wave is not None]
        return transcripts(recognizer, waves, rows[0].sample_rate, [r.item.language for r in rows])

    for record, text in answers(ready, texts):
        record.set_transcript(text)
    for record in ready:
        if record.is_silent:
            record.set_transcript("")


def align(records: Sequence[RolloutRecord], recognizer: Any) -> None:
    """Add alignment, transcript and word errors, from one pass of this recogniser, to the
    rollouts that have a waveform and no alignment by it yet."""
    ready = [
        r
        for r in records
        if r.wave is not None and r.failure is None and recognizer not in r.alignments
    ]
    for record, alignment in answers(ready, of_texts(recognizer, "align")):
        record.alignments[recognizer] = alignment
        if record.transcript is None:
            record.set_transcript(alignment.transcript)
    for record in ready:
        if record.is_silent and record.transcript is None:
            record.set_transcript("")


def check_aligns(reward: str, recognizer: Any) -> None:
    """Raise ConfigError if a reward should locate losses by a recogniser that does not align
    texts."""
    if not hasattr(recognizer, "align"):
        raise ConfigError(
            f"reward {reward}: credit=decision needs a recogniser that aligns texts, and "
            f"{recognizer.name} does not: set credit=utterance, or use a CTC recogniser (starter, "
            "encoder:…, nemo:… or ctc:…)"
        )


def check_reads(recognizer: Any, items: Sequence[PromptItem], needed: bool) -> None:
    """Raise ConfigError if a recogniser does not transcribe the language of a prompt. Log the
    characters of the texts that it does not know, which its transcripts never have; raise
    RewardError if they are `needed`, for likelihoods and alignments."""
    problem = unknown_characters(recognizer, [(item.language, item.text) for item in items])
    if not problem:
        return
    if needed:
        raise RewardError(
            f"{problem}, so they have no likelihood; use a recogniser with this alphabet, or "
            "remove the texts"
        )
    logger.warning("%s: they count as errors in every rollout", problem)


class UnusedRecognizer:
    """Placeholder for a recogniser that a run does not use, so that its packages need not be
    installed."""

    def __init__(self, name: str):
        self.name = name

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """Raise ConfigError, because the recogniser was not loaded."""
        raise ConfigError(
            f"recogniser {self.name} was not loaded, because neither the rewards nor the "
            "evaluation uses it; pass it in Python: DCPOTrainer(recognizer=…)"
        )


RECORDINGS_FOR_CHECK = 50
"""Largest number of recordings by which a recogniser is checked if its rewards do not need their
WER."""

RECORDINGS_AT_ONCE = 64
"""Number of recordings that are synthesised, transcribed and stored together."""


def recording(item: PromptItem) -> RolloutRecord:
    """Return the recording of a prompt as a rollout that consists of its own tokens."""
    utterance, tokens = item.utterance_id, list(item.reference_tokens)
    return RolloutRecord(item, 0, 0, DecodeResult(utterance, "recording", 0, tokens, False, 0))


def ground_truth_errors(
    items: Sequence[PromptItem], vocoder: Vocoder, recognizer: Recognizer
) -> dict[str, WordErrors | None]:
    """Return the word errors of every recording, resynthesised from its own tokens, by id; None
    if that failed."""
    errors: dict[str, WordErrors | None] = {}
    for start in range(0, len(items), RECORDINGS_AT_ONCE):
        records = [recording(item) for item in items[start : start + RECORDINGS_AT_ONCE]]
        synthesise(records, vocoder)
        transcribe(records, recognizer)
        errors |= {record.item.utterance_id: record.errors for record in records}
    return errors


class GroundTruth:
    """WER_gt of the training utterances, computed once per recogniser and vocoder, and stored in
    a file."""

    def __init__(self, path: Path, identity: str, items: Sequence[PromptItem]):
        """Read the file. identity: of the recogniser and the vocoder."""
        self.path, self.items = path, items
        digest = hashlib.sha256(f"{identity} {normalizers_of(i.language for i in items)}".encode())
        for item in items:
            digest.update(
                json.dumps(
                    [
                        item.utterance_id,
                        item.text,
                        list(map(int, item.reference_tokens)),
                        item.prompt_utterance_id,
                    ]
                ).encode()
            )
        self.fingerprint = digest.hexdigest()
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.errors: dict[str, WordErrors | None] = {}
        if stored.get("fingerprint") == self.fingerprint:
            self.errors = {k: e and WordErrors(**e) for k, e in stored["errors"].items()}

    def missing(self, rank: int = 0, processes: int = 1) -> list[PromptItem]:
        """Return this process's share of the prompts that are not in the file."""
        return [i for i in self.items if i.utterance_id not in self.errors][rank::processes]

    def measure(
        self, vocoder: Vocoder, recognizer: Recognizer, rank: int = 0, processes: int = 1
    ) -> None:
        """Transcribe the missing recordings, divided among the processes; the file is written
        after each part."""
        todo = self.missing()  # the same in all processes
        with Progress(
            desc="recordings", total=len(todo), unit="utt", disable=bool(rank) or not todo
        ) as bar:
            while self.missing():
                part = self.missing(rank, processes)[:RECORDINGS_AT_ONCE]
                for errors in gather_object([ground_truth_errors(part, vocoder, recognizer)]):
                    self.errors |= errors
                    bar.update(len(errors))
                if not rank:
                    counts = {k: e and asdict(e) for k, e in self.errors.items()}
                    write_json(self.path, {"fingerprint": self.fingerprint, "errors": counts})

    def rates(self) -> dict[str, float]:
        return {k: e.rate for k, e in self.errors.items() if e is not None}

    def corpus(self) -> float:
        """Return the corpus WER of the resynthesised recordings."""
        return corpus_wer(list(self.errors.values())).wer
