"""The processes of a comparison: where they wait for each other, and how many threads each has."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from dcar.errors import ConfigError, ProcessError
from dcar.process import SMALL, cores, meeting_others


class Meeting:
    """A barrier that names the processes that did not come. It runs over gloo beside whatever
    the devices use."""

    def __init__(self, minutes: float):
        """Every process makes it at the same place; it waits that many minutes for the slowest
        one."""
        self.minutes = minutes
        self.group = None
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))

    def wait(self, doing: str) -> None:
        """Return when all are here; ProcessError, naming this process, who is missing and at
        what."""
        if self.group is None:
            return
        try:
            dist.monitored_barrier(self.group, timedelta(minutes=self.minutes), wait_all_ranks=True)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise ProcessError(
                f"process {dist.get_rank()} of {dist.get_world_size()} (pid {os.getpid()}), "
                f"behind {doing}: not all "
                f"came within {self.minutes:g} minutes (wait_minutes): {said}. Their own logs "
                "have the cause. Finished "
                "records are kept; the same command goes on, with any number of processes"
            ) from error


def start(config: Any) -> tuple[PartialState, Meeting]:
    """The processes of a comparison (`device`, `wait_minutes` of its settings) and where they
    meet. ConfigError where Accelerate sees fewer processes than were launched."""
    on_cpu = config.device == "cpu" or not config.device and not torch.cuda.is_available()
    with meeting_others():
        state = PartialState(cpu=on_cpu, timeout=timedelta(minutes=config.wait_minutes))
        meeting = Meeting(config.wait_minutes)
    if (launched := int(os.environ.get("WORLD_SIZE", "1"))) != state.num_processes:
        raise ConfigError(
            f"{launched} processes were launched but Accelerate sees {state.num_processes}: each "
            "would "
            "do all the work; on CPUs launch with --multi_gpu and ACCELERATE_USE_CPU=true"
        )
    if state.num_processes > 1:
        # librosa compiles and caches kernels at its first import; two processes at once leave a
        # cache that crashes
        with meeting_others(), state.local_main_process_first():
            for module in ("librosa.core.audio", "librosa.core.pitch"):
                importlib.import_module(module)
    return state, meeting


@contextmanager
def threads_of(threads: int, parameters: int, processes: int) -> Iterator[None]:
    """So many torch threads. 0: one for a small decoder, whose steps take far longer where
    threads wait for a core that another job has (the shipped decoder on two busy cores: 80 times
    as long with two threads as with one); else as many as there are idle cores."""
    before = torch.get_num_threads()
    idle = max(1, int((cores() - os.getloadavg()[0]) / processes))
    torch.set_num_threads(threads or (1 if parameters < SMALL else idle))
    try:
        yield
    finally:
        torch.set_num_threads(before)
