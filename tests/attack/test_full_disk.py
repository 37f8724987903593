"""A disk that fills up in the middle of a job: the error says so, and the same command goes on when there is room.

A small tmpfs where this user may mount one (root); elsewhere the calls that write fail from some moment on.
"""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("name", ["train", "dcpo", "compare", "prepare"])
def test_a_full_disk_is_said_and_survived(name, share, jobs, disk):
    job = jobs[name]
    whole = harness.run(job, disk / "whole" / "out")
    assert whole.status == [0], whole.said[-2000:]
    expected = harness.outcome(job, disk / "whole" / "out")
    size = sum(-(-p.stat().st_size // 4096) * 4096 for p in (disk / "whole").rglob("*") if p.is_file())
    subprocess.run(["rm", "-r", disk / "whole"], check=True)
    subprocess.run(["mount", "-o", f"remount,size={int(size * share) // 4096 * 4096 + 4096}", disk], check=True)
    end = harness.run(job, disk / "run" / "out")
    assert end.status == [1] and "Traceback" not in end.said, end.said[-2000:]
    assert " be written (" in end.said, end.said[-1000:]
    assert any(way in end.said for way in ("same command", "run again", "free some space")), end.said[-1000:]
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    again = harness.run(job, disk / "run" / "out")
    assert again.status == [0], again.said[-2000:]
    assert not harness.differences(expected, harness.outcome(job, disk / "run" / "out"))


@pytest.mark.parametrize("name", ["train", "dcpo", "compare"])
def test_writes_that_fail_end_in_one_line(name, jobs, tmp_path, monkeypatch):
    """Without a file system of one's own: the third flush to the disk fails, as all after it."""
    sync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        end = harness.run(jobs[name], tmp_path / "out")
    assert end.status == [1] and "Traceback" not in end.said, end.said[-2000:]
    assert "could not be written (" in end.said and "the same command" in end.said and " are free in " in end.said
    assert harness.run(jobs[name], tmp_path / "out").status == [0]
