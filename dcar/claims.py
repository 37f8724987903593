"""One run at a time for every folder or file that is written: locks of the operating system."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dcar.config.load import program
from dcar.errors import BusyError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_held: set[int] = set()
"""Descriptors of the locks of this process."""


def _let_go() -> None:
    """Close a forked process's copies of the locks, so that a worker that outlives a killed run holds nothing."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def run_claimed(run: Callable[[Any], T], config: Any) -> T:
    """`run(config)` while `config.out` is claimed."""
    with claimed(config.out):
        return run(config)


@contextlib.contextmanager
def claimed(out: str | Path) -> Iterator[None]:
    """Claim a folder or file (none if empty) for what is written in the block. BusyError if another run holds it.

    The lock is on a hidden file next to `out`, which is removed at the end. The operating system releases the lock of a
    process that ends in any way, so the file of a killed run is no obstacle. Of several processes of a launch the first
    one holds the lock for all. A file system without locks is named in a warning, and nothing is held.
    """
    if not out or int(os.environ.get("RANK", "0")):
        yield
        return
    path = _lock_file(Path(out).resolve())
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, out)
    except OSError as error:  # whatever else forbids to write there is reported by the run itself
        logger.warning("%s: cannot be locked (%s); make sure that no other run writes there", out, error.strerror)
        yield
        return
    try:
        yield
    finally:
        if descriptor in _held:  # not in a forked process
            path.unlink(missing_ok=True)
            _held.discard(descriptor)
            os.close(descriptor)
            for folder in made:  # of a run that has written nothing
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _lock_file(out: Path) -> Path:
    """Next to `out`; within a folder that is a mount point, or whose parent cannot be written."""
    within = out.is_dir() and (out.is_mount() or not os.access(out.parent, os.W_OK))
    return (out if within else out.parent) / f".{out.name}.lock"


def _locked(path: Path, out: str | Path) -> int:
    """The descriptor of `path`, locked and describing this process. BusyError if another process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                os.truncate(descriptor, 0)
                started = time.strftime("%Y-%m-%d %H:%M:%S")
                os.write(descriptor, f"{program()}, process {os.getpid()} on {platform.node()}, {started}".encode())
                _held.add(descriptor)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "it has just started"
            os.close(descriptor)
            raise BusyError(f"{out}: another run writes to it ({holder}); wait until that one ends, or give another "
                            "out") from None
        except OSError:  # a file system without locks
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it in the meantime


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
