"""Natural policy gradient: a step whose length is the distance that the policy's distribution
moves, whatever its parameters are.

Kakade, A Natural Policy Gradient, 2002; with steps of given length as in TRPO (Schulman et al.,
2015). The gradient g of the loss is replaced by x = (F + damping)^-1 g, where F is the Fisher
information of the distribution at the decisions of a window, by conjugate gradients on products F
v. The features of a policy after the draw differ a hundredfold in scale and are correlated, and the
effect of one decision is small next to that of the others. Adam, which moves every weight by the
same amount, mostly follows noise there. Not in the paper.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor, nn

from rl.objective import exact_kl

Product = Callable[[Sequence[Tensor]], list[Tensor]]
"""Function v -> F v. Both are shaped like the weights; the result is the same on every process."""

Curvature = Callable[[], Product]
"""Function that measures F at the present weights; called once per step."""

TOLERANCE = 1e-6  # of conjugate gradients: residual as a share of the gradient


class NaturalGradient(torch.optim.Optimizer):
    """Optimiser whose steps move the weights by -lr x / sqrt(x (F + damping) x), and so the
    distribution by about lr² / 2 nats of KL per decision.

    damping: share of the curvature along the gradient that is added in every direction, which
    limits steps in directions that hardly change the distribution. The optimiser has no state.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        curvature: Curvature,
        lr: float,
        damping: float = 1e-3,
        iterations: int = 20,
    ):
        """Make the optimiser; iterations: largest number of conjugate gradient iterations."""
        super().__init__([p for p in parameters if p.requires_grad], {"lr": lr})
        self.curvature, self.damping, self.iterations = curvature, damping, iterations

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move the weights that have a gradient."""
        loss = None if closure is None else closure()
        (group,) = self.param_groups
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return loss
        gradient = flat([p.grad for p in weights])
        if not (size := gradient.norm()) > 0:
            return loss
        fisher = self.curvature()

        def product(v: Tensor) -> Tensor:
            return flat(fisher(shaped(v, weights)))

        along = gradient @ product(gradient) / size**2
        if not along > 0:  # the distribution does not depend on these weights
            return loss

        def damped(v: Tensor) -> Tensor:
            return product(v) + self.damping * along * v

        operator = LinearOperator(
            (len(gradient),) * 2,
            dtype=np.float64,
            matvec=lambda v: damped(torch.from_numpy(v).to(gradient)).cpu().numpy(),
        )
        direction, _ = cg(operator, gradient.cpu().numpy(), rtol=TOLERANCE, maxiter=self.iterations)
        x = torch.from_numpy(direction).to(gradient)
        step = group["lr"] / (x @ damped(x)).sqrt() * x
        for weight, change in zip(weights, shaped(step, weights), strict=True):
            weight.sub_(change)
        return loss


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers of the tensors as one float64 vector."""
    return torch.cat([t.reshape(-1).double() for t in tensors])


def shaped(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector made by `flat` into tensors of the shapes and types of `like`."""
    parts = vector.split([t.numel() for t in like])
    return [part.view_as(t).to(t) for part, t in zip(parts, like, strict=True)]


def fisher_product(
    log_probs: Tensor, per_decision: Callable[[Tensor], Tensor], weights: Sequence[Tensor]
) -> Product:
    """Return the function v -> F v: the second derivative along v of the mean KL from the present
    distribution.

    log_probs: [..., K] with its graph, which lives as long as the function. per_decision: reduces
    the KL by decision [...] to one number, as the loss does.
    """
    divergence = per_decision(exact_kl(log_probs.detach(), log_probs))
    slope = torch.autograd.grad(divergence, weights, create_graph=True, allow_unused=True)

    @torch.enable_grad()  # optimisers call it without gradients
    def product(v: Sequence[Tensor]) -> list[Tensor]:
        along = torch.stack(
            [(s * d).sum() for s, d in zip(slope, v, strict=True) if s is not None]
        ).sum()
        gradients = torch.autograd.grad(along, weights, retain_graph=True, allow_unused=True)
        return [
            torch.zeros_like(w) if f is None else f for f, w in zip(gradients, weights, strict=True)
        ]

    return product
