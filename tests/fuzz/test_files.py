"""Damaged files of every format: the outcome is a result or an error of this project, and it comes within a minute.

The default run takes a few cases of each format, `-m slow` at least 10 000 over all; FUZZ_SEED gives others, FUZZ_CASES
the number a format. The message of a failure names seed and case: the same come again.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from formats import FORMATS, Format
from mutate import damage

from dcar.errors import DCARError

SEED, CASES = os.environ.get("FUZZ_SEED", "0"), int(os.environ.get("FUZZ_CASES", "660"))
LONGEST = 60.0  # seconds a case


class TooLong(BaseException):
    """A case did not end."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attack(fmt: Format, cases: range, good: Path, work: Path) -> tuple[Counter[str], list[str]]:
    """How the cases ended, and those that ended in neither a result nor an error of the project."""
    files = fmt.make(good)
    fmt.read(copied(good, work))  # what is not damaged is read
    ends: Counter[str] = Counter()
    bad: list[str] = []
    for case in cases:
        done = damage(copied(good, work), files, random.Random(f"{SEED} {fmt.name} {case}"))
        try:
            with limit(LONGEST):
                fmt.read(work)
            ends["result"] += 1
        except DCARError as error:
            assert str(error), f"{fmt.name} {case}: an error without words"
            ends[type(error).__name__] += 1
        except (Exception, TooLong) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            bad.append(f"{fmt.name}, seed {SEED}, case {case} ({done}): {type(error).__name__}: {str(error)[:200]!a} "
                       f"in {where.filename}:{where.lineno}")
    return ends, bad


def copied(good: Path, work: Path) -> Path:
    shutil.rmtree(work, ignore_errors=True)
    return Path(shutil.copytree(good, work))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def run(fmt: Format, cases: range, tmp_path: Path) -> Counter[str]:
    (tmp_path / "good").mkdir()
    ends, bad = attack(fmt, cases, tmp_path / "good", tmp_path / "work")
    assert not bad, f"{len(bad)} of {len(cases)}:\n" + "\n".join(bad[:30])
    return ends


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_damaged_files(fmt: Format, tmp_path: Path) -> None:
    run(fmt, range(max(4, round(20 * fmt.cost))), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_many_damaged_files(fmt: Format, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = run(fmt, range(1000, 1000 + round(CASES * fmt.cost)), tmp_path)
    with capsys.disabled():
        print(f"\n{fmt.name}: {ends.total()} cases, {dict(ends.most_common())}")


def test_the_slow_run_is_of_ten_thousand_cases() -> None:
    assert sum(round(660 * fmt.cost) for fmt in FORMATS) >= 10_000
