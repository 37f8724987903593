"""Exit statuses of commands, signal handling, errors between processes, locks on outputs, and
the number of cores."""

import contextlib
import errno
import fcntl
import importlib.util
import io
import logging
import os
import platform
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from dcar.config.load import program
from dcar.errors import BusyError, ConfigError, DCARError, ProcessError, StoppedError
from dcar.storage import FULL, writing

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILED = 1  # a DCARError, or no permission to read or write a file
# EX_TEMPFAIL: stopped by a signal; finished work is kept, and the same command resumes
REQUEUE = 75
INTERRUPTED = 130  # Ctrl-C: the status of a shell for SIGINT
BROKEN_PIPE = 141  # the reader of the output has ended: the status of a shell for SIGPIPE
NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
RESUMPTION = "; finished work is kept: run the same command again"
_resumption = ""  # what the message of an interruption adds: RESUMPTION, or nothing
# Messages of gloo, NCCL and torch's stores for another process that has ended or does not answer.
GONE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|was)|failed to (recv|send|connect)|"
    r"timed? ?out|socket|"
    r"monitoredBarrier|broken pipe",
    re.IGNORECASE,
)


SMALL = 100_000_000
"""Number of a decoder's parameters below which its steps are too short to be divided among
threads."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def own_device(device: str) -> str:
    """Return the device of this process for a setting `device`.

    `auto` is a GPU if there is one. Of several GPUs, process n of a machine (LOCAL_RANK of the
    launcher) uses number n; if there are more processes than GPUs, they share them in turn. Raises
    ConfigError for a device that PyTorch does not find here.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device == "cuda" and count:
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % count}"
    if device != "cpu" and device not in [f"cuda:{number}" for number in range(count)]:
        raise ConfigError(
            f"device '{device}': torch {torch.__version__} finds {count} GPUs; set device to cpu, "
            "auto, cuda or cuda:N, or run `dcar doctor` to see the devices of this machine"
        )
    return device


def workers(count: int) -> int:
    """Return the number of worker threads: `count`, or, if that is 0, one for each core of this
    process when the processes of a launch share the cores of the machine."""
    return count or max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextlib.contextmanager
def worker_pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """Provide a pool of threads that compute with one torch thread each; tasks that have not
    begun at the end of the block are cancelled."""
    import torch

    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items in order. While the caller uses one, a thread computes the next one, and
    no more than that."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, iterator, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]


