"""What a setting is: a field of a dataclass that declares its default, meaning, bounds, choices and old names once.

    @dataclass
    class TrainConfig:
        out: str = setting("runs/car", "Folder to write.", old=("out_dir",), place="folder")
        model: CARConfig = setting(CARConfig, "Shape of the decoder.")
        max_steps: int = setting(1000, "Updates of the weights.", minimum=1)

A class as default is a group of settings: its fields are set as `model.hidden_size=192`. Values come as YAML reads
them; `fitting` makes them the type of their setting, or raises ConfigError in plain words.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dcar.errors import ConfigError


class Meaning(str):
    """The meaning of a setting, one line of --help, with everything else that its field declares.

    It is a text, under the key "help" of a field's metadata, because transformers.HfArgumentParser and trl.TrlParser
    hand that metadata to argparse as it is: they read our dataclasses too.
    """

    declared: bool = False  # by `setting`, not by another project
    limits: tuple[tuple[str, float], ...] = ()  # ("≥", 1), …; of a list, every one of its members
    choices: tuple[str, ...] = ()
    old: tuple[str, ...] = ()  # names that it had before
    name: str = ""  # what it is called, where that is not the name of its field
    flat: bool = False  # a group whose members once stood outside of it
    short: str = ""  # option of one letter
    positional: bool = False  # given as a bare word
    place: str = ""  # "folder" or "file" that is written or read; nothing else may stand there

    @property
    def bounds(self) -> str:
        return " and ".join(f"{sign} {limit:.15g}" for sign, limit in self.limits)


HOLDS = {"≥": lambda a, b: a >= b, ">": lambda a, b: a > b, "≤": lambda a, b: a <= b, "<": lambda a, b: a < b}


def setting(default: Any = MISSING, meaning: str = "", *, minimum: float | None = None, above: float | None = None,
            maximum: float | None = None, below: float | None = None, choices: Iterable[str] = (),
            **more: Any) -> Any:
    """A field of a schema. Without a default it has to be given; for other keywords see `Meaning`.

    default: a value, a list or dict (copied), or the dataclass (or function) that makes a group of settings.
    """
    if unknown := more.keys() - Meaning.__annotations__.keys():
        raise TypeError(f"setting() does not know {', '.join(unknown)}")
    signs = (("≥", minimum), (">", above), ("≤", maximum), ("<", below))
    text = Meaning(meaning)
    vars(text).update(more, declared=True, choices=tuple(choices),
                      limits=tuple((sign, limit) for sign, limit in signs if limit is not None))
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": text})
    kind = {"default_factory": default} if callable(default) else {"default": default}
    return field(**kind, metadata={"help": text})


def seed_setting(default: Any, meaning: str) -> Any:
    """A seed (or several), within what torch, numpy and transformers all take."""
    return setting(default, meaning, minimum=0, maximum=2**32 - 1)


@dataclass(frozen=True)
class Setting:
    """One setting of a schema, wherever it is nested."""

    key: str  # as users write it, "model.hidden_size"
    path: tuple[str, ...]  # attributes that lead to it
    hint: Any  # its type
    meaning: Meaning
    default: Any  # MISSING where it has to be given
    group: bool = False  # a dataclass: its members follow


def meaning_of(given: dataclasses.Field) -> Meaning:
    """What a field declares; fields of other projects' dataclasses declare a help text at most."""
    text = given.metadata.get("help", "")
    return text if isinstance(text, Meaning) else Meaning(text)


@cache
def hints_of(schema: Any) -> dict[str, Any]:
    """Types of a schema's fields by name."""
    return typing.get_type_hints(schema)


def _walk(schema: type, instance: Any, prefix: str, path: tuple[str, ...]) -> Iterator[Setting]:
    for f in dataclasses.fields(schema):
        if not f.init:
            continue
        meaning, hint = meaning_of(f), hints_of(schema)[f.name]
        default = getattr(instance, f.name) if instance is not None else (
            f.default_factory() if f.default_factory is not MISSING else f.default)
        key, place = prefix + (meaning.name or f.name), (*path, f.name)
        group = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        yield Setting(key, place, hint, meaning, default, group)
        if group:
            yield from _walk(hint, default, f"{key}.", place)


@cache
def settings_of(schema: Any) -> dict[str, Setting]:
    """All settings of a schema by key, groups before their members."""
    return {s.key: s for s in _walk(schema, None, "", ())}


