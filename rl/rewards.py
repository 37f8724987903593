"""What a rollout is worth: reward functions, called as TRL calls them, and added with weights.

    def reward(completions, **columns) -> list[float | None]

Paper, eq. 5: R = (WER_gt − WER) − (alpha / L) Σ_m distance(a_m, range), WER as a fraction. The
paper's are `wer` and `range_penalty`. A reward that cannot be computed is NaN, never 0: its rollout
is masked and counted, and the cause is kept. None means that a reward does not apply to a rollout,
whose total is the sum of the others, as in TRL.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dcar.errors import ConfigError
from dcar.prepare.prepared import prepared_info
from dcar.recognition.base import Recognizer
from dcar.recognition.ctc import Alignment
from dcar.recognition.load import load_token_recognizer
from dcar.recognition.tokens import TokenRecognizer
from dcar.text.readings import spoken_words
from dcar.text.wer import character_errors, word_costs
from rl.credit import Located
from rl.hearing import NAN, RolloutRecord, align, cause, check_aligns, of_texts, told, transcribe

if TYPE_CHECKING:
    from rl.config import DCPOConfig

Tokens = Sequence[Sequence[int]]
Rollouts = Sequence[RolloutRecord]
Reward = Callable[..., Sequence[float | None]]
"""A reward function. It may carry attributes: `name`, under which it is logged (else its own
name); `needs_audio`, whether it needs sound (else whether it names `audio`, `sample_rate` or
`transcripts` among its parameters); `locates`, whether it says in `rollouts[i].located` where it
was lost, for credit=decision."""


def columns_of(records: Rollouts) -> dict[str, Any]:
    """What reward functions are given, by name: of every rollout one entry, but for sample_rate
    (Hz).

    completions, completion_ids, speech_tokens: the spoken tokens; chunk_sizes: of every decision;
    prompts, text: what was to be spoken; text_ids: its phonemes; audio: float32 samples, None where
    the vocoder failed; transcripts: None where the recogniser was not asked; reference_tokens:
    those of the recording; utterance_id, speaker, duration (seconds of the recording); rollouts:
    all there is (`RolloutRecord`). Then the further columns of the data set.
    """
    items, tokens = [r.item for r in records], [r.result.tokens for r in records]
    found: dict[str, Any] = {
        "completions": tokens,
        "completion_ids": tokens,
        "speech_tokens": tokens,
        "chunk_sizes": [r.result.actions for r in records],
        "prompts": [i.text for i in items],
        "text": [i.text for i in items],
        "text_ids": [i.text_ids for i in items],
        "reference_tokens": [i.reference_tokens for i in items],
        "speaker": [i.speaker for i in items],
        "utterance_id": [i.prompt.utterance_id for i in items],
        "duration": [i.duration for i in items],
        "transcripts": [r.transcript for r in records],
        "rollouts": records,
    }
    if any(r.sample_rate for r in records):
        found |= {
            "audio": [r.wave for r in records],
            "sample_rate": max(r.sample_rate for r in records),
        }
    own = [i.columns for i in items]
    return {**{name: [row.get(name) for row in own] for name in (own[0] if own else {})}, **found}


def ask(reward: Reward, records: Rollouts, **more: Any) -> list[float | None]:
    """One number a rollout, None where the reward does not apply. ValueError for more or fewer
    of them than rollouts."""
    values = [
        None if value is None else float(value) for value in reward(**columns_of(records), **more)
    ]
    if len(values) != len(records):
        raise ValueError(f"gave {len(values)} numbers for {len(records)} rollouts")
    return values


def score(
    records: Rollouts,
    rewards: Sequence[Reward],
    weights: Sequence[float],
    recognizer: Recognizer | None = None,
    **more: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """All rewards of a batch, float64: total [R], the weighted sum of those that apply, NaN where
    one could not be computed or none applies; and parts [R, number of rewards], NaN where there is
    none.

    A reward of sound that gives None for a rollout whose sound or transcript failed could not be
    computed. recognizer: transcribes for rewards that name `transcripts`. more: further keyword
    arguments of every reward.
    """
    parts, applies = (
        np.full((len(records), len(rewards)), NAN),
        np.full((len(records), len(rewards)), True),
    )
    names = names_of(rewards)
    for j, reward in enumerate(rewards):
        try:
            if recognizer is not None and "transcripts" in named_by(reward):
                transcribe(records, recognizer)
            values = ask(reward, records, **more)
            applies[:, j] = [
                value is not None or needs_audio(reward) and r.failure is not None
                for value, r in zip(values, records, strict=True)
            ]
            parts[:, j] = [NAN if value is None else value for value in values]
        except Exception as error:  # a reward of the user's own; its failure is counted, not hidden
            for record in records:
                record.fail(f"reward {names[j]}: {cause(error)}")
    parts[np.isinf(parts)] = NAN
    failed = np.isnan(parts) & applies
    for record, bad, asked in zip(records, failed, applies, strict=True):
        if bad.any():
            record.fail(f"{names[bad.argmax()]} gave no finite number")
        elif not asked.any():
            record.fail("no reward applies to it: all gave None")
    return np.where(failed.any(1) | ~applies.any(1), NAN, weighted(parts, weights)), parts


def weighted(parts: np.ndarray, weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """The weighted sums [R] of parts of rewards [R, J], without those that are NaN."""
    return np.nan_to_num(parts) @ np.asarray(weights, dtype=np.float64)


# --- what a reward function says of itself --------------------------------------------------------


def unwrapped(reward: Any) -> Any:
    """The callable inside of `functools.partial`."""
    return unwrapped(reward.func) if isinstance(reward, partial) else reward


def name_of(reward: Any) -> str:
    """Its `name`, or that of the function or class."""
    inside = unwrapped(reward)
    return (
        getattr(inside, "name", None) or getattr(inside, "__name__", None) or type(inside).__name__
    )


def names_of(rewards: Sequence[Any]) -> list[str]:
    """The names under which rewards are logged; further ones of one name are numbered: energy,
    energy_2, …"""
    names: list[str] = []
    for reward in rewards:
        first = name_of(reward)
        candidates = (first, *(f"{first}_{number}" for number in range(2, len(rewards) + 1)))
        names.append(next(name for name in candidates if name not in names))
    return names


def named_by(reward: Any) -> frozenset[str]:
    """The parameters that a reward function names; nothing where it hides them."""
    try:
        return frozenset(inspect.signature(reward).parameters)
    except (TypeError, ValueError):
        return frozenset()


def needs_audio(reward: Any) -> bool:
    """Whether it needs the waveforms of rollouts."""
    return bool(
        getattr(
            unwrapped(reward),
            "needs_audio",
            named_by(reward) & {"audio", "sample_rate", "transcripts"},
        )
    )


def locates(reward: Any) -> bool:
    """Whether it says where it was lost."""
    return getattr(reward, "locates", False)


def needs_sound(rewards: Sequence[Reward]) -> bool:
    """Whether one of the rewards needs audio; else rollouts need no vocoder."""
    return any(needs_audio(reward) for reward in rewards)


def check_locate(rewards: Sequence[Reward]) -> None:
    """ConfigError where credit by decision is asked of rewards that do not say where they were
    lost. Those that hear nothing (range_penalty) may stand beside one that does, and keep their
    credit by rollout."""
    silent = [name_of(r) for r in rewards if not locates(r) and needs_audio(r)]
    if silent or not any(locates(r) for r in rewards):
        what = (
            f"{', '.join(silent)} judges utterances as a whole" if silent else "none of these does"
        )
        raise ConfigError(
            f"credit=decision needs rewards that know where errors lie, and {what}: set "
            "reward_funcs=[wer], [log_likelihood], [token_likelihood] or several of these, or "
            "credit=utterance"
        )


# --- the rewards that have a name -----------------------------------------------------------------


class WERReward:
    """WER of the recording (resynthesised from its tokens) minus WER of the rollout, both capped
    (DCAR paper, eq. 5).

    `ground_truth` maps utterance ids to WER_gt; an utterance without one counts as 0. The cap keeps
    the insertions of runaway rollouts from ruling the spread of their group.

    locate: say too at which characters of the text words are wrong, for credit by decision: a CTC
    recogniser tells where the text is spoken. The paper's reward, not its credit.
    """

    name = "wer"
    needs_audio = True

    def __init__(
        self,
        recognizer: Recognizer,
        ground_truth: Mapping[str, float] | None = None,
        cap: float = 1.0,
        locate: bool = False,
    ):
        if locate:
            check_aligns(self.name, recognizer)
        self.recognizer, self.ground_truth, self.cap, self.locates = (
            recognizer,
            ground_truth or {},
            cap,
            locate,
        )

    def __call__(self, completions: Tokens, *, rollouts: Rollouts, **columns: Any) -> list[float]:
        if self.locates:
            align(rollouts, self.recognizer)
            for record, alignment in aligned(rollouts, self.recognizer):
                record.located[self] = located_words(alignment, record, self.cap)
        else:
            transcribe(rollouts, self.recognizer)
        return [
            NAN
            if r.errors is None
            else min(self.ground_truth.get(r.item.prompt.utterance_id, 0.0), self.cap)
            - min(r.errors.rate, self.cap)
            for r in rollouts
        ]


class CERReward:
    """-CER of the rollout, capped: finer than WER where the recogniser is weak and half a word
    heard is the news.

    Not in the paper. There is no term of the recording: it is the same for a whole group, whose
    advantages are taken from its mean."""

    name = "cer"
    needs_audio = True

    def __init__(self, recognizer: Recognizer, cap: float = 1.0):
        self.recognizer, self.cap = recognizer, cap

    def __call__(self, completions: Tokens, *, rollouts: Rollouts, **columns: Any) -> list[float]:
        transcribe(rollouts, self.recognizer)
        return [
            NAN
            if r.transcript is None
            else -min(character_errors(r.item.text, r.transcript).rate, self.cap)
            for r in rollouts
        ]


class LikelihoodReward:
    """Log-likelihood of the text under the recogniser, nats per character, times `scale`: denser
    than the WER of one transcript. Never below `floor` nats per character, where the wave is too
    short for its text.

    locate: say too what every unit of the text costs on the likeliest path, for credit by decision.
    A unit's frames are added up, so that the costs are the reward's, but for the paths that are
    less likely; no unit costs more than the floor. Frames and tokens divide the same wave. Where a
    wave is too short for its text, every unit is at the floor.
    """

    name = "log_likelihood"
    needs_audio = True

    def __init__(
        self, recognizer: Any, scale: float = 0.1, floor: float = -10.0, locate: bool = False
    ):
        if not hasattr(recognizer, "log_likelihood"):
            raise ConfigError(
                f"reward log_likelihood: recogniser {recognizer.name} gives no likelihoods, only "
                "transcripts; keep it with reward_funcs=[wer,range_penalty], or "
                "[wer,cer,range_penalty] "
                "where it is weak, or use a CTC recogniser (starter, encoder:…, nemo:… or ctc:…), "
                "which "
                "gives both"
            )
        if locate:
            check_aligns(self.name, recognizer)
        self.recognizer, self.scale, self.floor, self.locates = recognizer, scale, floor, locate

    def __call__(self, completions: Tokens, *, rollouts: Rollouts, **columns: Any) -> list[float]:
        if self.locates:
            align(rollouts, self.recognizer)
            values = {
                id(r): a.log_likelihood
                for r in rollouts
                if (a := r.alignments.get(self.recognizer))
            }
            for record, alignment in aligned(rollouts, self.recognizer):
                record.located[self] = located_by(alignment, record, self.scale, self.floor)
        else:
            values = {
                id(r): value
                for r, value in told(rollouts, of_texts(self.recognizer.log_likelihood))
            }
        values |= {id(r): self.floor for r in rollouts if r.is_silent}
        return [
            self.scale * max(values[id(r)], self.floor) if id(r) in values else NAN
            for r in rollouts
        ]


def aligned(records: Rollouts, recognizer: Any) -> list[tuple[RolloutRecord, Alignment]]:
    """The rollouts of which a recogniser can say where something was lost, with its alignment."""
    return [
        (r, r.alignments[recognizer])
        for r in records
        if recognizer in r.alignments and r.has_places
    ]


def located_by(alignment: Alignment, record: RolloutRecord, scale: float, floor: float) -> Located:
    """What every unit of a rollout's text costs by an alignment, in shares of the text's
    characters, `scale` for a nat and −floor nats at most. Frames and tokens divide the same
    speech, which has tokens."""
    # a character's share
    costs = np.minimum(alignment.costs * len(alignment.costs) / alignment.characters, -floor)
    return _located(scale * costs, alignment, record)


def located_words(alignment: Alignment, record: RolloutRecord, cap: float) -> Located:
    """Which units of a rollout's text are in words that were not heard, in shares of its words,
    `cap` in all at most. Frames and tokens divide the same speech, which has tokens; subwords
    divide the characters evenly."""
    characters, units = word_costs(record.item.text, alignment.heard), len(alignment.costs)
    errors = np.bincount(np.arange(len(characters)) * units // len(characters), characters, units)
    rate = errors / len(spoken_words(record.item.text).split())
    return _located(units * rate * min(1.0, cap / max(rate.sum(), cap)), alignment, record)


def _located(costs: np.ndarray, alignment: Alignment, record: RolloutRecord) -> Located:
    """Costs of the units of an alignment, whose mean is the reward lost, and the unit that each
    token speaks."""
    tokens = len(record.result.tokens)
    middle = (np.arange(tokens) + 0.5) * len(alignment.units) / tokens  # of every token, in frames
    return Located(
        costs,
        alignment.units[middle.astype(np.int64)],
        len(costs) / len(record.item.reference_tokens),
    )


class TokenLikelihoodReward:
    """Log-likelihood of the sentence's phonemes given the spoken tokens, nats per phoneme, times
    `scale`: what `LikelihoodReward` asks of the sound, without vocoder and sound. Never below
    `floor` nats per phoneme, where there are too few tokens for the text. Not in the paper.

    locate: say too what every phoneme costs on the likeliest path, for credit by decision, as
    there.
    """

    name = "token_likelihood"
    needs_audio = False

    def __init__(
        self,
        recognizer: TokenRecognizer,
        scale: float = 0.2,
        floor: float = -10.0,
        locate: bool = False,
    ):
        self.recognizer, self.scale, self.floor, self.locates = recognizer, scale, floor, locate

    def __call__(
        self,
        completions: Tokens,
        *,
        text_ids: Sequence[Sequence[int]],
        rollouts: Rollouts,
        **columns: Any,
    ) -> list[float]:
        if not self.locates:
            return [
                self.scale * max(v, self.floor)
                for v in self.recognizer.log_likelihood(completions, text_ids)
            ]
        alignments = self.recognizer.align(completions, text_ids)
        for record, alignment in zip(rollouts, alignments, strict=True):
            if record.has_places:
                record.located[self] = located_by(alignment, record, self.scale, self.floor)
        return [self.scale * max(a.log_likelihood, self.floor) for a in alignments]


class RangePenalty:
    """-(alpha / L) sum over decisions of the distance to the guidance range, L generated tokens
    (DCAR paper, eq. 5)."""

    name = "range_penalty"
    needs_audio = False

    def __init__(self, chunk_range: Sequence[int], alpha: float = 0.1):
        self.range, self.alpha = tuple(chunk_range), alpha

    def __call__(
        self, completions: Tokens, *, chunk_sizes: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        return [
            -self.alpha
            * sum(min((abs(a - r) for r in self.range), default=0) for a in sizes)
            / max(1, len(tokens))
            for tokens, sizes in zip(completions, chunk_sizes, strict=True)
        ]


def corpus_token_recognizer(folder: str, data: str, device: str = "cpu") -> TokenRecognizer:
    """The token recogniser in a folder (starter = the shipped one) for a prepared corpus;
    CheckpointError where it reads other tokens or other phonemes than the corpus has."""
    if not data:
        raise ConfigError(
            "reward token_likelihood has to know the corpus' tokens and phonemes: give "
            "data=<folder of "
            "dcar prepare>"
        )
    recognizer = load_token_recognizer(folder, device)
    recognizer.check_reads(prepared_info(data), data)
    return recognizer


BUILT_IN: dict[str, Callable[[DCPOConfig, Recognizer], Reward]] = {
    "wer": lambda args, ear: WERReward(ear, locate=args.credit == "decision"),
    "cer": lambda args, ear: CERReward(ear),
    "log_likelihood": lambda args, ear: LikelihoodReward(ear, locate=args.credit == "decision"),
    "token_likelihood": lambda args, ear: TokenLikelihoodReward(
        corpus_token_recognizer(args.token_recognizer, args.data, str(args.device)),
        locate=args.credit == "decision",
    ),
    "range_penalty": lambda args, ear: RangePenalty(args.chunk_range, args.alpha),
}
ASKS = {"wer", "cer", "log_likelihood"}  # those that ask a recogniser


def path_of(reward: str | Reward) -> str:
    """What names a reward in a recipe, where something does."""
    module, name = getattr(reward, "__module__", ""), getattr(reward, "__qualname__", "")
    return reward if isinstance(reward, str) else f"{module}.{name}" if name else name_of(reward)


def asks_recognizer(rewards: Sequence[str | Reward]) -> bool:
    """Whether one of the rewards (or names of `BUILT_IN`) asks the recogniser of a run."""
    return any(r in ASKS if isinstance(r, str) else "transcripts" in named_by(r) for r in rewards)


def imported(rewards: Sequence[str | Reward]) -> list[str | Reward]:
    """Dotted paths as the functions that they name; built-in names and functions as they are.
    The folder that a command is started in is searched, too. ConfigError for what cannot be
    found or called."""
    found: list[str | Reward] = []
    for reward in rewards:
        if isinstance(reward, str) and reward not in BUILT_IN:
            module, _, name = reward.rpartition(".")
            if not module:
                raise ConfigError(
                    f"reward_funcs: unknown '{reward}'; known are {', '.join(BUILT_IN)}, or the "
                    "dotted "
                    "path of a function of your own, my_package.rewards.mine"
                )
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            try:
                reward = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"reward_funcs: cannot import {reward} ({error}); is its folder on PYTHONPATH?"
                ) from error
        if not isinstance(reward, str) and not callable(reward):
            raise ConfigError(
                f"reward_funcs: {reward!r:.80} cannot be called; give a function "
                "(completions, **columns) -> list of numbers"
            )
        found.append(reward)
    return found
