"""ScaledAdam, the optimiser of the paper's stage one (App. C.1), re-implemented.

ScaledAdam (Yao et al. 2023, Zipformer, §3.3): Adam whose step is proportional to each tensor's own
root mean square, and which also learns that scale; gradients are clipped relative to a running
median of their scaled norm.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcar import first_use
from dcar.optim.tensors import Tensors

logger = logging.getLogger(__name__)

SCALARS = ("updates", "scale_moment", "scale_square")
"""State of a tensor that is one number: steps taken, and Adam's moments of its scale."""


class ScaledAdam(Optimizer):
    """Adam with parameter-scaled steps, for whole tensors (not for those that FSDP or DeepSpeed
    shard).

    A step does not wait for the device. On a GPU it consists of Triton kernels that work on all
    tensors at once (dcar/optim/kernels.py), elsewhere of operations on lists of tensors. A step of
    a group whose gradient is not finite is skipped on the device: weights and state stay as they
    are.

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
        scaled = sum(p.numel() > 1 for p in parameters)
        states = [self._state_of(p) for p in parameters]
        tensors = tensors_of(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [s["moment"] for s in states],
            [s["square"] for s in states],
        )
        rms, gradient_norms, products = tensors.measure()
        rms = rms.clamp(min=group["min_rms"])
        # change of the loss with a relative change of the tensor: gradient times RMS, so that all
        # tensors count alike
        fine, clip = self._clip(group, (gradient_norms * rms).square().sum().sqrt())

        # the gradient of the tensor's scale is sum(parameter * gradient); the scale has Adam
        # moments of its own
        slope, (beta1, beta2) = products * clip, group["betas"]
        updates, moment, square = (torch.stack([s[name] for s in states]) for name in SCALARS)
        # in a skipped step nothing changes
        updates = updates + fine
        moment = torch.where(fine, beta1 * moment + (1 - beta1) * slope, moment)
        square = torch.where(fine, beta2 * square + (1 - beta2) * slope.square(), square)
        for name, values in zip(SCALARS, (updates, moment, square), strict=True):
            torch._foreach_copy_([s[name] for s in states], list(values.unbind()))

        # Adam's (moment / correction1) / (sqrt(square / correction2) + eps) is front * moment /
        # (sqrt(square) + eps)
        counts = updates.clamp(min=1)  # still 0 if no step was taken yet
        root2 = (1 - beta2**counts).sqrt()
        front, eps = root2 / (1 - beta1**counts), root2 * group["eps"]
        scalar_lr = group["lr"] * group["scalar_lr_scale"]
        rate = group["lr"] * rms
        growth = 1 - scalar_lr * (front * moment / (square.sqrt() + eps))
        rate[scaled:].fill_(scalar_lr)
        growth[scaled:].fill_(1.0)
        rms = tensors.step(group["betas"], fine, clip, eps, rate * front, growth)
        within = (group["max_rms"] / rms).clamp(max=1.0)
        within[scaled:].fill_(1.0)
        tensors.multiply(torch.where(fine, within, 1.0))

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            for name in ("moment", "square"):
                state[name] = torch.zeros_like(parameter)
            for name in SCALARS:
                state[name] = parameter.new_zeros(())
        return state

    @staticmethod
    def _clip(group: dict, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the RMS-scaled norm of the gradients is finite, and the factor <= 1
        that reduces it to clipping_scale * the running median; both on the device."""
        fine = norm.isfinite()
        if group["clipping_scale"] is None:
            return fine, torch.ones_like(norm)
        # norms of the last steps, the newest last; infinite for steps before the first
        if "norms" not in group:
            group["norms"] = norm.new_full((group["clipping_update_period"],), math.inf)
        norms = group["norms"].to(norm.device)  # a loaded state may be elsewhere
        norms = group["norms"] = torch.where(fine, torch.cat((norms[1:], norm[None])), norms)
        finite = norms.isfinite().sum()
        median = norms.sort().values.take(finite // 2)
        # 0 / 0 if all gradients are zero
        clip = (group["clipping_scale"] * median / norm).nan_to_num(1.0).clamp(max=1.0)
        return fine, torch.where(finite < 10, 1.0, clip)


def tensors_of(*lists: list[Tensor]) -> Tensors:
    """Return parameters, gradients, moments and squares as `Tensors`; on a GPU as `KernelTensors`,
    or, if the kernels do not support them, with a warning."""
    tensors = [tensor for each in lists for tensor in each]
    if tensors[0].is_cuda:
        reason = unsupported(tensors)
        if reason is not None:
            warn(reason)
        elif "kernels" in first_use.sound_parts("optimizer", {}, tensors[0].device):
            from dcar.optim.kernels import KernelTensors  # imports triton

            return KernelTensors(*lists)
    return Tensors(*lists)


def unsupported(tensors: Sequence[Tensor]) -> str | None:
    """Return why the kernels cannot work on these tensors of a GPU, if they cannot."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is missing: install the one that belongs to your torch"
    if any(is_traceable_wrapper_subclass(t) for t in tensors):
        return "tensors are sharded"
    if any(t.dtype != torch.float32 for t in tensors):
        return "weights are not float32"
    if any(t.device != tensors[0].device or not t.is_contiguous() for t in tensors):
        return "tensors are not contiguous, or on several devices"
    return None


@functools.cache
def warn(reason: str) -> None:
    """Warn, once for a reason, that steps run operators."""
    logger.warning("ScaledAdam runs operators, which take several times as long (%s)", reason)
