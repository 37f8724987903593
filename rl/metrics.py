"""Metrics of a training run, merged over steps and processes, and its progress bar."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from dcar.train.callbacks import ShownProgress
from rl import objective
from rl.rewards import Reward, RolloutRecord, names_of

if TYPE_CHECKING:
    from rl.rollout import RolloutBatch


class Metrics:
    """Sums and counts between two lines of the log; a mean is taken once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, float]] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, total: float | np.ndarray, count: float = 1.0) -> None:
        """Add to a mean, which is logged as sum of totals / sum of counts."""
        a, b = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = a + total, b + float(count)

    def add_values(self, name: str, values: Iterable[float]) -> None:
        """Add the finite ones of the values to a mean."""
        finite = [float(v) for v in values if math.isfinite(v)]
        self.add(name, sum(finite), len(finite))

    def add_max(self, name: str, value: float) -> None:
        self._maxima[name] = max(float(value), self._maxima.get(name, -math.inf))

    def add_counts(self, name: str, counts: Sequence[float] | np.ndarray) -> None:
        """Add counts, which are logged as a list of shares of their total."""
        new = np.asarray(counts, np.float64)
        self.add(name, new, new.sum())

    def drain(self) -> dict[str, float | list[float]]:
        """Return the quantities of all processes and reset them. Every process has to call it."""
        states = gather_object([(self._sums, self._maxima)])
        self._sums, self._maxima = {}, {}
        merged = Metrics()
        for sums, maxima in states:
            for name, (total, count) in sums.items():
                merged.add(name, total, count)
            for name, value in maxima.items():
                merged.add_max(name, value)
        return {
            name: np.divide(a, b).tolist() for name, (a, b) in merged._sums.items() if b
        } | merged._maxima


def scalars(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs in which a list is replaced by one number per entry, name/1, name/2, …,
    because trackers accept only numbers."""
    values: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, list):
            values |= {f"{name}/{i}": number for i, number in enumerate(value, start=1)}
        else:
            values[name] = value
    return values


def add_rollouts(
    metrics: Metrics,
    batch: RolloutBatch,
    zero_std: Tensor,
    rewards: Sequence[Reward],
    chunk_range: Sequence[int],
    num_actions: int,
) -> None:
    """Add rewards, word errors, decisions and durations of the rollouts of a step; zero_std
    [groups] bool."""
    records, totals = batch.records, batch.rewards.tolist()
    sampled = [r for r in records if not r.forced]
    compared = sampled or records
    metrics.add_values("reward", totals)
    metrics.add_values("reward_std", [float(objective.reward_std(batch.rewards))])
    metrics.add_values(
        "reward_forced", [v for r, v in zip(records, totals, strict=True) if r.forced]
    )
    metrics.add_values(
        "reward_sampled", [v for r, v in zip(records, totals, strict=True) if not r.forced]
    )
    for name, values in zip(names_of(rewards), batch.parts.T.tolist(), strict=True):
        metrics.add_values(f"rewards/{name}/mean", values)
    for name, rows in (("wer", records), ("wer_sampled", sampled)):
        scored = [r.errors for r in rows if r.errors is not None]
        metrics.add(name, sum(e.errors for e in scored), sum(e.reference_words for e in scored))
    metrics.add("frac_reward_zero_std", float(zero_std.sum()), len(zero_std))
    add_decisions(metrics, compared, chunk_range, num_actions)
    metrics.add(
        "duration_ratio",
        sum(len(r.result.tokens) for r in compared),
        sum(len(r.item.reference_tokens) for r in compared),
    )
    for name, value in batch.seconds.items():
        metrics.add(f"seconds_{name}", value)


def add_decisions(
    metrics: Metrics, records: Sequence[RolloutRecord], chunk_range: Sequence[int], num_actions: int
) -> None:
    """Add tokens per pass, truncation, the share of chunk sizes outside the range, and how often
    each size was chosen."""
    results = [r.result for r in records]
    # dtype given: a process may have no prompt
    actions = np.array([a for r in results for a in r.sizes], dtype=np.int64)
    metrics.add(
        "tokens_per_pass", sum(len(r.tokens) for r in results), sum(r.passes for r in results)
    )
    metrics.add("truncated", sum(r.truncated for r in results), len(results))
    if chunk_range:
        metrics.add("out_of_range", float((~np.isin(actions, chunk_range)).sum()), len(actions))
    metrics.add_counts("action_histogram", np.bincount(actions - 1, minlength=num_actions))


@torch.no_grad()
def add_update(
    metrics: Metrics, out: objective.PolicyLoss, log_probs: Tensor, mask: Tensor, beta: float
) -> None:
    """Add entropy, KL, clipping and largest ratio of an update; mask [R, M] of the decisions
    that count in the loss."""
    by_decision = (torch.ones_like(mask), objective.entropy(log_probs), out.kl, out.clipped)
    largest = out.ratio.masked_fill(mask == 0, -math.inf).max()
    totals = torch.stack([*((values * mask).sum() for values in by_decision), largest])
    decisions, *sums, ratio = totals.tolist()  # one read of the device
    for name, total in zip(("entropy", "kl", "clip_fraction"), sums, strict=True):
        metrics.add(name, total, decisions)
    metrics.add("beta", beta)
    if decisions:
        metrics.add_max("ratio_max", ratio)


class ShownDCPO(ShownProgress):
    """Progress of stage two."""

    SHOWN: ClassVar[dict[str, str]] = {
        "reward_sampled": "sampled",
        "reward_forced": "forced",
        "wer": "wer",
        "tokens_per_pass": "tok/pass",
        "entropy": "entropy",
        "failed_rewards": "failed",
    }

    def evaluation(self, logs: dict[str, Any]) -> str:
        """Return errors (WER, or CER) and tokens per pass of an evaluation."""
        if "eval_wer" not in logs:
            return ""
        return (
            f"errors {100 * logs['eval_wer']:.2f} % at {logs['eval_tokens_per_pass']:.2f} tokens "
            f"per pass (sampled {100 * logs['eval_wer_sampled']:.2f} % at "
            f"{logs['eval_tokens_per_pass_sampled']:.2f})"
        )
