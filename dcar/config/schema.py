"""What a setting is: a field of a dataclass whose default, meaning, bounds, choices and old names are declared once.

    @dataclass
    class TrainConfig:
        out: str = setting("runs/car", "Folder to write.", old=("out_dir",), place="folder")
        model: CARConfig = setting(CARConfig, "Shape of the decoder.")
        max_steps: int = setting(1000, "Updates of the weights.", minimum=1)

A class as default is a group of settings: its fields are set as `model.hidden_size=192`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """Where a number has to lie; of a list, every one of its members. NaN and infinity lie nowhere."""

    minimum: float | None = None  # the least
    above: float | None = None  # more than this
    maximum: float | None = None  # the greatest
    below: float | None = None  # less than this

    def hold(self, value: float) -> bool:
        return ((self.minimum is None or value >= self.minimum) and (self.above is None or value > self.above)
                and (self.maximum is None or value <= self.maximum) and (self.below is None or value < self.below))

    def __str__(self) -> str:
        signs = (("≥", self.minimum), (">", self.above), ("≤", self.maximum), ("<", self.below))
        return " and ".join(f"{sign} {limit:.15g}" for sign, limit in signs if limit is not None)


class Meaning(str):
    """The meaning of a setting, one line of --help, with everything else that its field declares.

    It is a text, under the key "help" of a field's metadata, because transformers.HfArgumentParser and trl.TrlParser
    hand that metadata to argparse as it is: they read our dataclasses too.
    """

    declared: bool = False  # by `setting`, not by another project
    bounds: Bounds = Bounds()
    choices: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # words that stand for something that ships; a path is as good
    old: tuple[str, ...] = ()  # names that it had before
    name: str = ""  # what it is called, where that is not the name of its field
    flat: bool = False  # a group whose members once stood outside of it
    short: str = ""  # option of one letter
    positional: bool = False  # given as a bare word
    place: str = ""  # "folder" or "file" that is written or read; nothing else may stand there


def setting(default: Any = MISSING, meaning: str = "", *, minimum: float | None = None, above: float | None = None,
            maximum: float | None = None, below: float | None = None, choices: typing.Iterable[str] = (),
            names: typing.Iterable[str] = (), old: tuple[str, ...] = (), name: str = "", flat: bool = False,
            short: str = "", positional: bool = False, place: str = "") -> Any:
    """A field of a schema. Without a default it has to be given; see the top of this file and `Meaning`.

    default: a value, a list or dict (copied), or the dataclass (or function) that makes a group of settings.
    """
    text = Meaning(meaning)
    text.declared = True
    text.bounds, text.choices, text.names = Bounds(minimum, above, maximum, below), tuple(choices), tuple(names)
    text.old, text.name, text.flat, text.short = old, name, flat, short
    text.positional, text.place = positional, place
    metadata = {"help": text}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


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
    hints = hints_of(schema)
    for f in dataclasses.fields(schema):
        if not f.init:
            continue
        meaning, hint = meaning_of(f), hints[f.name]
        default = getattr(instance, f.name) if instance is not None else (
            f.default_factory() if f.default_factory is not MISSING else f.default)
        key, place = prefix + (meaning.name or f.name), (*path, f.name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield Setting(key, place, hint, meaning, default, group=True)
            yield from _walk(hint, default, f"{key}.", place)
        else:
            yield Setting(key, place, hint, meaning, default)


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
        prefix = s.key.rpartition(".")[0]
        own = (*s.meaning.old, *([s.path[-1]] if s.meaning.name else ()))
        found |= {f"{prefix}.{name}" if prefix else name: s.key for name in own}
        if s.group and s.meaning.flat:
            inside = [other for other in known if other.startswith(f"{s.key}.")]
            found |= {other.rpartition(".")[2]: other for other in inside}
    return found
