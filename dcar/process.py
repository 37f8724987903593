"""Exit statuses of commands, signal handling, errors between processes, locks on outputs, and
the number of cores."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import platform
import re
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from dcar.config.load import program
from dcar.errors import BusyError, DCARError, ProcessError, StoppedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILED = 1  # a DCARError, or files that may not be read or written
# EX_TEMPFAIL: stopped by a signal; finished work is kept, and the same command resumes
REQUEUE = 75
INTERRUPTED = 130  # Ctrl-C, as a shell counts SIGINT
BROKEN_PIPE = 141  # the reader of the output is gone, as a shell counts SIGPIPE
NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
# Messages of torch for a device that is missing or unknown.
NO_DEVICE = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|Found no NVIDIA driver|[Ii]nvalid device|"
    r"Expected one of cpu, cuda"
)
# Messages of gloo, NCCL and torch's stores for another process that is gone or does not answer.
GONE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|was)|failed to (recv|send|connect)|"
    r"timed? ?out|socket|"
    r"monitoredBarrier|broken pipe",
    re.IGNORECASE,
)


SMALL = 100_000_000
"""Parameters of a decoder, below which its steps are too short to be shared among threads."""


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_device(device: str) -> str:
    """Return the device of this process for a setting `device`.

    `auto` is a GPU if there is one. Of several GPUs, process n of a machine (LOCAL_RANK of the
    launcher) uses number n; if there are more processes than GPUs, they share them in turn.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cuda":
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return f"cuda:{local_rank % max(1, torch.cuda.device_count())}"


def workers(count: int) -> int:
    """Return a number of worker threads: `count`, or, if that is 0, one for each core that this
    process has when the processes of a launch share the cores of the machine."""
    return count or max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextlib.contextmanager
def worker_pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """Provide threads that compute with one torch thread each; what they have not begun when the
    block is left is cancelled."""
    import torch

    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items in order. The next one is made in a thread while the caller uses the present
    one, and no more than that one."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, iterator, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]


@contextlib.contextmanager
def handling_signals(name: str) -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, a second one exits at once; SIGTERM exits with REQUEUE.
    Forked processes keep the default handlers; outside of the main thread this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process, received = os.getpid(), list[int]()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() != process:  # a forked worker: the default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and number in received:
            os._exit(INTERRUPTED)
        received.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            os.write(
                2,
                f"{name}: SIGTERM; what is on the disk is kept, run the same command "
                "again\n".encode(),
            )
        # again: an exception in an object's __del__ is ignored
        signal.setitimer(signal.ITIMER_REAL, 5.0)
        # not an Exception, which the isolation of rewards and recognisers would catch
        raise SystemExit(REQUEUE)

    before = {
        number: signal.signal(number, handle)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    }
    try:
        yield
    except Exception as error:
        # the first import of a C extension makes an ImportError of what was raised in it
        if received:
            raise (
                KeyboardInterrupt if signal.SIGINT in received else SystemExit(REQUEUE)
            ) from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if signal.SIGINT not in received:  # after Ctrl-C a second one must work until the very end
            for number, handler in before.items():
                signal.signal(number, handler)


def run_command(name: str, command: Callable[[], object]) -> int:
    """Run a command and return its exit status: its own, FAILED after a DCARError or a missing
    file permission (printed without a traceback; DCAR_TRACEBACK=1 shows it), REQUEUE after
    SIGTERM, INTERRUPTED after Ctrl-C, BROKEN_PIPE silently where the reader of its output is
    gone (`dcar doctor | head -1`). What it logs is shown; characters that standard output cannot
    encode are shown as `?`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with handling_signals(name):
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
        print(
            f"{name}: interrupted; what is on the disk is kept, run the same command again",
            file=sys.stderr,
        )
        return INTERRUPTED
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise  # another pipe: that of a worker or of a service
        # what Python still flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (AssertionError, RuntimeError) as error:
        if not NO_DEVICE.search(str(error)) or os.environ.get("DCAR_TRACEBACK"):
            raise
        print(
            f"{name}: PyTorch cannot compute on this device ({str(error).splitlines()[0]}); set "
            "device=cpu, or see "
            "`dcar doctor` for what this machine has",
            file=sys.stderr,
        )
        return FAILED
    except OSError as error:
        known = error.filename and (
            error.errno in NO_PERMISSION or _cannot_hold_files(Path(os.fsdecode(error.filename)))
        )
        if not known or os.environ.get("DCAR_TRACEBACK"):
            raise
        print(
            f"{name}: {error.filename}: {error.strerror}; give another folder, or the right to it",
            file=sys.stderr,
        )
        return FAILED
    return status if isinstance(status, int) else 0


def _cannot_hold_files(path: Path) -> bool:
    """Whether no file can be created in a file's folder: below /proc, say."""
    try:
        tempfile.TemporaryFile(dir=next(p for p in path.absolute().parents if p.is_dir())).close()
    except OSError:
        return True
    return False


def _stdout_is_closed() -> bool:
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
    """Wraps what synchronises the processes of a launch: ProcessError where one of them is
    missing."""
    try:
        yield
    except RuntimeError as error:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1 or not GONE.search(str(error)):
            raise
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ProcessError(
            f"process {os.environ.get('RANK')} of {world}, meeting the others at {address}: not "
            "all "
            f"came ({str(error).splitlines()[0]}). Their own logs have the cause; start the same "
            "command again"
        ) from error


# --- one run at a time for every folder and file that is written ----------------------------------

_held: set[int] = set()
"""Descriptors of the locks of this process."""


def _let_go() -> None:
    """Close a forked process's copies of the locks, so that a worker that outlives a killed run
    holds nothing."""
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
    """Claim a folder or file (none if empty) for what is written in the block. BusyError if another
    run holds it.

    The lock is on a hidden file next to `out`, which is removed at the end. The operating system
    releases the lock of a process that ends in any way, so the file of a killed run is no obstacle.
    Of several processes of a launch the first one holds the lock for all. A file system without
    locks is named in a warning, and nothing is held.
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
        logger.warning(
            "%s: cannot be locked (%s); make sure that no other run writes there",
            out,
            error.strerror,
        )
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
    """The descriptor of `path`, locked and describing this process. BusyError if another process
    has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                os.truncate(descriptor, 0)
                started = time.strftime("%Y-%m-%d %H:%M:%S")
                os.write(
                    descriptor,
                    f"{program()}, process {os.getpid()} on {platform.node()}, {started}".encode(),
                )
                _held.add(descriptor)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "it has just started"
            os.close(descriptor)
            raise BusyError(
                f"{out}: another run writes to it ({holder}); wait until that one ends, or give "
                "another "
                "out"
            ) from None
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
