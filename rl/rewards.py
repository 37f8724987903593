"""What a rollout is worth: a list of rewards, each a callable on a batch of rollouts, added with weights.

Paper eq. 5: R = (WER_gt - WER) - (alpha / L) sum_m distance(a_m, range), WER as a fraction. A
reward that cannot be computed is NaN, never 0: it is masked, counted, and its cause is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dcar.decoding import DecodeResult
from dcar.errors import ConfigError, RewardError
from dcar.prepare.prepared import prepared_info
from dcar.prompts.items import PromptItem
from dcar.recognition.base import Recognizer
from dcar.recognition.ctc import Alignment
from dcar.recognition.load import load_token_recognizer
from dcar.recognition.tokens import TokenRecognizer
from dcar.text.wer import (
    NORMALIZER,
    WordErrors,
    character_errors,
    corpus_wer,
    spoken_words,
    word_costs,
    word_errors,
)
from dcar.tokens.codebook import codebook_of
from dcar.tokens.warping import code_distances, warped_distances, warpings
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
    located: dict[Reward, Located] = field(default_factory=dict)  # by the rewards that `locate`, where they could

    @property
    def has_places(self) -> bool:
        """Whether there is speech to say where something was lost, and a recording to measure it by."""
        return bool(self.result.tokens) and len(self.item.reference_tokens) > 0


class Reward(Protocol):
    """A reward function: one number per rollout, NaN where it cannot be computed (set `record.failure`)."""

    name: str
    hears: bool  # whether it needs the waveform; a class without the attribute does
    # locates: bool, whether it says in `record.located` where it was lost; a class without the attribute does not

    def __call__(self, records: Sequence[RolloutRecord]) -> list[float]: ...


def transcripts(waves: Sequence[np.ndarray], sample_rate: int, recognizer: Recognizer) -> list[str | Exception]:
    """What the recogniser hears; "" for a wave without samples, an exception where it failed."""
    spoken = [i for i, wave in enumerate(waves) if len(wave)]
    heard: list[str | Exception] = [""] * len(waves)
    answers = isolate(lambda rows: recognizer.transcribe([waves[i] for i in rows], sample_rate), spoken)
    for i, text in zip(spoken, answers, strict=True):
        heard[i] = text
    return heard


def cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class WERReward:
    """WER of the recording (resynthesised from its tokens) minus WER of the rollout, both capped (DCAR paper, eq. 5).

    `ground_truth` maps utterance ids to WER_gt; an utterance without one counts as 0. The cap keeps the insertions of
    runaway rollouts from ruling the spread of their group.

    locate: say too at which characters of the text words are wrong, for credit by decision: a CTC recogniser tells
    where the text is spoken. The paper's reward, not its credit.
    """

    name = "wer"
    hears = True

    def __init__(self, recognizer: Recognizer, ground_truth: Mapping[str, float] | None = None, cap: float = 1.0,
                 locate: bool = False):
        if locate:
            check_aligns(self.name, recognizer)
        self.recognizer, self.ground_truth, self.cap, self.locates = recognizer, ground_truth or {}, cap, locate

    def __call__(self, records: Sequence[RolloutRecord]) -> list[float]:
        if self.locates:
            align(records, self.recognizer)
            for record in records:
                alignment = record.alignments.get(self.recognizer)
                if alignment and record.has_places:
                    record.located[self] = located_words(alignment, record, self.cap)
        else:
            transcribe(records, self.recognizer)
        return [
            NAN if r.errors is None else
            min(self.ground_truth.get(r.item.prompt.utterance_id, 0.0), self.cap) - min(r.errors.rate, self.cap)
            for r in records
        ]


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


class CERReward:
    """-CER of the rollout, capped: finer than WER where the recogniser is weak and half a word heard is the news.

    Not in the paper. There is no term of the recording: it is the same for a whole group, whose advantages are
    taken from its mean."""

    name = "cer"
    hears = True

    def __init__(self, recognizer: Recognizer, cap: float = 1.0):
        self.recognizer, self.cap = recognizer, cap

    def __call__(self, records: Sequence[RolloutRecord]) -> list[float]:
        transcribe(records, self.recognizer)
        return [NAN if r.transcript is None else -min(character_errors(r.item.text, r.transcript).rate, self.cap)
                for r in records]


class LikelihoodReward:
    """Log-likelihood of the text under the recogniser, nats per character, times `scale`: denser than the WER of one
    transcript. Never below `floor` nats per character, where the wave is too short for its text.

    locate: say too what every unit of the text costs on the likeliest path, for credit by decision. A unit's frames are
    added up, so that the costs are the reward's, but for the paths that are less likely; no unit costs more than the
    floor. Frames and tokens divide the same wave. Where a wave is too short for its text, every unit is at the floor.
    """

    name = "log_likelihood"
    hears = True

    def __init__(self, recognizer: Any, scale: float = 0.1, floor: float = -10.0, locate: bool = False):
        if not hasattr(recognizer, "log_likelihood"):
            raise ConfigError(f"reward log_likelihood: recogniser {recognizer.name} gives no likelihoods, only "
                              "transcripts; keep it with reward_funcs=[wer,range_penalty], or [wer,cer,range_penalty] "
                              "where it is weak, or use a CTC recogniser (starter, encoder:…, nemo:… or ctc:…), which "
                              "gives both")
        if locate:
            check_aligns(self.name, recognizer)
        self.recognizer, self.scale, self.floor, self.locates = recognizer, scale, floor, locate

    def __call__(self, records: Sequence[RolloutRecord]) -> list[float]:
        values = {id(r): NAN if r.wave is None else self.scale * self.floor for r in records}
        spoken = [r for r in records if r.wave is not None and len(r.wave)]
        for record, answer in zip(spoken, self._ask(spoken), strict=True):
            values[id(record)] = NAN if answer is None else self.scale * max(answer, self.floor)
        return [values[id(r)] for r in records]

    def _ask(self, spoken: list[RolloutRecord]) -> list[float | None]:
        """Nats per character of every rollout, None where the recogniser failed; where they are lost, if wanted."""
        if not self.locates:
            return told(spoken, self.recognizer.log_likelihood)
        align(spoken, self.recognizer)
        found = [r.alignments.get(self.recognizer) for r in spoken]
        for record, alignment in zip(spoken, found, strict=True):
            if alignment and record.has_places:
                record.located[self] = located_by(alignment, record, self.scale, self.floor)
        return [None if alignment is None else alignment.log_likelihood for alignment in found]


def located_by(alignment: Alignment, record: RolloutRecord, scale: float, floor: float) -> Located:
    """What every unit of a rollout's text costs by an alignment, in shares of the text's characters, `scale` for a nat
    and −floor nats at most. Frames and tokens divide the same speech, which has tokens."""
    costs = np.minimum(alignment.costs * len(alignment.costs) / alignment.characters, -floor)  # a character's share
    return _located(scale * costs, alignment, record)


def located_words(alignment: Alignment, record: RolloutRecord, cap: float) -> Located:
    """Which units of a rollout's text are in words that were not heard, in shares of its words, `cap` in all at most.
    Frames and tokens divide the same speech, which has tokens; subwords divide the characters evenly."""
    characters, units = word_costs(record.item.text, alignment.heard), len(alignment.costs)
    errors = np.bincount(np.arange(len(characters)) * units // len(characters), characters, units)
    rate = errors / len(spoken_words(record.item.text).split())
    return _located(units * rate * min(1.0, cap / max(rate.sum(), cap)), alignment, record)


def _located(costs: np.ndarray, alignment: Alignment, record: RolloutRecord) -> Located:
    """Costs of the units of an alignment, whose mean is the reward lost, and the unit that each token speaks."""
    tokens = len(record.result.tokens)
    middle = (np.arange(tokens) + 0.5) * len(alignment.units) / tokens  # of every token, in frames
    return Located(costs, alignment.units[middle.astype(np.int64)], len(costs) / len(record.item.reference_tokens))


class TokenLikelihoodReward:
    """Log-likelihood of the sentence's phonemes given the spoken tokens, nats per phoneme, times `scale`: what
    `LikelihoodReward` asks of the sound, without vocoder and sound. Never below `floor` nats per phoneme, where there
    are too few tokens for the text. Not in the paper.

    locate: say too what every phoneme costs on the likeliest path, for credit by decision, as there.
    """

    name = "token_likelihood"
    hears = False

    def __init__(self, recognizer: TokenRecognizer, scale: float = 0.2, floor: float = -10.0, locate: bool = False):
        self.recognizer, self.scale, self.floor, self.locates = recognizer, scale, floor, locate

    def __call__(self, records: Sequence[RolloutRecord]) -> list[float]:
        speech, texts = [r.result.tokens for r in records], [r.item.text_ids for r in records]
        if not self.locates:
            return [self.scale * max(v, self.floor) for v in self.recognizer.log_likelihood(speech, texts)]
        alignments = self.recognizer.align(speech, texts)
        for record, alignment in zip(records, alignments, strict=True):
            if record.has_places:
                record.located[self] = located_by(alignment, record, self.scale, self.floor)
        return [self.scale * max(a.log_likelihood, self.floor) for a in alignments]


class TokenReward:
    """-scale times the distance of the spoken tokens to the recording's, warped in time over the distances of the
    tokenizer's centroids (dcar/tokens/warping.py). Needs neither vocoder nor recogniser, and sees no word: a warm-up,
    or beside the word error rate. Not in the paper.

    distances [V, V]: `code_distances`. locate: say too what every token of the recording costs on the path, for credit
    by decision. A rollout without tokens is as far as two codes taken at random.
    """

    name = "token_distance"
    hears = False

    def __init__(self, distances: np.ndarray, scale: float = 1.0, locate: bool = False):
        self.distances, self.scale, self.locates = distances, scale, locate

    def __call__(self, records: Sequence[RolloutRecord]) -> list[float]:
        values = [-self.scale] * len(records)
        spoken = [i for i, r in enumerate(records) if r.has_places]
        pairs = [(records[i].result.tokens, list(records[i].item.reference_tokens)) for i in spoken]
        if self.locates:
            for i, warping in zip(spoken, warpings(pairs, self.distances), strict=True):
                # a path weighs n + m, which is about twice the m places that its costs lie at
                records[i].located[self] = Located(self.scale * warping.costs / 2, warping.places)
                length = len(records[i].result.tokens) + len(warping.costs)
                values[i] = -self.scale * float(warping.costs.sum()) / length
        else:
            for i, distance in zip(spoken, warped_distances(pairs, self.distances).tolist(), strict=True):
                values[i] = -self.scale * distance
        return values


def corpus_distances(data: str) -> np.ndarray:
    """Distances of the codes [V, V] of a prepared corpus' tokenizer; ConfigError where it has no centroids."""
    codebook = codebook_of(prepared_info(data)["tokenizer"], data)
    if codebook is None:
        raise ConfigError(f"reward token_distance: the tokenizer of {data} has no codebook of centroids; take rewards "
                          "that hear (wer, cer, log_likelihood)")
    return code_distances(codebook)


