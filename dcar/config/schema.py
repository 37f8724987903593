"""Schemas: dataclasses whose fields declare default, help text, bounds and choices once.

    @dataclass
    class TrainConfig:
        out: str = setting("runs/car", "Folder to write.", place="folder")
        model: CARConfig = setting(CARConfig, "Shape of the decoder.")
        max_steps: int = setting(1000, "Updates of the weights.", minimum=1)

A class as default is a group of settings: its fields are set as `model.hidden_size=192`. Values
come from YAML; `fitting` converts them to the type of their setting, or raises ConfigError.
"""

import dataclasses
import enum
import math
import operator
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from dcar.errors import ConfigError
from dcar.home import expand


class Meaning(str):
    """Help text of a setting, with everything else that its field declares.

    It is a str, under the key "help" of a field's metadata, because transformers.HfArgumentParser
    and trl.TrlParser, which read our dataclasses too, pass that metadata to argparse.
    """

    declared: bool = False  # by `setting`, not by another project
    limits: tuple[tuple[str, float], ...] = ()  # ("≥", 1), …; for every item of a list
    choices: tuple[str, ...] = ()
    name: str = ""  # its key, if that is not the name of the field
    short: str = ""  # option of one letter
    positional: bool = False  # given as a bare word
    place: str = ""  # "folder" or "file": what kind of path it is
    bare: bool = False  # a group whose members are written without its name
    prose: bool = False  # text to be synthesised, in which ~ is not the home folder
    recorded: bool = False  # known from data or code and stored with a model, not set by users

    @property
    def bounds(self) -> str:
        return " and ".join(f"{sign} {limit:.15g}" for sign, limit in self.limits)


COMPARE = {"≥": operator.ge, ">": operator.gt, "≤": operator.le, "<": operator.lt}


def setting(
    default: Any = MISSING,
    meaning: str = "",
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: Iterable[str] = (),
    **more: Any,
) -> Any:
    """Declare a field of a schema. Without a default it is required; for other keywords see
    `Meaning`.

    default: a value, a list or dict (copied), or the dataclass (or function) that makes a group of
    settings.
    """
    if unknown := more.keys() - Meaning.__annotations__.keys():
        raise TypeError(f"setting() got unknown keywords: {', '.join(unknown)}")
    signs = (("≥", minimum), (">", above), ("≤", maximum), ("<", below))
    text = Meaning(meaning)
    vars(text).update(
        more,
        declared=True,
        choices=tuple(choices),
        limits=tuple((sign, limit) for sign, limit in signs if limit is not None),
    )
    if isinstance(default, list | dict):
        return field(default_factory=partial(type(default), default), metadata={"help": text})
    return field(
        **{"default_factory" if callable(default) else "default": default}, metadata={"help": text}
    )


LARGEST_SEED = 2**32 - 1


def seed_setting(default: Any, meaning: str) -> Any:
    """Declare a seed (or several), within the range that torch, numpy and transformers all
    accept."""
    return setting(default, meaning, minimum=0, maximum=LARGEST_SEED)


def check_seed(seed: int) -> None:
    """Raise ConfigError for a seed outside that range."""
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"seed={seed} must be between 0 and {LARGEST_SEED}")


@dataclass(frozen=True)
class Setting:
    """Setting of a schema, at any depth of nesting."""

    key: str  # as users write it, "model.hidden_size"
    path: tuple[str, ...]  # its attributes, from the schema on
    hint: Any  # its type
    meaning: Meaning
    default: Any  # MISSING if it must be given
    group: bool = False  # a dataclass: its members follow

    @property
    def within(self) -> tuple[str, ...]:
        """Attributes of the group that contains it; empty at the top."""
        return self.path[:-1]


def meaning_of(given: dataclasses.Field) -> Meaning:
    """Return the declaration of a field; fields of other projects' dataclasses have at most a
    help text."""
    text = given.metadata.get("help", "")
    return text if isinstance(text, Meaning) else Meaning(text)


