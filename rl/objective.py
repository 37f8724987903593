"""Objective of DCPO: advantages, clipped surrogate, exact KL (paper eq. 2–4).

    J = 1/G Σ_i 1/M_i Σ_m { min(ρ A_i, clip(ρ, 1 − ε, 1 + ε) A_i) − β KL(π_θ ‖ π_ref) }
    ρ = π_θ(a_m) / π_old(a_m)

Shapes: R rollouts (groups of G adjacent rows), M decisions of the longest rollout, K actions (chunk
sizes 1..K; action index 0 keeps one token), S speech positions. Positions of a rollout without a
decision do not contribute to the loss.

The names are those of TRL; on the same tensors `policy_loss` equals the loss of `trl.GRPOTrainer`
(tests). There is one departure: the KL to the reference policy is summed over the K actions instead
of estimated from the action taken. The sampled estimator exp(d) - d - 1 explodes if forced rollouts
contain actions that the policy has abandoned.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ADVANTAGE_EPSILON = 1e-4  # added to the standard deviation, as in TRL
LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
SCALES = ("group", "batch", "none")


@dataclass(frozen=True)
class Advantages:
    """Advantages of rollouts, and the rollouts and groups that have none."""

    values: Tensor  # [R], 0 if the reward is missing or its group has no spread
    valid: Tensor  # [R] bool, True if the reward exists
    zero_std: Tensor  # [R / G] bool, True if all rewards of the group are equal


def reward_std(rewards: Tensor) -> Tensor:
    """Return the sample standard deviation (ddof 1) along the last axis, ignoring NaN; 0 with
    fewer than two values."""
    count = (~rewards.isnan()).sum(-1)
    squares = (rewards - rewards.nanmean(-1, keepdim=True)).square().nansum(-1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def group_advantages(
    rewards: Tensor, group_size: int, scale: str = "group", batch_std: Tensor | None = None
) -> Advantages:
    """Return how much better each rollout is than its group (eq. 3): (reward - group mean) / (std +
    1e-4).

    rewards: [R] in any unit, NaN if a reward could not be computed: such a rollout is in neither
    the mean nor the std, and its advantage is 0. scale: std of the "group", of the whole "batch"
    (`batch_std`, over all processes; by default of these rewards), or "none". Raises ValueError for
    another scale.
    """
    groups = rewards.double().view(-1, group_size)
    mean, std = groups.nanmean(-1, keepdim=True), reward_std(groups)
    zero_std = std <= 1e-8
    centred = groups - mean
    if scale == "group":
        centred = centred / (std[:, None] + ADVANTAGE_EPSILON)
    elif scale == "batch":
        if batch_std is None:
            batch_std = reward_std(rewards.double())
        centred = centred / (batch_std + ADVANTAGE_EPSILON)
    elif scale != "none":
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, not '{scale}'")
    values = centred.masked_fill(zero_std[:, None], 0).nan_to_num(0)
    return Advantages(values.view(-1).to(torch.float32), ~rewards.isnan(), zero_std)


def taken(log_dist: Tensor, actions: Tensor) -> Tensor:
    """Return the log-probabilities [R, M] of the actions taken [R, M], given those of all
    actions [R, M, K]."""
    return log_dist.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def exact_kl(log_dist: Tensor, reference: Tensor) -> Tensor:
    """Return KL(policy || reference) in nats, summed over the actions: [..., K] -> [...]."""
    return (log_dist.exp() * (log_dist - reference)).sum(-1)


def entropy(log_dist: Tensor) -> Tensor:
    """Return the entropy in nats: [..., K] -> [...]."""
    return -(log_dist.exp() * log_dist).sum(-1)


def kl_weight(maximum: float, epoch: int, epochs: int) -> float:
    """Return beta of an epoch, which grows linearly from 0 in the first epoch to `maximum` in
    the last."""
    return maximum * epoch / max(1, epochs - 1)


def by_decision(advantages: Tensor) -> Tensor:
    """Return advantages of rollouts [R] as [R, 1], and those of decisions [R, M] unchanged."""
    return advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages


def clipped_surrogate(ratio: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """Return -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A) (eq. 2), [R, M], given ratio
    [R, M] and advantages of rollouts [R] or of decisions [R, M]."""
    a = by_decision(advantages)
    return -torch.minimum(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a)


def aggregate(
    values: Tensor,
    mask: Tensor,
    weights: Tensor,
    loss_type: str = "grpo",
    normalizer: float | Tensor = 1.0,
) -> Tensor:
    """Reduce values per decision [R, M] to one number, given mask [R, M] and a weight per rollout
    [R] (0 = left out).

    grpo: mean over the decisions of a rollout, then over rollouts. bnpo: mean over all decisions.
    dapo: sum over decisions / `normalizer` (their number per micro-batch, averaged over the
    micro-batches of an update on all processes).
    dr_grpo: sum / (rollouts * `normalizer`), a constant number of decisions. Raises ValueError for
    another loss type.
    """
    counted = mask * weights.unsqueeze(-1)
    rollouts = (weights > 0).sum().clamp(min=1)
    if loss_type == "grpo":
        return ((values * counted).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / rollouts
    if loss_type == "bnpo":
        return (values * counted).sum() / (mask * (weights > 0).unsqueeze(-1)).sum().clamp(min=1)
    if loss_type == "dapo":
        return (values * counted).sum() / normalizer
    if loss_type == "dr_grpo":
        return (values * counted).sum() / (rollouts * normalizer)
    raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}, not '{loss_type}'")


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of an update, with its terms per decision."""

    loss: Tensor  # scalar to minimise
    ratio: Tensor  # [R, M]
    clipped: Tensor  # [R, M] bool, True if clipping removed this decision's gradient
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
    """Return the negated DCPO objective (eq. 4): clipped surrogate + beta KL over the decisions.

    log_dist, reference [R, M, K]; actions [R, M] indices; behaviour [R, M] log-probabilities of the
    denominators; advantages [R] or [R, M], weights [R]; mask [R, M]. The loss always depends on
    log_dist, so that every process of a distributed run has a backward pass even if it has nothing
    to learn.
    """
    log_probs = taken(log_dist, actions)
    # exp(20) is far outside every clip range; the clamp prevents 0 * inf = NaN if a policy has
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
