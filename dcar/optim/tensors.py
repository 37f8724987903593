"""Operations of a step of ScaledAdam on lists of tensors, in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Tensors:
    """N parameters with their gradients and Adam's moments."""

    def __init__(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        squares: list[Tensor],
    ):
        self.parameters, self.gradients = parameters, gradients
        self.moments, self.squares = moments, squares

    def measure(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the RMS of each parameter, the norm of its gradient, and the sum of their
        products, each [N]."""
        products = torch._foreach_mul(self.parameters, self.gradients)
        return (
            rms_of(self.parameters),
            torch.stack(torch._foreach_norm(self.gradients)),
            torch.stack([product.sum() for product in products]),
        )

    def step(
        self,
        betas: Sequence[float],
        fine: Tensor,
        clip: Tensor,
        eps: Tensor,
        rate: Tensor,
        growth: Tensor,
    ) -> Tensor:
        """If `fine`, update the moments by the gradients times `clip`, and make each parameter p
        growth p - rate moment / (sqrt(square) + eps). Return its new RMS [N], which means nothing
        in a skipped step.

        fine: bool []; clip []; eps, rate, growth [N]."""
        beta1, beta2 = betas
        clipped = torch._foreach_mul(self.gradients, clip)
        # where, because 0 * inf is not 0
        gradients = [torch.where(fine, gradient, 0.0) for gradient in clipped]
        torch._foreach_mul_(self.moments, torch.where(fine, beta1, 1.0))
        torch._foreach_add_(self.moments, gradients, alpha=1 - beta1)
        torch._foreach_mul_(self.squares, torch.where(fine, beta2, 1.0))
        torch._foreach_addcmul_(self.squares, gradients, gradients, value=1 - beta2)
        denominators = torch._foreach_sqrt(self.squares)
        torch._foreach_add_(denominators, list(eps))
        # infinite in a skipped step
        torch._foreach_div_(denominators, list(torch.where(fine, rate, 0.0)))
        torch._foreach_mul_(self.parameters, list(torch.where(fine, growth, 1.0)))
        torch._foreach_addcdiv_(self.parameters, self.moments, denominators, value=-1)
        return rms_of(self.parameters)

    def multiply(self, factors: Tensor) -> None:
        """Multiply the parameters by factors [N]."""
        torch._foreach_mul_(self.parameters, list(factors))


def rms_of(tensors: list[Tensor]) -> Tensor:
    """Return the root mean square of each of N tensors: [N]."""
    return torch.stack(
        torch._foreach_div(torch._foreach_norm(tensors), [math.sqrt(t.numel()) for t in tensors])
    )