@cache
def old_names(schema: Any) -> dict[str, str]:
    """Names that settings had before -> their keys today."""
    found: dict[str, str] = {}
    known = settings_of(schema)
    for s in known.values():
        prefix = s.key[: s.key.rfind(".") + 1]
        own = (*s.meaning.old, *([s.path[-1]] if s.meaning.name else ()))
        found |= {prefix + name: s.key for name in own}
        if s.group and s.meaning.flat:
            found |= {other.rpartition(".")[2]: other for other in known if other.startswith(f"{s.key}.")}
    return found


# --- values ---------------------------------------------------------------------------------------------------------

SWITCH = {word: b for b, words in ((True, "true yes on y 1"), (False, "false no off n 0")) for word in words.split()}
KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "mapping", type(None): "null",
         Any: "anything"}


class Mismatch(Exception):
    """A value is of another type than its setting."""


def kind(hint: Any) -> str:
    """A type in words: whole number, text, list of numbers, whole number or null, …"""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(m) for m in sorted(members, key=lambda m: m is type(None))))
    if origin in (list, tuple):
        return f"list of {kind(members[0])}s"
    return KINDS.get(origin or hint) or ("text" if isinstance(hint, type) and issubclass(hint, enum.Enum) else "value")


def allowed(hint: Any, meaning: Meaning) -> str:
    """What a setting may be, for --help: its type with bounds, or its choices."""
    if meaning.choices:
        return "list of " * (typing.get_origin(hint) in (list, tuple)) + " | ".join(meaning.choices)
    first, *others = kind(hint).split(" or ") if meaning.bounds else [kind(hint)]
    return ", or ".join([f"{first} {meaning.bounds}".strip(), *others])


def convert(value: Any, hint: Any) -> Any:
    """`value`, as YAML gives it, as the type `hint`; Mismatch if it is of another one.

    A whole number is not cut to fit: 2.5 is no int. A single value stands for a list of one.
    """
    origin, members = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, members)
    if origin in (list, tuple) and value is not None and not isinstance(value, dict):
        return origin(convert(v, members[0]) for v in (value if isinstance(value, list | tuple) else [value]))
    if origin is dict and isinstance(value, dict):
        return dict(value)
    if hint is bool and str(value).lower() in SWITCH:
        return SWITCH[str(value).lower()]
    if hint in (int, float):
        return _number(value, hint)
    if hint is str or isinstance(hint, type) and issubclass(hint, enum.Enum):
        if isinstance(value, str | int | float | enum.Enum):
            return str(value.value if isinstance(value, enum.Enum) else value) if hint is str else hint(value)
    elif isinstance(hint, type) and isinstance(value, hint) and hint is not bool:
        return value
    raise Mismatch


def _one_of(value: Any, members: tuple[Any, ...]) -> Any:
    if type(value) in members or value is None and type(None) in members:  # is of one of the types already
        return value
    for member in members if value is not None else ():
        try:
            return convert(value, member)
        except (Mismatch, ValueError):
            continue
    raise Mismatch


def _number(value: Any, hint: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Mismatch
    try:
        number = float(value)
        if hint is float:
            return number
        exact = int(value) if isinstance(value, int) or str(value).lstrip("+-").isdigit() else int(number)
    except (ValueError, OverflowError) as error:
        raise Mismatch from error
    if not number.is_integer() or abs(exact) >= 2**63:
        raise Mismatch
    return exact


def fitting(key: str, value: Any, hint: Any, meaning: Meaning) -> Any:
    """`value` converted and within what the setting declares. ConfigError that says what it must be."""
    wanted = f"one of {', '.join(meaning.choices)}" if meaning.choices else allowed(hint, meaning)
    wanted = "a " * wanted.startswith(("whole", "number", "list", "mapping")) + wanted
    try:
        found = convert(value, hint)
    except (Mismatch, ValueError) as error:
        raise ConfigError(f"{key} must be {wanted}; not {_shown(value)}") from error
    for one in found if isinstance(found, list | tuple) else [found]:
        if isinstance(one, float) and not math.isfinite(one):
            raise ConfigError(f"{key} must be finite; not {_shown(value)}")
        inside = not isinstance(one, int | float) or isinstance(one, bool) or all(
            HOLDS[sign](one, limit) for sign, limit in meaning.limits)
        if not inside or meaning.choices and one is not None and one not in meaning.choices:
            raise ConfigError(f"{key} must be {wanted}; not {_shown(value)}")
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
        if meaning.limits or meaning.choices or hints[f.name] is float:
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
