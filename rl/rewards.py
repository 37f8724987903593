"""Reward functions of rollouts. They are called as TRL calls them, and added with weights.

    def reward(completions, **columns) -> list[float | None]

Paper, eq. 5: R = (WER_gt − WER) − (alpha / L) Σ_m distance(a_m, range), WER as a fraction. The
paper's are `wer` and `range_penalty`. A reward that cannot be computed is NaN, never 0: its rollout
is masked and counted, and the cause is kept. None means that a reward does not apply to a rollout,
whose total is the sum of the others, as in TRL.
"""

from __future__ import annotations

import inspect
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
from dcar.sources.code import code_digest
from dcar.sources.packages import imported
from dcar.text.languages import language_of
from dcar.text.wer import character_errors, word_costs
from rl.credit import Located
from rl.transcription import (
    NAN,
    RolloutRecord,
    align,
    answers,
    cause,
    check_aligns,
    of_texts,
    transcribe,
)

if TYPE_CHECKING:
    from rl.config import DCPOConfig

Tokens = Sequence[Sequence[int]]
LARGEST = float(np.finfo(np.float32).max)
"""Largest magnitude of a reward; the spread of larger ones would overflow."""
Rollouts = Sequence[RolloutRecord]
Reward = Callable[..., Sequence[float | None]]
"""Reward function, with optional attributes.

`name`: the name under which it is logged; by default that of the function. `needs_audio`: True if
it needs waveforms; by default if it has a parameter `audio`, `sample_rate` or `transcripts`.
`locates`: True if it stores in `rollouts[i].located` where it was lost, for credit=decision.
"""


def reward_arguments(records: Rollouts) -> dict[str, Any]:
    """Return the keyword arguments of reward functions by name: lists with one entry per rollout,
    except for sample_rate (Hz).

    completions: generated tokens (completion_ids too, as in TRL); chunk_sizes: sizes of all
    decisions; prompts, text: text to be spoken; text_ids: its phonemes; audio: float32 samples,
    None if the vocoder failed; transcripts: None if there is no transcript; reference_tokens:
    tokens of the recording; utterance_id, speaker, language, duration (seconds of the recording);
    rollouts: everything (`RolloutRecord`). Further columns of the data set follow.
    """
    items = [r.item for r in records]
    # copies, because a reward may change what it receives in place
    columns: dict[str, Any] = {
        "completions": [list(r.result.tokens) for r in records],
        "completion_ids": [list(r.result.tokens) for r in records],
        "chunk_sizes": [list(r.result.sizes) for r in records],
        "prompts": [i.text for i in items],
        "text": [i.text for i in items],
        "text_ids": [i.target_text_ids for i in items],
        "reference_tokens": [list(i.reference_tokens) for i in items],
        "speaker": [i.speaker for i in items],
        "utterance_id": [i.utterance_id for i in items],
        "duration": [i.duration for i in items],
        "language": [i.language for i in items],
        "transcripts": [r.transcript for r in records],
        "rollouts": records,
    }
    if any(r.sample_rate for r in records):
        columns |= {
            "audio": [None if r.wave is None else r.wave.copy() for r in records],
            "sample_rate": max(r.sample_rate for r in records),
        }
    further = items[0].columns if items else {}
    return {**{name: [i.columns.get(name) for i in items] for name in further}, **columns}


def ask(reward: Reward, records: Rollouts, **more: Any) -> list[float | None]:
    """Return one number per rollout, None if the reward does not apply to it. Raises ValueError
    if the reward returns more or fewer numbers than there are rollouts."""
    answers = reward(**reward_arguments(records), **more)
    values = [None if value is None else float(value) for value in answers]
    if len(values) != len(records):
        raise ValueError(
            f"returned {len(values)} numbers for {len(records)} rollouts; return one per rollout"
        )
    return values


