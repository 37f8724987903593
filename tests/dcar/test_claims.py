"""One run at a time for every folder and file: locks that end with their process and leave
nothing."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from pkgutil import resolve_name

import pytest

from dcar.cli import jobs
from dcar.config.schema import settings_of
from dcar.errors import BusyError
from dcar.process import claimed

ROOT = Path(__file__).parents[2]
HOLD = """
import os, sys, time
from dcar.process import claimed
out, sys.argv[0] = sys.argv[1], "dcar train"
with claimed(out):
    worker = os.fork() or time.sleep(60) or os._exit(0)
    print(worker, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A process that holds `run`, and the pid of its worker."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    worker = int(process.stdout.readline())
    yield process, worker
    process.kill()
    process.wait()
    os.kill(worker, signal.SIGKILL)


def test_the_other_process_is_named_and_a_killed_one_is_no_obstacle(other, tmp_path, monkeypatch):
    process, worker = other
    named = rf"run: .*\(dcar train, process {process.pid} on \S+, 20"
    for same in (tmp_path / "run", tmp_path / "x" / ".." / "run"):
        with pytest.raises(BusyError, match=named), claimed(same):
            pass
    with claimed(tmp_path / "run2"), claimed(tmp_path / "run.wav"), claimed(""):
        pass
    with monkeypatch.context() as patch, claimed(tmp_path / "new" / "other"):
        patch.setenv("RANK", "1")  # the first process of a launch holds it for all
        with claimed(tmp_path / "new" / "other"):
            pass
    process.kill()
    process.wait()
    with claimed(tmp_path / "run"):
        os.kill(worker, 0)  # alive, and holds nothing
    assert not list(tmp_path.iterdir())


def test_what_a_run_has_written_stays_and_its_folder_may_be_replaced(tmp_path):
    out = tmp_path / "a" / "b"
    with pytest.raises(ZeroDivisionError), claimed(out):
        (tmp_path / "hidden").mkdir()
        (tmp_path / "hidden").rename(out)
        with pytest.raises(BusyError), claimed(out):
            pass
        raise ZeroDivisionError
    assert [p.name for p in out.parent.iterdir()] == ["b"]


def test_a_mount_point_is_locked_within(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with claimed(tmp_path):
        assert [p.name for p in tmp_path.iterdir()] == [f".{tmp_path.name}.lock"]
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch, caplog):
    def none(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with claimed(tmp_path / "run"):
        pass
    assert "run: cannot be locked (No locks available)" in caplog.text
    assert not list(tmp_path.iterdir())


def test_no_two_hold_it_while_others_remove_their_files(tmp_path):
    inside, turns, wrong = [], [0], []

    def work():
        while turns[0] < 200:
            try:
                with claimed(tmp_path / "run"):
                    inside.append(1)
                    wrong.extend(inside[1:])
                    turns[0] += 1
                    inside.clear()
            except BusyError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not list(tmp_path.iterdir())


MODULES = {
    **{name: module for name, (module, _) in jobs().items()},
    "pack": "dcar.vocoder.training.pack",
    "quickstart": "launch.quickstart",
    "gpu_rows": "launch.gpu_rows",
    "train_recognizer": "launch.starter.train_recognizer",
}
GIVEN = {
    "speak": ["Good day."],
    "train-policy": ["use_cpu=true"],
    "gpu_rows": ["device=cpu"],
    "train-vocoder": ["data=x"],
    "report": ["compare=."],
    "score": ["audio=x"],
}
NO_OUT = {"doctor", "analyse"}


@pytest.mark.parametrize("job", MODULES)
def test_every_command_claims_what_it_writes_before_it_loads_anything(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = resolve_name(f"{MODULES[job]}:main")
    known = settings_of(resolve_name(f"{MODULES[job]}:CONFIG"))
    assert ("out" not in known) == (job in NO_OUT)
    if job in NO_OUT:
        return
    out = "out.wav" if job == "speak" else "out"
    missing = [
        f"{s.key}={(s.meaning.choices or ('x',))[0]}"
        for s in known.values()
        if s.default is MISSING and s.key != "out" and not s.group
    ]
    claim = claimed(Path(out) / "jobs" if job == "quickstart" else out)
    with claim, pytest.raises(BusyError, match="out.* process "):
        main([*missing, *GIVEN.get(job, []), f"out={out}"])
    assert not list(tmp_path.iterdir())