def corpus_token_recognizer(folder: str, data: str, device: str = "cpu") -> TokenRecognizer:
    """The token recogniser in a folder (starter = the shipped one) for a prepared corpus; CheckpointError where it
    reads other tokens or other phonemes than the corpus has."""
    recognizer = load_token_recognizer(folder, device)
    recognizer.check_reads(prepared_info(data), data)
    return recognizer


class RangePenalty:
    """-(alpha / L) sum over decisions of the distance to the guidance range; L = generated tokens (default) or
    decisions. "indicator" counts actions outside instead of measuring how far."""

    name = "range_penalty"
    hears = False

    def __init__(self, chunk_range: Sequence[int], alpha: float = 0.1, kind: str = "distance",
                 normalizer: str = "tokens"):
        if kind not in ("distance", "indicator", "none") or normalizer not in ("tokens", "decisions"):
            raise ConfigError("penalty is distance, indicator or none, penalty_normalizer is tokens or decisions; not "
                              f"'{kind}', '{normalizer}'")
        self.range, self.alpha, self.kind, self.normalizer = tuple(chunk_range), alpha, kind, normalizer

    def __call__(self, records: Sequence[RolloutRecord]) -> list[float]:
        return [self.of(r.result) for r in records]

    def of(self, result: DecodeResult) -> float:
        if self.kind == "none":
            return 0.0
        distances = [min(abs(a - r) for r in self.range) for a in result.actions]
        if self.kind == "indicator":
            distances = [int(d > 0) for d in distances]
        length = len(result.tokens) if self.normalizer == "tokens" else len(result.actions)
        return -self.alpha * sum(distances) / max(1, length)


