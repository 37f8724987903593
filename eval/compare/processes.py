"""Processes of a comparison: barriers between them, and their numbers of threads."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState

from dcar.errors import ConfigError, ProcessError
from dcar.process import SMALL, cores, own_device

T = TypeVar("T")


class Meeting:
    """Barrier that names the processes that are missing. It uses gloo, independently of the
    backend of the devices."""

    def __init__(self, minutes: float):
        """Create the barrier; every process must do so at the same place. minutes: how long to
        wait for the slowest process."""
        self.minutes = minutes
        self.group = None
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))

    def wait(self, doing: str) -> None:
        """Wait for all processes. Raises ProcessError, which names this process, the missing
        ones and the work just finished (`doing`)."""
        if self.group is None:
            return
        try:
            dist.monitored_barrier(self.group, timedelta(minutes=self.minutes), wait_all_ranks=True)
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise ProcessError(
                f"process {dist.get_rank()} of {dist.get_world_size()} (pid {os.getpid()}), after "
                f"{doing}: not all came within {self.minutes:g} minutes (wait_minutes): {cause}. "
                "See the logs of the other processes for the cause. Finished records are kept; "
                "run the same command again to continue, with any number of processes"
            ) from error

    def share(self, value: T | None) -> T:
        """Return what the main process has on every process."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group=self.group)
        assert values[0] is not None
        return values[0]


def start(config: Any) -> tuple[PartialState, Meeting]:
    """Start the processes of a comparison (settings `device` and `wait_minutes`) and return them
    with their barrier. Raises ConfigError if Accelerate sees fewer processes than were launched."""
    on_cpu = own_device(config.device) == "cpu"
    state = PartialState(cpu=on_cpu, timeout=timedelta(minutes=config.wait_minutes))
    meeting = Meeting(config.wait_minutes)
    if (launched := int(os.environ.get("WORLD_SIZE", "1"))) != state.num_processes:
        raise ConfigError(
            f"{launched} processes were launched but Accelerate sees {state.num_processes}, so "
            "each would do all the work; on CPUs, launch with --multi_gpu and "
            "ACCELERATE_USE_CPU=true"
        )
    if state.num_processes > 1:
        # librosa compiles and caches kernels at its first import; two processes at once leave a
        # cache that crashes
        with state.local_main_process_first():
            importlib.import_module("librosa.core.audio")
    return state, meeting


@contextmanager
def threads_of(threads: int, parameters: int, processes: int) -> Iterator[None]:
    """Run the block with `threads` torch threads per process.

    0 means one thread for a small decoder, and otherwise as many as there are idle cores. The steps
    of a small decoder take far longer when a thread waits for a core that another job uses: those
    of the shipped decoder, on two busy cores, took 80 times as long with two threads as with one.
    """
    before = torch.get_num_threads()
    idle = max(1, int((cores() - os.getloadavg()[0]) / processes))
    torch.set_num_threads(threads or (1 if parameters < SMALL else idle))
    try:
        yield
    finally:
        torch.set_num_threads(before)