def declaration(schema: type, name: str) -> Meaning:
    """Return the declaration of a schema's field: its own, or, if it repeats a field with another
    default alone, that of the nearest base class."""
    bases = (vars(base).get("__dataclass_fields__", {}) for base in schema.__mro__)
    fields = (base[name] for base in bases if name in base)
    return next((meaning_of(f) for f in fields if "help" in f.metadata), Meaning())


@cache
def hints_of(schema: Any) -> dict[str, Any]:
    """Return the types of a schema's fields by name."""
    return typing.get_type_hints(schema)


def _walk(schema: type, instance: Any, prefix: str, path: tuple[str, ...]) -> Iterator[Setting]:
    for f in dataclasses.fields(schema):
        if not f.init:
            continue
        meaning, hint = declaration(schema, f.name), hints_of(schema)[f.name]
        if meaning.recorded:
            continue
        if instance is not None:
            default = getattr(instance, f.name)
        elif f.default_factory is not MISSING:
            default = f.default_factory()
        else:
            default = f.default
        key, place = prefix + (meaning.name or f.name), (*path, f.name)
        group = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        yield Setting(key, place, hint, meaning, default, group)
        if group:
            yield from _walk(hint, default, prefix if meaning.bare else f"{key}.", place)


@cache
def settings_of(schema: Any) -> dict[str, Setting]:
    """Return all settings of a schema by key, groups before their members."""
    settings = list(_walk(schema, None, "", ()))
    known = {s.key: s for s in settings}
    assert len(known) == len(settings), f"two settings of {schema.__name__} have the same key"
    return known


# --- values ---------------------------------------------------------------------------------------

BOOLEANS = {
    word: b
    for b, words in ((True, "true yes on y 1"), (False, "false no off n 0"))
    for word in words.split()
}
KINDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    dict: "mapping",
    type(None): "null",
    Any: "anything",
}


@dataclass(frozen=True)
class Spelled:
    """Number or truth value of a YAML document with its spelling, which text settings keep: 010,
    1.10."""

    text: str
    value: int | float | bool


def unspelled(value: Any) -> Any:
    """Return a value of YAML in Python's types, without the spelling of its numbers."""
    if isinstance(value, dict):
        return {key: unspelled(of) for key, of in value.items()}
    if isinstance(value, list):
        return [unspelled(item) for item in value]
    return value.value if isinstance(value, Spelled) else value


class Mismatch(Exception):
    """Error: a value does not have the type of its setting."""


def kind(hint: Any) -> str:
    """Return a type in words: whole number, text, list of numbers, whole number or null, …"""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(kind(m) for m in sorted(members, key=lambda m: m is type(None)))
        )
    if origin in (list, tuple):
        return f"list of {kind(members[0])}s"
    return KINDS.get(origin or hint) or (
        "text" if isinstance(hint, type) and issubclass(hint, enum.Enum) else "value"
    )


def allowed(hint: Any, meaning: Meaning) -> str:
    """Return the allowed values of a setting, for --help: its type with bounds, or its choices."""
    if meaning.choices:
        choices = " | ".join(meaning.choices)
        return f"list of {choices}" if typing.get_origin(hint) in (list, tuple) else choices
    first, *others = kind(hint).split(" or ") if meaning.bounds else [kind(hint)]
    return ", or ".join([f"{first} {meaning.bounds}".strip(), *others])


