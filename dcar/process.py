"""How a command ends: its exit status, and what it says and does when it is asked to stop; the cores that it has."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dcar.errors import DCARError, ProcessError, StoppedError

FAILED = 1  # a DCARError, or files that may not be read or written
REQUEUE = 75  # EX_TEMPFAIL: asked to stop, everything that was finished is kept, the same command goes on
INTERRUPTED = 130  # Ctrl-C, as a shell counts SIGINT
UNREAD = 141  # nobody reads the output any more, as a shell counts SIGPIPE
NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
# How torch says that a device is not there, or is none.
NO_DEVICE = re.compile(r"not compiled with CUDA|No CUDA GPUs|Found no NVIDIA driver|[Ii]nvalid device|"
                       r"Expected one of cpu, cuda")
# How gloo, NCCL and torch's stores say that another process is gone or does not answer.
GONE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|was)|failed to (recv|send|connect)|timed? ?out|socket|"
    r"monitoredBarrier|broken pipe", re.IGNORECASE)


SMALL = 100_000_000
"""Parameters of a decoder, below which its steps are too short to be shared among threads."""


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def hearing(name: str) -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, a second one leaves at once; SIGTERM leaves with REQUEUE. Only this process
    hears them, none that it forks; only the main thread can listen."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process, heard = os.getpid(), list[int]()

    def hear(number: int, frame: Any) -> None:
        if os.getpid() != process:  # a worker: it goes as it would have gone
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and number in heard:
            os._exit(INTERRUPTED)
        heard.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            os.write(2, f"{name}: SIGTERM; what is on the disk is kept, run the same command again\n".encode())
        signal.setitimer(signal.ITIMER_REAL, 5.0)  # once more: what is raised in an object's __del__ is dropped
        raise SystemExit(REQUEUE)  # no Exception, which a reward or a recogniser's isolation would count and go on

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    except Exception as error:  # the first import of a C extension makes an ImportError of what was raised in it
        if heard:
            raise (KeyboardInterrupt if signal.SIGINT in heard else SystemExit(REQUEUE)) from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if signal.SIGINT not in heard:  # after Ctrl-C a second one has to be heard until the very end
            for number, handler in before.items():
                signal.signal(number, handler)


def run_command(name: str, command: Callable[[], object]) -> int:
    """Run a command: its own status, FAILED after a DCARError or for want of rights to a file, which is printed without
    a traceback (DCAR_TRACEBACK=1 shows it), REQUEUE where it was asked to stop, INTERRUPTED after Ctrl-C,
    UNREAD without a word where the reader of its output has gone (`dcar doctor | head -1`). What it logs is shown."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with hearing(name):
            try:
                status = command()
            except SystemExit:  # --help, or SIGTERM
                sys.stdout.flush()
                raise
            sys.stdout.flush()
    except DCARError as error:
        if os.environ.get("DCAR_TRACEBACK"):
            raise
        print(f"{name}: {error}", file=sys.stderr)
        return error.status if isinstance(error, StoppedError) else FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted; what is on the disk is kept, run the same command again", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _unread():
            raise  # another pipe: that of a worker or of a service
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python still flushes at its end
        return UNREAD
    except (AssertionError, RuntimeError) as error:
        if not NO_DEVICE.search(str(error)) or os.environ.get("DCAR_TRACEBACK"):
            raise
        print(f"{name}: PyTorch cannot compute on this device ({str(error).splitlines()[0]}); set device=cpu, or see "
              "`dcar doctor` for what this machine has", file=sys.stderr)
        return FAILED
    except OSError as error:
        known = error.filename and (error.errno in NO_RIGHT or _takes_no_files(Path(os.fsdecode(error.filename))))
        if not known or os.environ.get("DCAR_TRACEBACK"):
            raise
        print(f"{name}: {error.filename}: {error.strerror}; give another folder, or the right to it", file=sys.stderr)
        return FAILED
    return status if isinstance(status, int) else 0


def _takes_no_files(path: Path) -> bool:
    """Whether no file can be made where one was to be written: below /proc, say."""
    try:
        tempfile.TemporaryFile(dir=next(p for p in path.absolute().parents if p.is_dir())).close()
    except OSError:
        return True
    return False


def _unread() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # standard output is no file of the system
        return False
    waiting = select.poll()
    waiting.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0))


@contextlib.contextmanager
def meeting_others() -> Iterator[None]:
    """Around what makes the processes of a launch meet: ProcessError where one of them does not come."""
    try:
        yield
    except RuntimeError as error:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1 or not GONE.search(str(error)):
            raise
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ProcessError(f"process {os.environ.get('RANK')} of {world}, meeting the others at {address}: not all "
                           f"came ({str(error).splitlines()[0]}). Their own logs have the cause; start the same "
                           "command again") from error
