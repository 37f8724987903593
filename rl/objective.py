"""The maths of DCPO: advantages, clipped surrogate, exact KL (paper eq. 2–4).

    J = 1/G Σ_i 1/M_i Σ_m { min(ρ A_i, clip(ρ, 1 − ε, 1 + ε) A_i) − β KL(π_θ ‖ π_ref) }
    ρ = π_θ(a_m) / π_old(a_m)

Shapes: R rollouts (groups of G adjacent rows), M decisions of the longest rollout, K actions (chunk
sizes 1..K; action index 0 keeps one token), S speech positions. A rollout's positions without a
decision carry no loss.

TRL names the same quantities alike; on the same tensors `policy_loss` equals `trl.GRPOTrainer`'s
loss (tests). The one departure: the KL to the reference policy is summed over the K actions instead
of estimated from the action taken. The sampled estimator exp(d) - d - 1 explodes where forced
rollouts carry actions that the policy has abandoned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ADVANTAGE_EPSILON = 1e-4  # added to the standard deviation, as in TRL
LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
SCALES = ("group", "batch", "none")
FORCED_ROWS = ("policy_ratio", "none")


@dataclass(frozen=True)
class Advantages:
    values: Tensor  # [R] 0 where the reward is missing or its group has no spread
    valid: Tensor  # [R] bool, the reward exists
    zero_std: Tensor  # [R / G] bool, the group teaches nothing


def reward_std(rewards: Tensor) -> Tensor:
    """Sample standard deviation (ddof 1) along the last axis, ignoring NaN; 0 with fewer than
    two values."""
    count = (~rewards.isnan()).sum(-1)
    squares = (rewards - rewards.nanmean(-1, keepdim=True)).square().nansum(-1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def group_advantages(
    rewards: Tensor, group_size: int, scale: str = "group", batch_std: Tensor | None = None
) -> Advantages:
    """How much better each rollout is than its group (eq. 3): (reward - group mean) / (std + 1e-4).

    rewards [R] in nats, shares or whatever unit, NaN where a reward could not be computed: such a
    rollout counts neither in the mean nor in the std, and its advantage is 0. `scale`: std of the
    group, of the whole "batch" (`batch_std`, over all processes; default of these rewards), or
    "none".
    """
    groups = rewards.double().view(-1, group_size)
    mean, std = groups.nanmean(-1, keepdim=True), reward_std(groups)
    zero_std = std <= 1e-8
    centred = groups - mean
    if scale == "group":
        centred = centred / (std[:, None] + ADVANTAGE_EPSILON)
    elif scale == "batch":
        centred = centred / (
            (reward_std(rewards.double()) if batch_std is None else batch_std) + ADVANTAGE_EPSILON
        )
    elif scale != "none":
        raise ValueError(f"scale must be one of {SCALES}, not '{scale}'")
    values = centred.masked_fill(zero_std[:, None], 0).nan_to_num(0)
    return Advantages(values.view(-1).to(torch.float32), ~rewards.isnan(), zero_std)


def taken(log_dist: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities [R, M] of the actions taken [R, M], from those of all actions [R, M, K]."""
    return log_dist.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def exact_kl(log_dist: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) in nats, summed over the actions: [..., K] -> [...]."""
    return (log_dist.exp() * (log_dist - reference)).sum(-1)


def entropy(log_dist: Tensor) -> Tensor:
    """Entropy in nats: [..., K] -> [...]."""
    return -(log_dist.exp() * log_dist).sum(-1)


def kl_weight(maximum: float, epoch: int, epochs: int) -> float:
    """beta of an epoch: from 0 in the first to `maximum` in the last, linearly."""
    return maximum * epoch / max(1, epochs - 1)


def by_decision(advantages: Tensor) -> Tensor:
    """Advantages of rollouts [R] as [R, 1], of decisions [R, M] as they are."""
    return advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages


def clipped_surrogate(ratio: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A) (eq. 2): ratio [R, M], advantages
    of rollouts [R], or of decisions [R, M] -> [R, M]."""
    a = by_decision(advantages)
    return -torch.minimum(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a)


def aggregate(
    values: Tensor,
    mask: Tensor,
    weights: Tensor,
    loss_type: str = "grpo",
    normalizer: float | Tensor = 1.0,
) -> Tensor:
    """One number from values per decision [R, M], with mask [R, M] and a weight per rollout [R] (0
    = left out).

    grpo: mean over the decisions of a rollout, then over rollouts. bnpo: mean over all decisions.
    dapo: sum over decisions / `normalizer` (decisions per process, averaged over processes).
    dr_grpo: sum / (rollouts * `normalizer`), a constant number of decisions.
    """
    kept = mask * weights.unsqueeze(-1)
    rollouts = (weights > 0).sum().clamp(min=1)
    if loss_type == "grpo":
        return ((values * kept).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / rollouts
    if loss_type == "bnpo":
        return (values * kept).sum() / (mask * (weights > 0).unsqueeze(-1)).sum().clamp(min=1)
    if loss_type == "dapo":
        return (values * kept).sum() / normalizer
    if loss_type == "dr_grpo":
        return (values * kept).sum() / (rollouts * normalizer)
    raise ValueError(f"loss_type must be one of {LOSS_TYPES}, not '{loss_type}'")


@dataclass(frozen=True)
class PolicyLoss:
    loss: Tensor  # scalar to minimise
    ratio: Tensor  # [R, M]
    clipped: Tensor  # [R, M] bool: the clip removed this decision's gradient
    kl: Tensor  # [R, M]


def policy_loss(
    log_dist: Tensor,
    actions: Tensor,
    behaviour: Tensor,
    reference: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.0,
    epsilon: float = 0.2,
    loss_type: str = "grpo",
    normalizer: float | Tensor = 1.0,
) -> PolicyLoss:
    """The DCPO objective (eq. 4), negated: clipped surrogate + beta KL over the decisions.

    log_dist, reference [R, M, K]; actions [R, M] indices; behaviour [R, M] log-probabilities of the
    denominators; advantages [R] or [R, M], weights [R]; mask [R, M]. The loss always depends on
    log_dist, so that every process of a distributed run has a backward pass even if it has nothing
    to learn.
    """
    log_probs = taken(log_dist, actions)
    # exp(20) is far outside every clip; it keeps 0 * inf from becoming NaN where a policy has
    # collapsed
    ratio = (log_probs - behaviour).clamp(-20, 20).exp()
    kl = exact_kl(log_dist, reference)
    values = clipped_surrogate(ratio, advantages, epsilon) + beta * kl
    a = by_decision(advantages)
    clipped = ((ratio < 1 - epsilon) & (a < 0)) | ((ratio > 1 + epsilon) & (a > 0))
    return PolicyLoss(
        aggregate(values, mask, weights, loss_type, normalizer),
        ratio.detach(),
        clipped,
        kl.detach(),
    )