@contextlib.contextmanager
def handling_signals(name: str) -> Iterator[None]:
    """Handle signals within the block: Ctrl-C raises KeyboardInterrupt, a second one exits at
    once; SIGTERM exits with REQUEUE. Forked processes keep the default handlers; outside of the
    main thread this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process, received = os.getpid(), list[int]()

    def handle(number: int, _frame: Any) -> None:
        if os.getpid() != process:  # in a forked worker: the default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and number in received:
            os._exit(INTERRUPTED)
        received.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            os.write(2, f"{name}: SIGTERM{_resumption}\n".encode())
        # repeat it in five seconds, because an exception in an object's __del__ is ignored
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
        # the first import of a C extension converts what is raised in it to ImportError
        if signal.SIGINT in received:
            raise KeyboardInterrupt from error
        if received:
            raise SystemExit(REQUEUE) from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if signal.SIGINT not in received:  # after Ctrl-C, a second one must work until the very end
            for number, handler in before.items():
                signal.signal(number, handler)


PACKAGES = ("heads", "rl", "eval", "launch")
"""Packages beside dcar; checkouts of other projects have folders of these names."""


def check_packages() -> None:
    """Raise ConfigError if a folder or file of another project hides a package of this one, as the
    working directory does under `python -m` and `accelerate launch -m`."""
    home = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        for place in list(spec.submodule_search_locations or ()) or [spec.origin or ""]:
            if place and Path(place).resolve().parent != home:
                raise ConfigError(
                    f"{place} hides the package {name} of DCAR, which is in {home}: run this in "
                    "another folder, or rename that one; the command `dcar` does not look there"
                )


def run_command(name: str, command: Callable[[], object]) -> int:
    """Run a command and return its exit status.

    This is the command's own status, FAILED after a DCARError or a missing file permission (printed
    without a traceback; DCAR_TRACEBACK=1 shows it), REQUEUE after SIGTERM, INTERRUPTED after
    Ctrl-C, or, without a message, BROKEN_PIPE if the reader of its output has ended (`dcar doctor |
    head -1`). Log messages are shown; characters that standard output cannot encode are shown as
    `?`.
    """
    global _resumption
    _resumption = ""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        check_packages()
        with handling_signals(name):
            try:
                with meeting_others():
                    status = command()
            except SystemExit:  # --help, or SIGTERM
                sys.stdout.flush()
                raise
            sys.stdout.flush()
            end_process_group()
    except DCARError as error:
        if os.environ.get("DCAR_TRACEBACK"):
            raise
        print(f"{name}: {error}", file=sys.stderr)
        return error.status if isinstance(error, StoppedError) else FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted{_resumption}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise  # another pipe is broken: that of a worker or of a service
        # discards what Python flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        expected = error.filename and error.errno in NO_PERMISSION
        if not expected or os.environ.get("DCAR_TRACEBACK"):
            raise
        print(
            f"{name}: {error.filename}: {error.strerror}; choose another folder, or change its "
            "permissions",
            file=sys.stderr,
        )
        return FAILED
    return status if isinstance(status, int) else 0


def end_process_group() -> None:
    """End the process group of torch.distributed, if there is one: NCCL warns at the exit of a
    program without this, and a thread of gloo may abort it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _stdout_is_closed() -> bool:
    """Return whether standard output is a pipe that no process reads."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # standard output is not a file of the system
        return False
    waiting = select.poll()
    waiting.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0))


def is_of_others(error: RuntimeError, processes: int) -> bool:
    """Return whether an error says that another process of the launch has ended, did not answer or
    never arrived."""
    of_backend = getattr(sys.modules.get("torch.distributed"), "DistBackendError", ())
    return processes > 1 and (isinstance(error, of_backend) or bool(GONE.search(str(error))))


@contextlib.contextmanager
def meeting_others() -> Iterator[None]:
    """Convert errors of the block to ProcessError if they say that another process of the launch
    has ended, did not answer or never arrived."""
    try:
        yield
    except RuntimeError as error:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if not is_of_others(error, world):
            raise
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ProcessError(
            f"process {os.environ.get('RANK')} of {world}, meeting the others at {address}: one of "
            f"them has ended or did not arrive ({str(error).splitlines()[0]}). Its own log shows "
            f"the cause{RESUMPTION}"
        ) from error


# --- locks: one run at a time writes to a folder or file ------------------------------------------

_held: set[int] = set()
"""Descriptors of the locks of this process."""


def _let_go() -> None:
    """Close a forked process's copies of the locks, so that a worker that outlives a killed run
    does not hold them."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def run_claimed(run: Callable[[Any], T], config: Any, resumes: bool = False) -> T:
    """Return `run(config)`, while `config.out` is claimed; `resumes` as in `claimed`."""
    with claimed(config.out, resumes):
        return run(config)


@contextlib.contextmanager
def claimed(out: str | Path, resumes: bool = False) -> Iterator[None]:
    """Claim a folder or file (none if `out` is empty) for writing within the block. Raises
    BusyError if another run holds it, StorageError if a disk is full.

    resumes: whether what was finished is kept if the block is interrupted, as the message then
    says.

    The lock is on a hidden file next to `out`, which is removed at the end. The operating system
    releases the lock of a process that ends in any way, so the file of a killed run does not block
    others. Of the processes of a launch, the first one holds the lock for all. If the file system
    does not support locks, a warning names `out`, and nothing is held.
    """
    global _resumption
    _resumption = RESUMPTION * resumes
    with writing(out, codes=FULL), _locked_out(out):
        yield


@contextlib.contextmanager
def _locked_out(out: str | Path) -> Iterator[None]:
    if not out or int(os.environ.get("RANK", "0")):
        yield
        return
    path = _lock_file(Path(out).resolve())
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, out)
    except OSError as error:  # if `out` cannot be written to either, the run itself reports it
        logger.warning(
            "%s: cannot be locked (%s); make sure that no other run writes to it",
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
            for folder in missing:  # still empty if the run has written nothing
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _lock_file(out: Path) -> Path:
    """Return the path of the lock: next to `out`, or within it if it is a mount point or its
    parent cannot be written to."""
    within = out.is_dir() and (out.is_mount() or not os.access(out.parent, os.W_OK))
    return (out if within else out.parent) / f".{out.name}.lock"


def _locked(path: Path, out: str | Path) -> int:
    """Return the descriptor of `path`, locked and describing this process. Raises BusyError if
    another process holds the lock."""
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
                f"{out}: another run writes to it ({holder}); wait until that run ends, or choose "
                "another out"
            ) from None
        except OSError:  # a file system without locks
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed the file in the meantime


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` still names the file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
