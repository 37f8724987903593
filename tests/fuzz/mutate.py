"""Files as disks, networks and people leave them: bits flipped, pieces gone, values of another type."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "1",
    "../..", "\ud800", "\0", "x" * 5000, [], {}, [[]], [None], [1, "a"], {"a": 1}, {"": None}, [0] * 1000,
]  # fmt: skip
"""Values that JSON can hold in the place of any other."""


def mutate(data: bytes, name: str, rng: random.Random) -> bytes:
    """`data` of a file called `name`, damaged: JSON in its values as often as in its bytes, `.gz` inside as well."""
    if name.endswith(".gz") and rng.random() < 0.5:
        return gzip.compress(mutate(gzip.decompress(data), name.removesuffix(".gz"), rng))
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.6:
        return _other_values(data, name.endswith(".jsonl"), rng)
    if data[8:9] == b"{" and rng.random() < 0.4:  # safetensors
        return _other_header(data, rng)
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
    if not lines:
        return json.dumps(_other(json.loads(data), rng)).encode()
    rows = data.splitlines()
    number = rng.randrange(len(rows))
    rows[number] = json.dumps(_other(json.loads(rows[number]), rng)).encode()
    if rng.random() < 0.1:
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
        return [*value[:place], *([] if rng.random() < 0.2 else [_other(value[place], rng)]), *value[place + 1 :]]
    return rng.choice(ODD)


def _other_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header says something else of its tensors."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = rng.choice(list(header))
    if "dtype" in header[name] and rng.random() < 0.5:
        header[name]["dtype"] = rng.choice(("F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "F64", "I64", "C64", "X"))
    else:
        header = _other(header, rng)
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + data[8 + size :]


def damage(folder: Path, files: list[str], rng: random.Random) -> str:
    """Damage one of the `files` in `folder`, seldom two, or remove one; returns what was done, for messages."""
    done = []
    for name in rng.sample(files, 1 if rng.random() < 0.9 else min(2, len(files))):
        path = folder / name
        if rng.random() < 0.02:
            path.unlink()
            done.append(f"{name} removed")
        else:
            path.write_bytes(mutate(path.read_bytes(), name, rng))
            done.append(f"{name} damaged")
    return ", ".join(done)
