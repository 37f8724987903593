"""ScaledAdam and Eden, the optimiser and schedule of the paper's stage one (App. C.1), re-implemented; and AdamW.

ScaledAdam (Yao et al. 2023, Zipformer, §3.3): Adam whose step is proportional to each tensor's own root mean square,
and which also learns that scale; gradients are clipped against a running median of their scaled norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def adamw(parameters: Iterable[Tensor], rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW (betas 0.9, 0.98) that decays matrices by `decay`, and neither biases nor norms."""
    every = list(parameters)
    return torch.optim.AdamW([{"params": [p for p in every if p.dim() > 1], "weight_decay": decay},
                              {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0}],
                             lr=rate, betas=(0.9, 0.98), fused=True)


class ScaledAdam(Optimizer):
    """Adam with parameter-scaled steps, of whole tensors (none that FSDP or DeepSpeed shard).

    Args:
        lr: step relative to a tensor's RMS (0.01 in the paper, far larger than Adam's).
        betas: decay of the first and second moments.
        clipping_scale: clip gradients above this multiple of the median norm; None = no clipping.
        clipping_update_period: how many steps the median looks back.
        scalar_lr_scale: step of the learned scale, and of tensors with a single element, relative to lr.
        min_rms: RMS below which a tensor is no longer treated as smaller.
        max_rms: RMS that a tensor may not grow beyond.
    """

    def __init__(self, params: Iterable, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.95),
                 clipping_scale: float | None = 2.0, clipping_update_period: int = 1000, scalar_lr_scale: float = 0.1,
                 eps: float = 1e-8, min_rms: float = 1e-5, max_rms: float = 3.0):
        super().__init__(params, dict(
            lr=lr, betas=betas, clipping_scale=clipping_scale, clipping_update_period=clipping_update_period,
            scalar_lr_scale=scalar_lr_scale, eps=eps, min_rms=min_rms, max_rms=max_rms,
        ))

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            clip = self._clip(group, parameters)
            for parameter in parameters:
                self._update(parameter, parameter.grad * clip, group)
        return loss

    def _clip(self, group: dict, parameters: list[Tensor]) -> float:
        """Factor <= 1 that brings the RMS-scaled gradient norm under clipping_scale * the running median."""
        scale = group["clipping_scale"]
        if scale is None:
            return 1.0
        # d(loss) for a relative change of the tensor: gradient times RMS, so that all tensors count alike
        relative = [p.grad * self._rms(p, group) for p in parameters if p.grad is not None]
        norm = float(torch.stack([(g**2).sum() for g in relative]).sum().sqrt())
        if not math.isfinite(norm):
            return 0.0  # skip the step; a second one in a row shows up in the loss
        history = group.setdefault("norms", [])
        history.append(norm)
        del history[: -group["clipping_update_period"]]
        if len(history) < 10:
            return 1.0
        median = sorted(history)[len(history) // 2]
        return min(1.0, scale * median / norm) if norm > 0 else 1.0

    @staticmethod
    def _rms(parameter: Tensor, group: dict) -> Tensor:
        return parameter.square().mean().sqrt().clamp(min=group["min_rms"])

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict) -> None:
        state = self.state[parameter]
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = 0
            state["moment"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
            state["scale_moment"] = torch.zeros((), device=parameter.device)
            state["scale_square"] = torch.zeros((), device=parameter.device)
        state["step"] += 1
        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        state["moment"].lerp_(gradient, 1 - beta1)
        state["square"].lerp_(gradient.square(), 1 - beta2)
        direction = (state["moment"] / correction1) / ((state["square"] / correction2).sqrt() + group["eps"])
        if parameter.numel() == 1:
            parameter.sub_(direction, alpha=group["lr"] * group["scalar_lr_scale"])
            return
        rms = self._rms(parameter, group)
        # the gradient of the tensor's scale is sum(parameter * gradient); it has Adam moments of its own
        scale_gradient = (parameter * gradient).sum()
        state["scale_moment"].lerp_(scale_gradient, 1 - beta1)
        state["scale_square"].lerp_(scale_gradient.square(), 1 - beta2)
        scale_step = (state["scale_moment"] / correction1) / (
            (state["scale_square"] / correction2).sqrt() + group["eps"])
        lr = group["lr"]
        change = direction * (lr * rms) + parameter * (lr * group["scalar_lr_scale"] * scale_step)
        parameter.sub_(change)
        rms = parameter.square().mean().sqrt()
        if rms > group["max_rms"]:
            parameter.mul_(group["max_rms"] / rms)


def eden_factor(batch: int, epoch: float, warmup_batches: int = 200) -> float:
    """Eden's factor on the base rate: decays as batch^-0.5 from 5000 batches on and as epoch^-0.5 from 4 epochs on (the
    original's defaults), and rises 0.5 -> 1 in the first batches."""
    decay = ((batch**2 + 5000**2) / 5000**2) ** -0.25 * ((epoch**2 + 4**2) / 4**2) ** -0.25
    warmup = 1.0 if batch >= warmup_batches else 0.5 + 0.5 * batch / warmup_batches
    return decay * warmup


def eden(optimizer: Optimizer, batches_per_epoch: int, warmup_batches: int = 200) -> LambdaLR:
    """Eden schedule; the epoch is counted whole, as in the original."""
    return LambdaLR(optimizer, lambda b: eden_factor(b, b // max(1, batches_per_epoch), warmup_batches))


def cosine(optimizer: Optimizer, total: int, warmup: int, floor: float = 0.02) -> LambdaLR:
    """Linear warm-up, then half a cosine down to `floor` of the base rate."""
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return LambdaLR(optimizer, factor)
