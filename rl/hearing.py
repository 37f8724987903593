"""Recognisers in stage two: what they hear of rollouts and of the recordings, and whether they hear
well enough.

A recogniser is asked once about a rollout, however many rewards need the answer. The recordings,
resynthesised from their own tokens, give WER_gt of the paper's reward; a recogniser with too many
errors on them is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from accelerate.utils import gather_object
from tqdm import tqdm

from dcar.decoding import DecodeResult
from dcar.errors import ConfigError, RewardError
from dcar.prompts.items import PromptItem
from dcar.recognition.base import Recognizer
from dcar.recognition.ctc import Alignment
from dcar.text.wer import NORMALIZER, WERScore, WordErrors, corpus_wer, word_errors
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
    failure: str | None = None  # first cause why a reward is missing
    # of its text, by the recognisers that gave one
    alignments: dict[Any, Alignment] = field(default_factory=dict)
    # by the rewards that `locate`, where they could
    located: dict[Any, Located] = field(default_factory=dict)

    @property
    def has_places(self) -> bool:
        """Whether there is speech to say where something was lost, and a recording to measure it
        by."""
        return bool(self.result.tokens) and len(self.item.reference_tokens) > 0

    @property
    def is_silent(self) -> bool:
        """Whether its waveform has no samples, so that nobody need be asked what it says."""
        return self.wave is not None and not len(self.wave)

    def hear(self, transcript: str) -> None:
        """Note what was heard, and the word errors."""
        self.transcript, self.errors = transcript, word_errors(self.item.text, transcript)

    def fail(self, cause: str) -> None:
        """Note why a reward is missing; the first cause stays."""
        self.failure = self.failure or cause


def synthesise(records: Sequence[RolloutRecord], vocoder: Vocoder) -> None:
    """Give every rollout its waveform; where the vocoder fails, or gives no finite numbers, the
    cause is noted."""
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
            record.fail("the vocoder gave samples that are not finite")
        else:
            record.wave = wave


def cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def told(
    records: Sequence[RolloutRecord], ask: Callable[[list[RolloutRecord]], Sequence[T]]
) -> Iterator[tuple[RolloutRecord, T]]:
    """The rollouts that have sound with what a recogniser says of them, but for those on which
    it failed, which have the cause."""
    spoken = [r for r in records if r.wave is not None and not r.is_silent]
    for record, answer in zip(spoken, isolate(ask, spoken), strict=True):
        if isinstance(answer, Exception):
            record.fail(cause(answer))
        else:
            yield record, answer


def of_texts(method: Callable[..., Sequence[T]]) -> Callable[[list[RolloutRecord]], Sequence[T]]:
    """Asks a method of a recogniser that takes waveforms, their rate and their texts."""
    return lambda rows: method(
        [r.wave for r in rows], rows[0].sample_rate, [r.item.text for r in rows]
    )


def transcribe(records: Sequence[RolloutRecord], recognizer: Recognizer) -> None:
    """Fill in transcript and word errors of the rollouts that have a waveform and were not
    transcribed yet."""
    ready = [
        r for r in records if r.wave is not None and r.transcript is None and r.failure is None
    ]

    def texts(rows: Sequence[RolloutRecord]) -> list[str]:
        waves = [r.wave for r in rows if r.wave is not None]
        return recognizer.transcribe(waves, rows[0].sample_rate)

    for record, text in told(ready, texts):
        record.hear(text)
    for record in ready:
        if record.is_silent:
            record.hear("")


def align(records: Sequence[RolloutRecord], recognizer: Any) -> None:
    """Fill in alignment, transcript and word errors of the rollouts that have a waveform and
    were not aligned by this recogniser yet, from one pass of it."""
    ready = [
        r
        for r in records
        if r.wave is not None and r.failure is None and recognizer not in r.alignments
    ]
    for record, alignment in told(ready, of_texts(recognizer.align)):
        record.alignments[recognizer] = alignment
        if record.transcript is None:
            record.hear(alignment.heard)
    for record in ready:
        if record.is_silent and record.transcript is None:
            record.hear("")


def check_aligns(reward: str, recognizer: Any) -> None:
    """ConfigError where a reward is to say where it was lost, by a recogniser that does not
    align texts."""
    if not hasattr(recognizer, "align"):
        raise ConfigError(
            f"reward {reward}: recogniser {recognizer.name} does not align texts, so there is no "
            "credit=decision by it: set credit=utterance, or use a CTC recogniser (starter, "
            "encoder:…, "
            "nemo:… or ctc:…)"
        )


class Unheard:
    """In place of a recogniser that nothing of a run asks, so that its packages need not be
    there."""

    def __init__(self, name: str):
        self.name = name

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """Nothing asks for this; a ConfigError where something does."""
        raise ConfigError(
            f"recogniser {self.name} was not loaded, because no reward and no evaluation asks it; "
            "give "
            "it in Python: DCPOTrainer(recognizer=…)"
        )


HEARD_FOR_CHECK = 50
"""Recordings at most by which a recogniser is checked whose rewards need no WER of theirs."""

HEARD_AT_ONCE = 64
"""Recordings that are voiced, heard and stored together."""


def ground_truth_errors(
    items: Sequence[PromptItem], vocoder: Vocoder, recognizer: Recognizer
) -> dict[str, list[int] | None]:
    """Word errors of every recording, resynthesised from its own tokens: id -> [S, D, I, N],
    None where it failed."""
    found: dict[str, list[int] | None] = {}
    for start in range(0, len(items), HEARD_AT_ONCE):
        spoken = [
            RolloutRecord(
                item,
                0,
                0,
                DecodeResult(
                    item.prompt.utterance_id, "recording", 0, list(item.reference_tokens), False, 0
                ),
            )
            for item in items[start : start + HEARD_AT_ONCE]
        ]
        synthesise(spoken, vocoder)
        transcribe(spoken, recognizer)
        found |= {
            r.item.prompt.utterance_id: None if r.errors is None else list(astuple(r.errors)[:4])
            for r in spoken
        }
    return found


def counted(errors: Iterable[Sequence[int] | None]) -> WERScore:
    """The corpus' score of counts [S, D, I, N]; None where an utterance has no transcript."""
    return corpus_wer([None if e is None else WordErrors(e[0], e[1], e[2], e[3]) for e in errors])


