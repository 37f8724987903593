"""Advantages of the rollouts of an update, over all of its micro-batches and processes.

As in the paper, a rollout has one advantage: how much better its reward is than its group's
(`rl.objective.group_advantages`). With `credit=decision`, each of its decisions has its own
(rl/credit.py). In both cases a reward for speed can be added (rl/pass_cost.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate.utils import gather, gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rl import objective
from rl.config import DCPOConfig
from rl.credit import decision_advantages, located_costs, scaled
from rl.pass_cost import PassCost
from rl.rewards import Reward, locates, weighted_sum
from rl.rollout import RolloutBatch
from rl.transcription import RolloutRecord


@dataclass(frozen=True)
class AdvantageEstimator:
    """Source of advantages. smallest: shortest chunk that the policy can choose. Every process has
    to call it."""

    config: DCPOConfig
    rewards: Sequence[Reward]
    weights: Sequence[float]
    smallest: int
    pass_cost: PassCost | None = None

    def __call__(self, batches: Sequence[RolloutBatch]) -> objective.Advantages:
        """Return the advantages of the rollouts of all micro-batches: values [R], or [R, M] with
        credit by decision; 0 where a reward is NaN."""
        records = [record for batch in batches for record in batch.records]
        totals = torch.cat([batch.rewards for batch in batches])  # [R]
        if self.config.credit == "utterance":
            if self.pass_cost is not None:
                totals = totals + self._saved_by_rollout(self.pass_cost, records).to(totals)
            return self._against_group(totals)
        parts = np.concatenate([batch.parts for batch in batches])
        values = self._by_decision(records, totals, parts)
        return replace(self._against_group(totals), values=values)

    def _against_group(self, totals: Tensor) -> objective.Advantages:
        """Return the advantages of rollouts; the std of the batch is that of all processes."""
        scale, std = self.config.scale_rewards, None
        if scale == "batch":
            std = objective.reward_std(gather(totals))
        return objective.group_advantages(totals, self.config.num_generations, scale, std)

    def _saved_by_rollout(self, cost: PassCost, records: Sequence[RolloutRecord]) -> Tensor:
        """Return the reward for speed of every rollout [R]: 0 at the mean size."""
        mean = cost.per_token_at(mean_size(records))
        sizes = [float(np.mean(r.result.sizes or math.nan)) for r in records]
        spent = torch.tensor([cost.per_token_at(size) for size in sizes])
        return self.config.points_per_percent * (1 - spent / mean).nan_to_num(0.0)

    def _by_decision(
        self, records: Sequence[RolloutRecord], totals: Tensor, parts: np.ndarray
    ) -> Tensor:
        """Return the advantages by decision [R, M], given parts [R, number of rewards]: for rewards
        that locate their losses, from the places after each decision; for all others, by
        rollout."""
        config, group = self.config, self.config.num_generations
        # 1. by rollout [R]; failed ones are left out of means
        weights = np.asarray(self.weights)
        others = [j for j, reward in enumerate(self.rewards) if not locates(reward)]
        rest = torch.from_numpy(weighted_sum(parts[:, others], weights[others])).to(totals)
        rest = rest.masked_fill(totals.isnan(), math.nan)
        # 2. by decision [M] of each rollout, from the costs at the places after it
        weighted = zip(self.rewards, self.weights, strict=True)
        locating = [(reward, weight) for reward, weight in weighted if locates(reward)]
        located = [  # on the host, once an update: alignments and transcripts are there
            [] if failed else located_costs(record, locating)
            for record, failed in zip(records, totals.isnan().tolist(), strict=True)
        ]
        starts = [
            [p - r.result.prompt_length + 1 for p in r.result.decision_positions] for r in records
        ]
        # tokens that all choices share: those of the smallest chunk; none among several candidates
        shortest = self.smallest if config.num_candidates == 1 else 0
        charges = []
        for i in range(0, len(records), group):
            charges += decision_advantages(
                located[i : i + group], starts[i : i + group], config.credit_window, shortest
            )
        # 3. and from the time that the decision saves
        if self.pass_cost is not None:
            sizes = [np.array(r.result.sizes) for r in records]
            saved = self.pass_cost.saved(sizes, mean_size(records), config.credit_window)
            charges = [
                values + config.points_per_percent * more
                for values, more in zip(charges, saved, strict=True)
            ]
        # 4. on the scale of advantages, padded with 0
        if config.scale_rewards == "batch":
            charges = scaled(charges, group, gather_object(charges))
        elif config.scale_rewards == "group":
            charges = scaled(charges, group)
        padded = pad_sequence([torch.from_numpy(np.nan_to_num(v)) for v in charges], True)
        by_rollout = self._against_group(rest).values[:, None]
        return by_rollout + padded.to(rest.device, torch.float32)


def mean_size(records: Sequence[RolloutRecord]) -> float:
    """Return the mean of the sizes that were chosen in all processes."""
    sizes = [size for r in records for size in r.result.sizes]
    sums, counts = zip(*gather_object([(sum(sizes), len(sizes))]), strict=True)
    return sum(sums) / max(1, sum(counts))