def score(
    records: Rollouts,
    rewards: Sequence[Reward],
    weights: Sequence[float],
    recognizer: Recognizer | None = None,
    **more: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return all rewards of a batch, float64: totals [R], the weighted sums of those that apply,
    NaN if one could not be computed or none applies; and parts [R, number of rewards], NaN for a
    missing one.

    If a reward that needs waveforms returns None for a rollout whose synthesis or transcription
    failed, it counts as not computed. recognizer: transcribes for rewards that have a parameter
    `transcripts`. more: further keyword arguments for every reward.
    """
    parts = np.full((len(records), len(rewards)), NAN)
    applies = np.full(parts.shape, True)
    names = names_of(rewards)
    for j, reward in enumerate(rewards):
        try:
            if recognizer is not None and "transcripts" in named_by(reward):
                transcribe(records, recognizer)
            values = ask(reward, records, **more)
            applies[:, j] = [
                value is not None or (needs_audio(reward) and r.failure is not None)
                for value, r in zip(values, records, strict=True)
            ]
            parts[:, j] = [NAN if value is None else value for value in values]
        except Exception as error:  # a user's reward may raise anything; it is counted
            for record in records:
                record.fail(f"reward {names[j]}: {cause(error)}")
    parts[np.abs(parts) > LARGEST] = NAN
    failed = np.isnan(parts) & applies
    for record, bad, applied in zip(records, failed, applies, strict=True):
        if bad.any():
            record.fail(f"{names[bad.argmax()]} returned no finite number of float32")
        elif not applied.any():
            record.fail("no reward applies to it: all returned None")
    return np.where(failed.any(1) | ~applies.any(1), NAN, weighted_sum(parts, weights)), parts


def weighted_sum(parts: np.ndarray, weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the weighted sums [R] of the rewards' parts [R, J], leaving out NaN."""
    return np.nan_to_num(parts) @ np.asarray(weights, dtype=np.float64)


# --- properties of reward functions ---------------------------------------------------------------


def unwrapped(reward: Any) -> Any:
    """Return the callable inside `functools.partial` objects."""
    return unwrapped(reward.func) if isinstance(reward, partial) else reward


def name_of(reward: Any) -> str:
    """Return the attribute `name` of a reward, or the name of its function or class."""
    inside = unwrapped(reward)
    return (
        getattr(inside, "name", None) or getattr(inside, "__name__", None) or type(inside).__name__
    )


def names_of(rewards: Sequence[Any]) -> list[str]:
    """Return the names under which rewards are logged; repeated names are numbered: energy,
    energy_2, …"""
    names: list[str] = []
    for reward in rewards:
        first = name_of(reward)
        candidates = (first, *(f"{first}_{number}" for number in range(2, len(rewards) + 1)))
        names.append(next(name for name in candidates if name not in names))
    return names


def named_by(reward: Any) -> frozenset[str]:
    """Return the parameter names of a reward function; empty if it has no readable signature."""
    try:
        return frozenset(inspect.signature(reward).parameters)
    except (TypeError, ValueError):
        return frozenset()


def needs_audio(reward: Any) -> bool:
    """Return True if a reward needs the waveforms of rollouts."""
    inferred = named_by(reward) & {"audio", "sample_rate", "transcripts"}
    return bool(getattr(unwrapped(reward), "needs_audio", inferred))


def locates(reward: Any) -> bool:
    """Return True if a reward reports where it was lost."""
    return getattr(reward, "locates", False)


def needs_sound(rewards: Sequence[Reward]) -> bool:
    """Return True if one of the rewards needs waveforms; otherwise rollouts need no vocoder."""
    return any(needs_audio(reward) for reward in rewards)


def check_locate(rewards: Sequence[Reward]) -> None:
    """Raise ConfigError for credit by decision if no reward locates its losses, or one that
    needs waveforms does not. Rewards that need none (range_penalty) may be added to one that
    does; they keep their credit by rollout."""
    whole = [name_of(r) for r in rewards if not locates(r) and needs_audio(r)]
    if whole or not any(locates(r) for r in rewards):
        problem = "none of these does"
        if whole:
            problem = f"errors are not located by {', '.join(whole)} (judging whole utterances)"
        raise ConfigError(
            f"credit=decision needs rewards that locate errors, but {problem}: set "
            "reward_funcs=[wer], [log_likelihood], [token_likelihood] or several of these, or "
            "credit=utterance"
        )


# --- built-in rewards -----------------------------------------------------------------------------


class WERReward:
    """WER of the recording (resynthesised from its tokens) minus WER of the rollout, both capped
    (DCAR paper, eq. 5).

    `ground_truth` maps utterance ids to WER_gt; an utterance without one counts as 0. The cap keeps
    the insertions of runaway rollouts from dominating the spread of their group.

    locate: also report the characters of the text at which words are wrong, for credit by decision;
    a CTC recogniser aligns the text with the speech. This is the paper's reward, but not its
    credit.
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
        self.recognizer, self.ground_truth = recognizer, ground_truth or {}
        self.cap, self.locates = cap, locate

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
            else min(self.ground_truth.get(r.item.utterance_id, 0.0), self.cap)
            - min(r.errors.rate, self.cap)
            for r in rollouts
        ]


class CERReward:
    """Negative CER of the rollout, capped: a finer measure than WER for a weak recogniser, because
    it counts partly recognised words.

    Not in the paper. There is no term for the recording: it is the same for a whole group, from
    whose mean the advantages are measured.
    """

    name = "cer"
    needs_audio = True

    def __init__(self, recognizer: Recognizer, cap: float = 1.0):
        self.recognizer, self.cap = recognizer, cap

    def __call__(self, completions: Tokens, *, rollouts: Rollouts, **columns: Any) -> list[float]:
        transcribe(rollouts, self.recognizer)
        return [
            NAN
            if r.transcript is None
            else -min(character_errors(r.item.text, r.transcript, r.item.language).rate, self.cap)
            for r in rollouts
        ]


class LikelihoodReward:
    """Log-likelihood of the text under the recogniser, in nats per character, times `scale`: denser
    than the WER of one transcript. At least `floor` nats per character, for example if the wave is
    too short for its text.

    locate: also report the cost of every unit of the text on the likeliest path, for credit by
    decision. The costs of a unit's frames are summed, so that the total equals the reward, except
    for the less likely paths; no unit costs more than the floor. Frames and tokens divide the same
    wave. If a wave is too short for its text, every unit is at the floor.
    """

    name = "log_likelihood"
    needs_audio = True

    def __init__(
        self, recognizer: Any, scale: float = 0.1, floor: float = -10.0, locate: bool = False
    ):
        if not hasattr(recognizer, "log_likelihood"):
            raise ConfigError(
                f"reward log_likelihood: recogniser {recognizer.name} returns transcripts but no "
                "likelihoods; keep it with reward_funcs=[wer,range_penalty], or "
                "[wer,cer,range_penalty] if it is weak, or use a CTC recogniser (starter, "
                "encoder:…, nemo:… or ctc:…), which returns both"
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
                for r, value in answers(rollouts, of_texts(self.recognizer, "log_likelihood"))
            }
        values |= {id(r): self.floor for r in rollouts if r.is_silent}
        return [
            self.scale * max(values[id(r)], self.floor) if id(r) in values else NAN
            for r in rollouts
        ]


def aligned(records: Rollouts, recognizer: Any) -> list[tuple[RolloutRecord, Alignment]]:
    """Return the rollouts in which a recogniser can locate losses, each with its alignment."""
    alignable = [r for r in records if recognizer in r.alignments and r.has_places]
    return [(r, r.alignments[recognizer]) for r in alignable]


def located_by(alignment: Alignment, record: RolloutRecord, scale: float, floor: float) -> Located:
    """Return the cost of every unit of a rollout's text by an alignment, as a share of the
    text's characters: `scale` per nat, at most −floor nats. Frames and tokens divide the same
    speech; the rollout must have tokens."""
    # scaled so that their mean is in nats per character
    costs = np.minimum(alignment.costs * len(alignment.costs) / alignment.characters, -floor)
    return _located(scale * costs, alignment, record)


def located_words(alignment: Alignment, record: RolloutRecord, cap: float) -> Located:
    """Return the units of a rollout's text that are in wrong words, as shares of its words, at
    most `cap` in total. Frames and tokens divide the same speech; the rollout must have tokens.
    Subwords divide the characters evenly."""
    item, units = record.item, len(alignment.costs)
    characters = word_costs(item.text, alignment.transcript, item.language)
    errors = np.bincount(np.arange(len(characters)) * units // len(characters), characters, units)
    rules = language_of(item.language)
    rate = errors / len(rules.split(rules.words(item.text)))
    return _located(units * rate * min(1.0, cap / max(rate.sum(), cap)), alignment, record)


def _located(costs: np.ndarray, alignment: Alignment, record: RolloutRecord) -> Located:
    """Return the costs of the units of an alignment, whose mean is the reward lost, with the
    unit that each token speaks."""
    tokens = len(record.result.tokens)
    # centre of each token, in frames
    middle = (np.arange(tokens) + 0.5) * len(alignment.units) / tokens
    return Located(
        costs,
        alignment.units[middle.astype(np.int64)],
        len(costs) / len(record.item.reference_tokens),
    )


class TokenLikelihoodReward:
    """Log-likelihood of the sentence's phonemes given the generated tokens, in nats per phoneme,
    times `scale`: the counterpart of `LikelihoodReward` that needs no vocoder. At least `floor`
    nats per phoneme, for example if there are too few tokens for the text. Not in the paper.

    locate: also report the cost of every phoneme on the likeliest path, for credit by decision; see
    `LikelihoodReward`.
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
    """-(alpha / L) times the sum over decisions of the distance to the guidance range, with L
    generated tokens (DCAR paper, eq. 5)."""

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
    """Load the token recogniser in a folder (starter = the shipped one) for a prepared corpus.
    Raises CheckpointError if it reads other tokens or phonemes than those of the corpus."""
    if not data:
        raise ConfigError(
            "reward token_likelihood needs the tokens and phonemes of the corpus: give "
            "data=<folder written by dcar prepare>"
        )
    recognizer = load_token_recognizer(folder, device)
    recognizer.check_reads(prepared_info(data), data)
    return recognizer


BUILT_IN: dict[str, Callable[[DCPOConfig, Recognizer], Reward]] = {
    "wer": lambda args, recognizer: WERReward(recognizer, locate=args.credit == "decision"),
    "cer": lambda args, recognizer: CERReward(recognizer),
    "log_likelihood": lambda args, recognizer: LikelihoodReward(
        recognizer, locate=args.credit == "decision"
    ),
    "token_likelihood": lambda args, recognizer: TokenLikelihoodReward(
        corpus_token_recognizer(args.token_recognizer, args.data, str(args.device)),
        locate=args.credit == "decision",
    ),
    "range_penalty": lambda args, recognizer: RangePenalty(args.chunk_range, args.alpha),
}
ASKS = {"wer", "cer", "log_likelihood"}  # rewards that need a recogniser


def path_of(reward: str | Reward) -> str:
    """Return the name of a reward in a recipe: its built-in name or dotted path, or else
    `name_of`."""
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__qualname__", "")
    return f"{getattr(reward, '__module__', '')}.{name}" if name else name_of(reward)


def version_of(reward: str | Reward) -> str:
    """Return the name of a reward, of one that is not built in with the digest of its code."""
    own = "" if isinstance(reward, str) else f"@{code_digest(reward)[:8]}"
    return f"{path_of(reward)}{own}"


def asks_recognizer(rewards: Sequence[str | Reward]) -> bool:
    """Return True if one of the rewards (or names of `BUILT_IN`) needs the recogniser of a run."""
    return any(r in ASKS if isinstance(r, str) else "transcripts" in named_by(r) for r in rewards)


def check_signature(reward: Reward) -> None:
    """Raise ConfigError for a reward that is a coroutine, or does not take the columns that it is
    not interested in."""
    called = f"reward_funcs: {name_of(reward)}"
    inside = unwrapped(reward)
    if any(map(inspect.iscoroutinefunction, (inside, type(inside).__call__))):
        raise ConfigError(
            f"{called} is async: make it a plain function; what waits for a service can use "
            "asyncio.run or threads inside"
        )
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):
        return
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        raise ConfigError(
            f"{called} has no **columns: rewards receive prompts, completions and every column of "
            "the data by name; write (completions, **columns)"
        )


def import_rewards(rewards: Sequence[str | Reward]) -> list[str | Reward]:
    """Return rewards in which dotted paths are replaced by the functions that they name;
    built-in names and functions stay. The working directory is searched, too. Raises ConfigError
    for a path that cannot be imported, and for an object that cannot be called."""
    imported_rewards: list[str | Reward] = []
    for reward in rewards:
        if isinstance(reward, str) and reward not in BUILT_IN:
            if "." not in reward:
                raise ConfigError(
                    f"reward_funcs: unknown '{reward}'; use {', '.join(BUILT_IN)}, or the dotted "
                    "path of a function of your own, for example my_package.rewards.mine"
                )
            reward = imported("reward_funcs", reward)
        if not isinstance(reward, str) and not callable(reward):
            raise ConfigError(
                f"reward_funcs: {reward!r:.80} is not callable; give a function (completions, "
                "**columns) -> list of numbers"
            )
        if callable(reward):
            check_signature(reward)
        imported_rewards.append(reward)
    return imported_rewards
