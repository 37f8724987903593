"""How a command ends: exit status and last words, the same for `dcar NAME`, `python -m …` and `accelerate launch`."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from dcar.errors import DCARError

FAILED = 1  # a DCARError
INTERRUPTED = 130  # Ctrl-C, as a shell counts SIGINT
UNREAD = 141  # nobody reads the output any more, as a shell counts SIGPIPE


def run_command(name: str, command: Callable[[], object]) -> int:
    """Run a command: its own status, FAILED after a DCARError, which is printed without a traceback (DCAR_TRACEBACK=1
    shows it), INTERRUPTED after Ctrl-C, UNREAD without a word where the reader of its output has gone
    (`dcar doctor | head -1`)."""
    try:
        try:
            status = command()
        except SystemExit:  # --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except DCARError as error:
        if os.environ.get("DCAR_TRACEBACK"):
            raise
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted; what was finished is kept, run the same command to go on", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _unread():
            raise  # another pipe: that of a worker or of a service
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python still flushes at its end
        return UNREAD
    return status if isinstance(status, int) else 0


def _unread() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # standard output is no file of the system
        return False
    waiting = select.poll()
    waiting.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0))