class SpeedBonus:
    """weight * (1 - decisions / generated tokens); not in the paper, whose speed follows from the range."""

    name = "speed_bonus"
    hears = False

    def __init__(self, weight: float):
        self.weight = weight

    def __call__(self, records: Sequence[RolloutRecord]) -> list[float]:
        return [self.weight * (1 - len(r.result.actions) / max(1, len(r.result.tokens))) for r in records]


def needs_sound(rewards: Sequence[Reward]) -> bool:
    """Whether one of the rewards hears the rollouts; else they need no vocoder."""
    return any(getattr(reward, "hears", True) for reward in rewards)


def locates(reward: Reward) -> bool:
    """Whether a reward says where it was lost."""
    return getattr(reward, "locates", False)


def check_locate(rewards: Sequence[Reward]) -> None:
    """ConfigError where credit by decision is asked of rewards that do not say where they were lost. Those that hear
    nothing (range_penalty, speed_bonus) may stand beside one that does, and keep their credit by rollout."""
    silent = [r.name for r in rewards if not locates(r) and getattr(r, "hears", True)]
    if silent or not any(locates(r) for r in rewards):
        what = f"{', '.join(silent)} judges utterances as a whole" if silent else "none of these does"
        raise ConfigError(f"credit=decision needs rewards that know where errors lie, and {what}: set "
                          "reward_funcs=[wer], [log_likelihood], [token_likelihood], [token_distance] or several of "
                          "these, or credit=utterance")


