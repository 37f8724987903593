"""Optimiser and schedules of the trainers."""

from dcar.optim.scaled_adam import ScaledAdam
from dcar.optim.schedules import cosine, eden, eden_factor

__all__ = ["ScaledAdam", "cosine", "eden", "eden_factor"]
