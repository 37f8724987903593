"""Progress: bars on a terminal, a line a minute in a log."""

import io
import re
import time

import pytest

from dcar import progress
from dcar.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move: [seconds]."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def bar(stream, clock, **options) -> Progress:
    made = Progress(**{"total": 40, "desc": "compare", "unit": "utt", "file": stream, **options})
    if not made.disable:
        made._time = lambda: clock[0]
        made.start_t = made.last_print_t = clock[0]
    return made


def test_a_log_has_a_line_a_minute_and_one_at_the_end(clock):
    log = io.StringIO()
    with bar(log, clock) as shown:
        for _ in range(40):
            clock[0] += 7
            shown.update()
    lines = log.getvalue().splitlines()
    assert "\r" not in log.getvalue() and len(lines) == 5
    done = [
        int(re.match(r"compare: (\d+) of 40 utt, \d+:\d\d so far, ", line)[1]) for line in lines
    ]
    assert done == [9, 18, 27, 36, 40]


def test_work_without_a_known_end_has_no_rest(clock):
    log = io.StringIO()
    with bar(log, clock, total=None) as shown:
        clock[0] += 70
        shown.update(40)
    assert log.getvalue() == "compare: 40 utt, 01:10 so far\n"


def test_the_last_line_is_not_repeated(clock):
    log = io.StringIO()
    with bar(log, clock) as shown:
        clock[0] += 70
        shown.update(40)
    assert len(log.getvalue().splitlines()) == 1


def test_short_work_leaves_no_trace_in_a_log(clock):
    log = io.StringIO()
    with bar(log, clock, disable=True) as hidden:
        clock[0] += 500
        hidden.update()
    with bar(log, clock) as shown:
        shown.update(20)
        clock[0] += 50
        shown.write("step 3: fine", file=log)
        shown.update(20)
    assert log.getvalue() == "step 3: fine\n"


def test_a_terminal_has_a_bar(clock):
    terminal = Terminal()
    with bar(terminal, clock) as shown:
        clock[0] += 1
        shown.update(40)
    assert "\r" in terminal.getvalue() and "40/40" in terminal.getvalue()