def score(records: Sequence[RolloutRecord], rewards: Sequence[Reward],
          weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """All rewards of a batch: total [R] (NaN where any part is) and parts [R, number of rewards], float64."""
    parts = np.full((len(records), len(rewards)), NAN)
    for j, reward in enumerate(rewards):
        try:
            parts[:, j] = reward(records)
        except Exception as error:  # a reward of the user's own; its failure is counted, not hidden
            for record in records:
                record.failure = record.failure or f"reward {reward.name}: {cause(error)}"
    parts[np.isinf(parts)] = NAN
    for i in np.isnan(parts).any(1).nonzero()[0]:
        record = records[i]
        record.failure = record.failure or f"{rewards[int(np.isnan(parts[i]).argmax())].name} gave no finite number"
    return parts @ np.asarray(weights, dtype=np.float64), parts


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
    """RewardError where a recogniser hears the recordings, resynthesised, with a corpus WER above `limit`: what it says
    of rollouts would be noise. NaN, where nothing was transcribed, is left to those who count failed rewards."""
    if not wer > limit:
        return
    raise RewardError(
        f"recogniser {recognizer} makes {100 * wer:.0f} % word errors on the corpus' own speech, spoken by the vocoder "
        f"from its tokens, more than max_reward_wer={limit:g}: as a reward it would be noise. Ways out: (1) another "
        "recogniser: recognizer=moonshine or whisper-base (if it is neither the judge nor the tokenizer) with "
        "reward_funcs=[wer,range_penalty] or [wer,cer,range_penalty], because they give transcripts and no "
        "likelihoods; a CTC model, recognizer=nemo:<path> or ctc:<path>, serves log_likelihood too; (2) one trained on "
        "this speech: dcar resynthesize, then dcar train-encoder-recognizer; (3) if vocoder and tokens are at fault "
        "(dcar vocoder-quality tells), train those; (4) in DCPO the reward that hears nothing and reads the tokens: "
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

    def rates(self) -> dict[str, float]:
        return {k: sum(e[:3]) / e[3] for k, e in self.errors.items() if e is not None}

    def corpus(self) -> float:
        """Corpus WER of the resynthesised recordings."""
        score = corpus_wer([None if e is None else WordErrors(e[0], e[1], e[2], e[3]) for e in self.errors.values()])
        return score.wer if math.isfinite(score.wer) else NAN
