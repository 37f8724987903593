"""Copies between host and device that wait for nothing: the host reads a result when it needs it,
while a GPU runs what was queued after it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Copy of a tensor on its way to the host: in pinned memory, followed by an event, if the
    tensor is on a GPU."""

    def __init__(self, values: Tensor):
        # pinned, because it does not wait
        self._values = values.to("cpu", non_blocking=True, copy=True)
        self._arrived: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def get(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting for what it computes."""
    return torch.tensor(values).to(device, non_blocking=True)
