"""Learning-rate schedules: Eden of the paper's stage one (App. C.1), re-implemented, and a
cosine."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


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
