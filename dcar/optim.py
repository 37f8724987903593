"""ScaledAdam and Eden, the optimiser and schedule of the paper's stage one (App. C.1),
re-implemented; and a cosine schedule.

ScaledAdam (Yao et al. 2023, Zipformer, §3.3): Adam whose step is proportional to each tensor's own
root mean square, and which also learns that scale; gradients are clipped relative to a running
median of their scaled norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class ScaledAdam(Optimizer):
    """Adam with parameter-scaled steps, for whole tensors (not for those that FSDP or DeepSpeed
    shard).

    A step consists of a few operations on lists of tensors (`torch._foreach_*`), without a read by
    the host. A step of a group whose gradient is not finite is skipped on the device: weights and
    state stay as they are.

    Args:
        lr: step relative to a tensor's RMS (0.01 in the paper, far larger than Adam's).
        betas: decay of the first and second moments.
        clipping_scale: clip gradients above this multiple of the median norm; None = no clipping.
        clipping_update_period: number of past steps in the median.
        scalar_lr_scale: step of the learned scale, and of tensors with a single element, relative
            to lr.
        min_rms: RMS below which steps no longer become smaller.
        max_rms: largest RMS that a tensor may grow to.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        clipping_scale: float | None = 2.0,
        clipping_update_period: int = 1000,
        scalar_lr_scale: float = 0.1,
        eps: float = 1e-8,
        min_rms: float = 1e-5,
        max_rms: float = 3.0,
    ):
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                clipping_scale=clipping_scale,
                clipping_update_period=clipping_update_period,
                scalar_lr_scale=scalar_lr_scale,
                eps=eps,
                min_rms=min_rms,
                max_rms=max_rms,
            ),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None and p.numel()]
            if parameters:
                self._update(sorted(parameters, key=lambda p: p.numel() == 1), group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict) -> None:
        """Make one step of a group; tensors with a single element, which have no scale, come
        last. Vectors have one number per tensor [N]."""
        n, scaled = len(parameters), sum(p.numel() > 1 for p in parameters)
        states = [self._state_of(p) for p in parameters]
        rms = rms_of(parameters).clamp(min=group["min_rms"])
        fine, clip = self._clip(group, parameters, rms)
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        flat.mul_(clip).masked_fill_(~fine, 0.0)  # filled, because 0 * inf is not 0
        gradients = _unflatten_dense_tensors(flat, parameters)

        # the gradient of the tensor's scale is sum(parameter * gradient); the scale has Adam
        # moments of its own
        values = [*gradients, *sums(list(torch._foreach_mul(parameters, gradients)))]
        moments = [s[name] for name in ("moment", "scale_moment") for s in states]
        squares = [s[name] for name in ("square", "scale_square") for s in states]
        beta1, beta2 = group["betas"]
        # in a skipped step nothing decays
        torch._foreach_mul_(moments, torch.where(fine, beta1, 1.0))
        torch._foreach_add_(moments, values, alpha=1 - beta1)
        torch._foreach_mul_(squares, torch.where(fine, beta2, 1.0))
        torch._foreach_addcmul_(squares, values, values, value=1 - beta2)
        updates = [s["updates"] for s in states]
        torch._foreach_add_(updates, [torch.where(fine, 1.0, 0.0)] * n)

        # Adam's (moment / correction1) / (sqrt(square / correction2) + eps) is front * moment /
        # (sqrt(square) + eps)
        counts = torch.stack(updates).clamp(min=1)  # still 0 if no step was taken yet
        root2 = (1 - beta2**counts).sqrt()
        front, eps = root2 / (1 - beta1**counts), root2 * group["eps"]
        scale_steps = front * torch.stack(moments[n:]) / (torch.stack(squares[n:]).sqrt() + eps)
        scalar_lr = group["lr"] * group["scalar_lr_scale"]
        rate, growth = group["lr"] * rms, 1 - scalar_lr * scale_steps
        rate[scaled:].fill_(scalar_lr)
        growth[scaled:].fill_(1.0)
        denominators = torch._foreach_sqrt(squares[:n])
        torch._foreach_add_(denominators, paired(parameters, eps))
        # infinite in a skipped step
        torch._foreach_div_(denominators, paired(parameters, torch.where(fine, rate * front, 0.0)))
        torch._foreach_mul_(parameters, paired(parameters, torch.where(fine, growth, 1.0)))
        torch._foreach_addcdiv_(parameters, moments[:n], denominators, value=-1)
        within = (group["max_rms"] / rms_of(parameters)).clamp(max=1.0)
        within[scaled:].fill_(1.0)
        torch._foreach_mul_(parameters, paired(parameters, torch.where(fine, within, 1.0)))

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            for name in ("moment", "square"):
                state[name] = torch.zeros_like(parameter)
            for name in ("updates", "scale_moment", "scale_square"):
                state[name] = parameter.new_zeros(())
        return state

    @staticmethod
    def _clip(group: dict, parameters: list[Tensor], rms: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the RMS-scaled norm of the gradients is finite, and the factor <= 1
        that reduces it to clipping_scale * the running median; both on the device."""
        # change of the loss with a relative change of the tensor: gradient times RMS, so that all
        # tensors count alike
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = (torch.stack(torch._foreach_norm(gradients)) * rms).square().sum().sqrt()
        fine = norm.isfinite()
        if group["clipping_scale"] is None:
            return fine, torch.ones_like(norm)
        # norms of the last steps, the newest last; infinite for steps before the first
        if "norms" not in group:
            group["norms"] = norm.new_full((group["clipping_update_period"],), math.inf)
        norms = group["norms"].to(norm.device)  # a loaded state may be elsewhere
        norms = group["norms"] = torch.where(fine, torch.cat((norms[1:], norm[None])), norms)
        seen = norms.isfinite().sum()
        median = norms.sort().values.take(seen // 2)
        # 0 / 0 if all gradients are zero
        clip = (group["clipping_scale"] * median / norm).nan_to_num(1.0).clamp(max=1.0)
        return fine, torch.where(seen < 10, 1.0, clip)


def rms_of(tensors: list[Tensor]) -> Tensor:
    """Return the root mean square of each of N tensors: [N]."""
    return torch.stack(
        torch._foreach_div(torch._foreach_norm(tensors), [math.sqrt(t.numel()) for t in tensors])
    )


def paired(tensors: list[Tensor], values: Tensor) -> list[Tensor]:
    """Return values [N], which are on the device, as a list for a `torch._foreach_*` operation
    with N tensors."""
    return spread(tensors, values) if values.is_cuda else list(values)


def spread(tensors: list[Tensor], values: Tensor) -> list[Tensor]:
    """Return tensors of the shapes of N tensors, filled with values [N]. This takes one copy,
    while a GPU would launch a kernel for every pair of a tensor and a number."""
    flat = torch.cat([value.expand(t.numel()) for value, t in zip(values, tensors, strict=True)])
    return list(_unflatten_dense_tensors(flat, tensors))


def sums(tensors: list[Tensor]) -> list[Tensor]:
    """Return the sum of each tensor."""
    return signed_norms(tensors) if tensors[0].is_cuda else [t.sum() for t in tensors]


def signed_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the sum of each tensor, computed as twice the norm of its positive part less its
    norm, for which a GPU needs few kernels for a whole list. It is computed in float64, since
    the two may be far larger than their difference."""
    positive = torch._foreach_norm(torch._foreach_clamp_min(tensors, 0.0), 1, dtype=torch.float64)
    whole = torch._foreach_norm(tensors, 1, dtype=torch.float64)
    return list((2 * torch.stack(positive) - torch.stack(whole)).to(tensors[0].dtype))


def eden_factor(batch: int, epoch: float, warmup_batches: int = 200) -> float:
    """Return Eden's factor on the base rate: it decays as batch^-0.5 from 5000 batches on and as
    epoch^-0.5 from 4 epochs on (the original's defaults), and rises from 0.5 to 1 in the first
    batches."""
    decay = ((batch**2 + 5000**2) / 5000**2) ** -0.25 * ((epoch**2 + 4**2) / 4**2) ** -0.25
    warmup = 1.0 if batch >= warmup_batches else 0.5 + 0.5 * batch / warmup_batches
    return decay * warmup


def eden(optimizer: Optimizer, batches_per_epoch: int, warmup_batches: int = 200) -> LambdaLR:
    """Return the Eden schedule; only complete epochs count, as in the original."""
    return LambdaLR(
        optimizer, lambda b: eden_factor(b, b // max(1, batches_per_epoch), warmup_batches)
    )


def cosine(optimizer: Optimizer, total: int, warmup: int, floor: float = 0.02) -> LambdaLR:
    """Return a schedule of linear warm-up, then half a cosine down to `floor` of the base rate."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
