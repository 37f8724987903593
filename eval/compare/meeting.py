"""Where the processes of a comparison wait for each other, and what is said where one does not come."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from dcar.errors import ProcessError


class Meeting:
    """A barrier that names the processes that did not come. It runs over gloo beside whatever the devices use."""

    def __init__(self, minutes: float):
        """Every process makes it at the same place; it waits that many minutes for the slowest one."""
        self.minutes = minutes
        self.group = None
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))

    def wait(self, doing: str) -> None:
        """Return when all are here; ProcessError, naming this process, who is missing and at what."""
        if self.group is None:
            return
        try:
            dist.monitored_barrier(self.group, timedelta(minutes=self.minutes), wait_all_ranks=True)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise ProcessError(
                f"process {dist.get_rank()} of {dist.get_world_size()} (pid {os.getpid()}), behind {doing}: not all "
                f"came within {self.minutes:g} minutes (wait_minutes): {said}. Their own logs have the cause. Finished "
                "records are kept; the same command goes on, with any number of processes") from error