def check_hears(recognizer: str, wer: float, limit: float) -> None:
    """RewardError where a recogniser transcribes the resynthesised recordings with a corpus WER
    above `limit`: what it says of rollouts would be noise. NaN, where nothing was transcribed,
    is left to those who count failed rewards."""
    if not wer > limit:
        return
    raise RewardError(
        f"recogniser {recognizer} makes {100 * wer:.0f} % word errors on the corpus' own speech, "
        "spoken by the vocoder "
        f"from its tokens, more than max_reward_wer={limit:g}: as a reward it would be noise. "
        "Ways out: (1) another "
        "recogniser: recognizer=moonshine or whisper-base (if it is neither the judge nor the "
        "tokenizer) with "
        "reward_funcs=[wer,range_penalty] or [wer,cer,range_penalty], because they give "
        "transcripts and no "
        "likelihoods; a CTC model, recognizer=nemo:<path> or ctc:<path>, serves log_likelihood "
        "too; (2) one trained on "
        "this speech: dcar prepare mode=resynthesize, then python -m "
        "launch.starter.train_recognizer; (3) if vocoder "
        "and tokens are at fault (dcar analyse what=vocoder tells), train those; (4) in DCPO the "
        "reward of tokens: "
        "reward_funcs=[token_likelihood], as in launch/recipes/dcpo_starter.yaml; (5) "
        f"max_reward_wer={math.ceil(10 * wer) / 10:g} to use it nevertheless"
    )


def _stored_errors(path: Path) -> tuple[Any, dict[str, list[int] | None]]:
    """Fingerprint and errors by utterance in the file of a `GroundTruth`; none, with a line,
    where it is damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        errors = stored["errors"]
        for counts in errors.values():
            if counts is not None and not (
                len(counts) == 4 and all(type(n) is int and n >= 0 for n in counts) and counts[3]
            ):
                raise ValueError(f"counts {counts}")
        return stored["fingerprint"], errors
    except (OSError, ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        logger.warning("%s: damaged (%s); the recordings are heard again", path, error)
        return "", {}


class GroundTruth:
    """WER_gt of the training utterances, computed once per recogniser and kept in a file."""

    def __init__(self, path: Path, recognizer: str, items: Sequence[PromptItem]):
        self.path, self.items = path, items
        digest = hashlib.sha256(f"{recognizer} {NORMALIZER}".encode())
        for item in items:
            digest.update(
                json.dumps(
                    [
                        item.prompt.utterance_id,
                        item.text,
                        list(map(int, item.reference_tokens)),
                        item.prompt_utterance_id,
                    ]
                ).encode()
            )
        self.fingerprint = digest.hexdigest()
        stored, errors = _stored_errors(path) if path.is_file() else ("", {})
        self.errors: dict[str, list[int] | None] = errors if stored == self.fingerprint else {}

    def missing(self, rank: int = 0, processes: int = 1) -> list[PromptItem]:
        """This process's share of what is not in the file."""
        return [i for i in self.items if i.prompt.utterance_id not in self.errors][rank::processes]

    def measure(
        self, vocoder: Vocoder, recognizer: Recognizer, rank: int = 0, processes: int = 1
    ) -> None:
        """Hear what is missing, shared among the processes; the file grows with it."""
        todo = self.missing()  # the same in all processes
        with tqdm(
            desc="recordings", total=len(todo), unit="utt", disable=bool(rank) or not todo
        ) as bar:
            while self.missing():
                part = self.missing(rank, processes)[:HEARD_AT_ONCE]
                for heard in gather_object([ground_truth_errors(part, vocoder, recognizer)]):
                    self.errors |= heard
                    bar.update(len(heard))
                if not rank:
                    write_json(self.path, {"fingerprint": self.fingerprint, "errors": self.errors})

    def rates(self) -> dict[str, float]:
        return {k: sum(e[:3]) / e[3] for k, e in self.errors.items() if e is not None}

    def corpus(self) -> float:
        """Corpus WER of the resynthesised recordings."""
        return counted(self.errors.values()).wer