def convert(value: Any, hint: Any) -> Any:
    """Convert `value`, as parsed from YAML, to the type `hint`. Raises Mismatch if that is not
    possible.

    Numbers are not truncated: 2.5 is not an int. A single value is accepted for a list of one.
    """
    origin, members = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return unspelled(value)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, members)
    if origin in (list, tuple) and value is not None and not isinstance(value, dict):
        return origin(
            convert(v, members[0]) for v in (value if isinstance(value, list | tuple) else [value])
        )
    if isinstance(value, Spelled):
        value = value.text if hint is str else value.value
    if origin is dict and isinstance(value, dict):
        return dict(unspelled(value))
    if hint is bool and str(value).lower() in BOOLEANS:
        return BOOLEANS[str(value).lower()]
    if hint in (int, float):
        return _number(value, hint)
    if hint is str or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        if isinstance(value, str | int | float | enum.Enum):
            return (
                str(value.value if isinstance(value, enum.Enum) else value)
                if hint is str
                else hint(value)
            )
    elif isinstance(hint, type) and isinstance(value, hint) and hint is not bool:
        return value
    raise Mismatch


def _one_of(value: Any, members: tuple[Any, ...]) -> Any:
    if type(unspelled(value)) in members:  # has one of the types already
        return unspelled(value)
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
        exact = (
            int(value)
            if isinstance(value, int) or str(value).lstrip("+-").isdigit()
            else int(number)
        )
    except (ValueError, OverflowError) as error:
        raise Mismatch from error
    if not number.is_integer() or abs(exact) >= 2**63:
        raise Mismatch
    return exact


def fitting(key: str, value: Any, hint: Any, meaning: Meaning) -> Any:
    """Convert `value` to the type of its setting, and check it. Raises ConfigError that states
    what it must be."""
    expected = f"one of {', '.join(meaning.choices)}" if meaning.choices else allowed(hint, meaning)
    if expected.startswith(("whole", "number", "list", "mapping")):
        expected = f"a {expected}"
    try:
        converted = convert(value, hint)
    except (Mismatch, ValueError) as error:
        raise ConfigError(f"{key} must be {expected}; not {_shown(value)}") from error
    for item in converted if isinstance(converted, list | tuple) else [converted]:
        if isinstance(item, float) and not math.isfinite(item):
            raise ConfigError(f"{key} must be finite; not {_shown(value)}")
        is_number = isinstance(item, int | float) and not isinstance(item, bool)
        inside = not is_number or all(COMPARE[sign](item, limit) for sign, limit in meaning.limits)
        if not inside or (meaning.choices and item is not None and item not in meaning.choices):
            raise ConfigError(f"{key} must be {expected}; not {_shown(value)}")
    return converted


def at_home(value: Any) -> Any:
    """Replace `~` by the home folder in a value, and in the items of a list."""
    if isinstance(value, list | tuple):
        return type(value)(map(at_home, value))
    return expand(value) if isinstance(value, str) and not isinstance(value, enum.Enum) else value


def _shown(value: Any) -> str:
    """Return a value for a message: at most 60 characters of it, those in the middle left out, so
    that the end of a path remains."""
    value = unspelled(value)
    text = "null" if value is None else str(value)
    if len(text) > 60:
        text = f"{text[:20]}…{text[-39:]}"
    return f"'{text}'" if isinstance(value, str) else text


def check(config: Any) -> None:
    """Check every field of a schema against its declaration; for `__post_init__` of schemas that
    are also built without `load_config`. Groups inside check themselves. Raises ConfigError."""
    schema: Any = type(config)
    hints = hints_of(schema)
    for f in dataclasses.fields(config):
        meaning = declaration(schema, f.name)
        if meaning.limits or meaning.choices or hints[f.name] is float:
            fitting(meaning.name or f.name, getattr(config, f.name), hints[f.name], meaning)


def check_place(key: str, value: Any, place: str) -> None:
    """Raise ConfigError if a folder is a file, a file is a folder, or something above them is a
    file."""
    if not value:
        return
    path = Path(value)
    if path.exists() and path.is_dir() != (place == "folder"):
        other = "file" if place == "folder" else "folder"
        raise ConfigError(
            f"{key}: {_shown(str(value))} is a {other}; choose a {place}, or another path"
        )
    above = next((p for p in path.parents if p.exists()), None)
    if above is not None and not above.is_dir():
        raise ConfigError(
            f"{key}: {_shown(str(value))} is below {above}, which is a file; choose another {place}"
        )
