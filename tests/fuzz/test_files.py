"""Files as disks, networks and people leave them: bits flipped, pieces gone, values of another
type. The outcome is a result or an error of this project, and it comes within a minute.

The default run takes some cases of each format, `-m slow` at least 10 000 over all; FUZZ_SEED gives
others, FUZZ_CASES the number a format. The message of a failure names seed and case: the same come
again.
"""

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from formats import FORMATS, Format

from dcar.errors import DCARError

SEED, CASES = os.environ.get("FUZZ_SEED", "0"), int(os.environ.get("FUZZ_CASES", "660"))
LONGEST = 60.0  # seconds a case

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "1", "../..", "\ud800", "\0", "x" * 5000,
    [], {}, [[]], [None], [1, "a"], {"a": 1}, {"": None}, [0] * 1000,
]  # fmt: skip
"""Values that JSON can hold in the place of any other."""


def damaged(data: bytes, name: str, rng: random.Random) -> bytes:
    """`data` of a file called `name`, damaged: JSON in its values as often as in its bytes,
    `.gz` inside as well."""
    if name.endswith(".gz") and rng.random() < 0.5:
        return gzip.compress(damaged(gzip.decompress(data), name.removesuffix(".gz"), rng))
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.6:
        return _other_values(data, name.endswith(".jsonl"), rng)
    return _other_bytes(data, rng)


def _other_bytes(data: bytes, rng: random.Random) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(raw) + 1)
        if raw and rng.random() < 0.4:  # heads of files say how the rest is read
            place = rng.randrange(min(len(raw), 200))
        match rng.choice(("flip", "flip", "flip", "cut", "drop", "repeat", "insert", "zero")):
            case "flip" if place < len(raw):
                raw[place] ^= 1 << rng.randrange(8)
            case "cut":
                del raw[place:]
            case "drop":
                del raw[place : place + rng.choice((1, 4, 64, 4096))]
            case "repeat":
                raw[place:place] = raw[place : place + rng.choice((1, 4, 64, 4096))]
            case "insert":
                raw[place:place] = rng.randbytes(rng.choice((1, 4, 64)))
            case "zero":
                length = min(rng.choice((1, 4, 64, 4096)), len(raw) - place)
                raw[place : place + length] = bytes(length)
    return bytes(raw)


def _other_values(data: bytes, lines: bool, rng: random.Random) -> bytes:
    rows = data.splitlines() if lines else [data]
    number = rng.randrange(len(rows))
    rows[number] = json.dumps(_other(json.loads(rows[number]), rng)).encode()
    if lines and rng.random() < 0.1:
        rows.insert(number, rows[rng.randrange(len(rows))])
    return b"\n".join(rows) + b"\n"


def _other(value: Any, rng: random.Random) -> Any:
    """`value` with something else in one place, of any depth, or without it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.05:
            return {**value, key + "_": value[key]}
        return {**value, key: _other(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        return [
            *value[:place],
            *([] if rng.random() < 0.2 else [_other(value[place], rng)]),
            *value[place + 1 :],
        ]
    return rng.choice(ODD)


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


@pytest.mark.parametrize(
    ("first", "cases"), [(0, 20), pytest.param(1000, CASES, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_damaged_files(fmt: Format, first: int, cases: int, tmp_path: Path) -> None:
    """One of a format's files is damaged, seldom two, or removed."""
    good, work = tmp_path / "good", tmp_path / "work"
    good.mkdir()
    files = fmt.make(good)
    fmt.read(shutil.copytree(good, work))  # what is not damaged is read
    ends: Counter[str] = Counter()
    bad: list[str] = []
    for case in range(first, first + max(4, round(cases * fmt.cost))):
        shutil.rmtree(work)
        shutil.copytree(good, work)
        rng = random.Random(f"{SEED} {fmt.name} {case}")
        chosen = rng.sample(files, 1 if rng.random() < 0.9 else min(2, len(files)))
        for name in chosen:
            if rng.random() < 0.02:
                (work / name).unlink()
            else:
                (work / name).write_bytes(damaged((work / name).read_bytes(), name, rng))
        try:
            with limit(LONGEST):
                fmt.read(work)
            ends["result"] += 1
        except DCARError as error:
            assert str(error), f"{fmt.name} {case}: an error without words"
            ends[type(error).__name__] += 1
        except (Exception, TooLong) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            bad.append(
                f"{fmt.name}, seed {SEED}, case {case} ({', '.join(chosen)}): "
                f"{type(error).__name__}: {str(error)[:200]!a} in {where.filename}:{where.lineno}"
            )
    print(f"{fmt.name}: {ends.total()} cases, {dict(ends.most_common())}")
    assert not bad, f"{len(bad)}:\n" + "\n".join(bad[:30])
