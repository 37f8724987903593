"""Values: as the type of their setting, and within its bounds. What does not fit is a ConfigError in plain words."""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from pathlib import Path
from typing import Any

from dcar.config.schema import Meaning, hints_of, meaning_of
from dcar.errors import ConfigError

WORDS = {True: ("true", "yes", "on", "y", "1"), False: ("false", "no", "off", "n", "0")}
NAMES = {int: "int", float: "float", bool: "bool", str: "text", dict: "mapping", type(None): "null", Any: "anything"}
SPOKEN = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "text": "text",
    "list of int": "a list of whole numbers", "list of float": "a list of numbers", "list of text": "a list of texts",
    "mapping": "a mapping, {key: value, …}", "null": "null", "anything": "anything",
}


class Mismatch(Exception):
    """A value is of another type than its setting."""


def kind(hint: Any) -> str:
    """A type by the name that --help gives it: int, float, bool, text, list of int, int or null, …"""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(m) for m in sorted(members, key=lambda m: m is type(None))))
    if origin in (list, tuple):
        return f"list of {kind(members[0])}"
    return NAMES.get(origin or hint) or ("text" if isinstance(hint, type) and issubclass(hint, enum.Enum) else "value")


def convert(value: Any, hint: Any) -> Any:
    """`value`, as YAML gives it, as the type `hint`; Mismatch if it is of another one.

    A whole number is not cut to fit: 2.5 is no int. A single value stands for a list of one.
    """
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, members)
    if origin in (list, tuple):
        if value is None or isinstance(value, dict):
            raise Mismatch
        return origin(convert(v, members[0]) for v in (value if isinstance(value, list | tuple) else [value]))
    if (origin or hint) is dict:
        if not isinstance(value, dict):
            raise Mismatch
        return dict(value)
    if hint is bool:
        found = [b for b, words in WORDS.items() if value is b or str(value).lower() in words]
        if not found:
            raise Mismatch
        return found[0]
    if hint in (int, float):
        return _number(value, hint)
    if hint is str or isinstance(hint, type) and issubclass(hint, enum.Enum):
        if not isinstance(value, str | int | float | enum.Enum):
            raise Mismatch
        return str(value.value if isinstance(value, enum.Enum) else value) if hint is str else hint(value)
    if not isinstance(value, hint):
        raise Mismatch
    return value


def _one_of(value: Any, members: tuple[Any, ...]) -> Any:
    for member in members:  # what is of one of the types already stays as it is
        if isinstance(member, type) and type(value) is member:
            return value
    if value is None:
        raise Mismatch
    for member in members:
        try:
            return convert(value, member)
        except (Mismatch, ValueError):
            continue
    raise Mismatch


def _number(value: Any, hint: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Mismatch
    try:
        number = float(value) if hint is float else value if isinstance(value, int) else float(value)
    except (ValueError, OverflowError) as error:
        raise Mismatch from error
    if hint is int:
        if isinstance(number, float) and not number.is_integer() or abs(number) >= 2**63:
            raise Mismatch
        return int(value) if isinstance(value, str) and "." not in value and "e" not in value.lower() else int(number)
    return number


def allowed(hint: Any, meaning: Meaning) -> str:
    """What a setting may be, for --help: its type with bounds, or its choices."""
    if meaning.choices:
        of_list = "list of " if typing.get_origin(hint) in (list, tuple) else ""
        return of_list + " | ".join(meaning.choices)
    first, *others = kind(hint).split(" or ")
    if not str(meaning.bounds):
        return kind(hint)
    return f"{first} {meaning.bounds}" + "".join(f", or {other}" for other in others)


def _spoken(hint: Any, meaning: Meaning) -> str:
    if meaning.choices:
        return f"one of {', '.join(meaning.choices)}"
    words = [SPOKEN.get(part, part) for part in kind(hint).split(" or ")]
    if not str(meaning.bounds):
        return " or ".join(words)
    first, *rest = words
    return " or ".join([f"{first} {meaning.bounds}", *rest])


def fitting(key: str, value: Any, hint: Any, meaning: Meaning) -> Any:
    """`value` converted and within what the setting declares. ConfigError that says what it must be."""
    try:
        found = convert(value, hint)
    except (Mismatch, ValueError) as error:
        raise ConfigError(f"{key} must be {_spoken(hint, meaning)}; not {_shown(value)}") from error
    for number in found if isinstance(found, list | tuple) else [found]:
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{key} must be finite; not {_shown(value)}")
        if isinstance(number, int | float) and not isinstance(number, bool) and not meaning.bounds.hold(number):
            raise ConfigError(f"{key} must be {_spoken(hint, meaning)}; not {_shown(value)}")
        if meaning.choices and number is not None and number not in meaning.choices:
            raise ConfigError(f"{key} must be {_spoken(hint, meaning)}; not {_shown(value)}")
    return found


def _shown(value: Any) -> str:
    text = f"'{value}'" if isinstance(value, str) else "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def check(config: Any) -> None:
    """Hold every field of a schema to what it declares; ConfigError. For `__post_init__` of schemas that programs build
    without `load_config`; groups inside have checked themselves."""
    schema: Any = type(config)
    hints = hints_of(schema)
    for f in dataclasses.fields(config):
        meaning = meaning_of(f)
        if str(meaning.bounds) or meaning.choices or hints[f.name] is float:
            fitting(meaning.name or f.name, getattr(config, f.name), hints[f.name], meaning)


def check_place(key: str, value: Any, place: str) -> None:
    """A folder must not be a file, a file no folder, and nothing above them a file. ConfigError."""
    if not value:
        return
    path = Path(value)
    try:
        if path.exists() and path.is_dir() != (place == "folder"):
            raise ConfigError(f"{key}: {_shown(str(value))} is a {'file' if place == 'folder' else 'folder'}, and a "
                              f"{place} belongs there")
        above = next((p for p in path.parents if p.exists()), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {_shown(str(value))} cannot be a {place} ({error})") from error
    if above is not None and not above.is_dir():
        raise ConfigError(f"{key}: {_shown(str(value))} lies below {above}, which is a file; give another {place}")
