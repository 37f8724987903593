"""Progress of long work: a bar on a terminal, a line a minute in a log."""

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = 60
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}, {elapsed} so far, {remaining} left{postfix}"
ENDLESS = "{desc}: {n_fmt} {unit}, {elapsed} so far{postfix}"  # its end is not known


class Progress(tqdm):
    """Bar of tqdm, with its arguments. Where standard error is no terminal (a log, nohup, a
    scheduler), it writes a line a minute, and none for work that takes less."""

    def __init__(self, *args: Any, **options: Any) -> None:
        stream = options.get("file") or sys.stderr
        self.lines = not stream.isatty()
        self._last, self._said = time.monotonic(), -1.0  # when and what the last line said
        if self.lines:
            options |= {"mininterval": SECONDS, "miniters": 1, "bar_format": LINE}
        super().__init__(*args, **options)
        if self.lines and self.total is None:
            self.bar_format = ENDLESS

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Show the present state; in a log, if a minute has passed since the last line."""
        if not self.lines:
            super().display(msg, pos)
        elif time.monotonic() - self._last >= SECONDS:
            self._say()

    def clear(self, nolock: bool = False) -> None:
        """Remove the bar; lines stay."""
        if not self.lines:
            super().clear(nolock)

    def close(self) -> None:
        """End the bar; in a log with a last line, if there was one before."""
        if not self.lines or self.disable:
            super().close()
            return
        self.disable: bool = True
        self._decr_instances(self)
        if -1 < self._said != self.n:
            self._say()

    def _say(self) -> None:
        self._last, self._said = time.monotonic(), self.n
        print(str(self).removeprefix(": "), file=self.fp, flush=True)
