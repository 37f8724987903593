"""Declaration of decoding methods. A method is a class whose fields are its settings:

    @decoding_method("ssd", Style("SSD", "#8d5fc0", ">", "β"), example="ssd-0.4")
    class SSD(SpeculativeDecoding):
        beta: float = option(minimum=0)
        eos: bool = option(False, "-eos", word="eos")

The decorator makes it a dataclass and registers its name. Nothing else lists methods: commands,
names such as `ssd-0.4-eos`, tables and plots read the class. A class of your own is declared in
the same way.

In a compact name, `mark` precedes the value of a setting (`-0.4`, `@draft`, `:4`, `@n8`), or is all
that is written of a flag (`-eos`). Settings are written in the order of the fields, those by
keyword last.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from functools import cache
from typing import Any, TypeVar, dataclass_transform

from dcar.config.schema import Meaning, meaning_of, setting
from dcar.errors import ConfigError

Class = TypeVar("Class", bound=type)
METHODS: dict[str, Any] = {}
"""Registered classes by name, in the order of tables and plots."""
RESERVED = {"method", "temperature", "top_k", "top_p", "tuned", "limit"}
"""Keys of a method's mapping that are not settings of its class."""


@dataclass(frozen=True)
class Style:
    """Label of a method and its line in a plot. symbol: of its setting; marker: a shape of
    matplotlib."""

    label: str = ""
    color: str = "#4d4d4d"
    marker: str | tuple[int, int, int] = "x"
    symbol: str = ""

    def of_candidates(self, num_candidates: int) -> Style:
        """Return the style of a method that chooses among so many candidates: the same hue,
        darker, and a star with as many points."""
        if num_candidates == 1:
            return self
        strength = max(0.3, 1 - 0.15 * math.log2(num_candidates))
        shade = "".join(f"{round(strength * part):02x}" for part in bytes.fromhex(self.color[1:]))
        return replace(self, color=f"#{shade}", marker=(num_candidates, 1, 0))


@dataclass(frozen=True)
class MethodSetting:
    """Setting of a method. name: its key in a mapping; attribute: its field.

    default: ... if it is required, None if it may be omitted. word: its value for a reader, as in
    "{} candidates"; methods that differ in a setting with a word are separate lines of a plot, not
    points on one.
    """

    name: str
    type: Any = float
    mark: str = "-"
    default: Any = ...
    word: str = ""
    meaning: Meaning = field(default_factory=Meaning)
    attribute: str = ""

    def written(self, value: Any) -> str:
        """Return the setting as in a compact name."""
        if self.type is bool:
            return self.mark
        values = value if isinstance(value, list | tuple) else [value]
        return "".join(f"{self.mark}{value_text(v)}" for v in values)


def value_text(value: str | float) -> str:
    """Return a value as in a name: numbers in their shortest form, 0.4 and not 0.40, 3 and not
    3.0."""
    return value if isinstance(value, str) else repr(value).removesuffix(".0")


def option(
    default: Any = MISSING,
    mark: str = "-",
    *,
    word: str = "",
    key: str = "",
    kw_only: bool = False,
    **bounds: Any,
) -> Any:
    """Declare a setting of a method, for `mark` and `word` see `MethodSetting`.

    key: its name in a mapping, if that is not the name of the field; bounds: minimum, above,
    maximum, below and choices, as in `dcar.config.setting`.
    """
    meaning = meaning_of(setting(None, **bounds))
    metadata = {"help": meaning, "mark": mark, "word": word, "key": key}
    return field(default=default, metadata=metadata, kw_only=kw_only)


def unlisted(default: Any = None, *, kw_only: bool = False) -> Any:
    """Declare a field that is no setting: a model that `Method.bind` takes, or an argument for use
    from Python."""
    return field(default=default, metadata={"unlisted": True}, kw_only=kw_only)


@dataclass_transform(eq_default=False)
def decoding_method(
    name: str = "", style: Style | None = None, example: str = ""
) -> Callable[[Class], Class]:
    """Declare a class as a decoding method.

    name: begins its compact names; without one it is named by its path, package.module.Class, and
    is not registered. style: label and line in plots. example: a name as it is written, for
    messages; needed if a setting is required.
    """

    def declare(cls: Class) -> Class:
        method: Any = dataclass(eq=False, repr=False)(cls)
        method.kind, method.example = name, example or name
        method.style = style or Style(name)
        if name:
            METHODS[name] = method
        return method

    return declare


def settings_of(cls: Any) -> tuple[MethodSetting, ...]:
    """Return the settings of a method's class in the order in which a name contains them. Raises
    ConfigError for a field that cannot be a setting."""
    return _settings_of(cls)


@cache  # not of the function above: mypy does not take a class for hashable
def _settings_of(cls: Any) -> tuple[MethodSetting, ...]:
    if not dataclasses.is_dataclass(cls):
        return ()
    hints = typing.get_type_hints(cls)
    listed = [f for f in dataclasses.fields(cls) if f.init and "unlisted" not in f.metadata]
    return tuple(_setting_of(cls, f, hints[f.name]) for f in sorted(listed, key=_by_keyword))


def has_setting(cls: Any, name: str) -> bool:
    """Return whether a method's class has a setting with this name."""
    return any(s.name == name for s in settings_of(cls))


def _by_keyword(f: dataclasses.Field) -> tuple[bool, bool]:
    """Return the place of a field in names: those by keyword last, of these flags first."""
    return bool(f.kw_only), bool(f.kw_only) and not f.metadata.get("mark", "-").startswith("-")


def _setting_of(cls: Any, f: dataclasses.Field, hint: Any) -> MethodSetting:
    name = f.metadata.get("key") or f.name
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        alternatives = [t for t in typing.get_args(hint) if t is not type(None)]
        hint = alternatives[0] if len(alternatives) == 1 else float
    item = typing.get_args(hint)[0] if typing.get_origin(hint) in (list, tuple) else hint
    if name in RESERVED or item not in (int, float, bool, str):
        reason = "this name is taken" if name in RESERVED else f"{hint} cannot be written in a name"
        raise ConfigError(
            f"{cls.__module__}.{cls.__qualname__}: field {name}: {reason}; a setting is a number, "
            "a flag, a text or a list of them; declare others by dcar.decoding.declare.unlisted"
        )
    default: Any = f.default
    if f.default_factory is not MISSING:
        default = f.default_factory()
    return MethodSetting(
        name,
        hint,
        f.metadata.get("mark", "-"),
        ... if default is MISSING else default,
        f.metadata.get("word", ""),
        meaning_of(f),
        f.name,
    )


def compact_name(kind: str, cls: Any, values: Mapping[str, Any]) -> str:
    """Return the compact name of a method, given those of its settings that are not defaults."""
    shown = {s.name: s.default for s in settings_before(cls, values)} | dict(values)
    settings = (s.written(shown[s.name]) for s in settings_of(cls) if s.name in shown)
    return kind + "".join(settings)


def settings_before(cls: Any, values: Mapping[str, Any]) -> list[MethodSetting]:
    """Return the settings before the last of `values` that have no mark but their position: a
    name contains them too."""
    positional = [s for s in settings_of(cls) if s.mark == "-"]
    last = max((i for i, s in enumerate(positional) if s.name in values), default=0)
    return positional[:last]
