"""Settings of a command: `load_config` builds its dataclass from YAML files and `key=value`;
`save_config` writes it.

An unknown key, a wrong type or a value outside its bounds is an error that names the place and the
allowed values. The resolved configuration is saved with the results of a run, and reproduces it.
"""

import copy
import dataclasses
import difflib
import enum
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar, get_origin

from dcar.config.read import (
    COMMAND_LINE,
    Given,
    dump_yaml,
    file_settings,
    leaves,
    split_arguments,
    typed,
)
from dcar.config.schema import Setting, allowed, at_home, check_place, fitting, settings_of
from dcar.errors import ConfigError
from dcar.storage import write_text

T = TypeVar("T")


def load_config(schema: type[T], arguments: Sequence[str] | None = None) -> T:
    """Build `schema` (a dataclass) from `[--config RECIPE] [key=value …]`; nested keys are written
    a.b=value.

    Later values override earlier ones, and the command line overrides files. `--help` prints the
    settings and exits. Raises ConfigError for an unreadable file, an unknown key (naming the
    nearest one), a wrong type, a value outside its bounds, or one that the schema's `__post_init__`
    refuses.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        print(help_text(schema))
        raise SystemExit(0)
    top: Any = schema
    settings = settings_of(top)
    values: dict[str, Given] = {}
    for given in _given(schema, arguments):
        if given.key not in settings:
            raise ConfigError(
                f"{given.where}: unknown setting '{given.key}'{_nearest(given.key, settings)}"
            )
        if settings[given.key].group:
            raise ConfigError(f"{given.where}: {_not_a_group(settings[given.key], settings)}")
        values[given.key] = given
    converted = {}
    for key, given in values.items():
        s = settings[key]
        try:
            value = fitting(key, given.value, s.hint, s.meaning)
            converted[key] = value if s.meaning.prose else at_home(value)
            if s.meaning.place:
                if converted[key] == "" and s.default not in ("", None):
                    raise ConfigError(
                        f"{key} is empty: give a {s.meaning.place}, or omit the setting"
                    )
                check_place(key, converted[key], s.meaning.place)
        except ConfigError as error:
            raise ConfigError(f"{given.where}: {error}") from error
    if missing := [
        s.key for s in settings.values() if s.default is MISSING and s.key not in converted
    ]:
        raise ConfigError(f"{missing[0]} is not set: give {missing[0]}=…")
    if "out" in settings and settings["out"].meaning.place:
        out = converted.get("out", settings["out"].default)
        if out and os.path.islink(os.path.normpath(out)):
            # a link to another disk stays: what is written replaces files and folders whole
            converted["out"] = os.path.realpath(out)
    try:
        return _build(top, None, (), converted, top)
    except ConfigError as error:
        raise ConfigError(_located(str(error), values)) from error


def _given(schema: type, arguments: Sequence[str]) -> list[Given]:
    """Return all settings of files and command line, in increasing priority."""
    schema_settings = settings_of(schema)
    groups = frozenset(k for k, s in schema_settings.items() if s.group and not s.meaning.bare)
    files, pairs = split_arguments(arguments, schema_settings)
    settings = [given for path in files for given in file_settings(path, groups)]
    for key, text in pairs:
        is_text = key in schema_settings and schema_settings[key].hint in (str, str | None)
        try:
            value = (
                text
                if key in schema_settings and schema_settings[key].meaning.positional
                else typed(text, is_text)
            )
        except ConfigError as error:
            raise ConfigError(f"{COMMAND_LINE}: {key}: {error}") from error
        settings += leaves({key: value}, groups, lambda key: COMMAND_LINE)
    return settings


def _not_a_group(group: Setting, known: dict[str, Setting]) -> str:
    if group.meaning.bare:
        members = (s.key for s in known.values() if s.within == group.path)
        return f"{group.key} is not a setting: set {', '.join(members)} without it"
    return f"{group.key} is a group of settings: set {group.key}.…, not the group itself"


def _nearest(key: str, known: dict[str, Setting]) -> str:
    parent, _, name = key.rpartition(".")
    if other := [s.key for s in known.values() if s.path[-1] == name and not s.group]:
        # the key was its name in Python or in TRL, or had the name of its group
        return f"; write {other[0]}=…"
    if parent in known and get_origin(known[parent].hint) is dict:
        return f"; {parent} is one mapping: write {parent}={{{name}: …}}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known keys: {', '.join(k for k, s in known.items() if not s.group)}"


def _build(
    schema: type, instance: Any, within: tuple[str, ...], values: dict[str, Any], top: type
) -> Any:
    """Build `schema` with these values, and the others from `instance` (defaults of a group) or
    its own defaults."""
    given: dict[str, Any] = {}
    for s in settings_of(top).values():
        if s.within == within and s.group:
            given[s.path[-1]] = _build(s.hint, s.default, s.path, values, top)
        elif s.within == within and s.key in values:
            given[s.path[-1]] = values[s.key]
    return (
        schema(**given)
        if instance is None
        else dataclasses.replace(copy.deepcopy(instance), **given)
    )


def _located(message: str, values: dict[str, Given]) -> str:
    """Return the message of a schema's own check, after the places of the settings that it
    names."""
    places = [
        given.where
        for key, given in values.items()
        if re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", message)
    ]
    return f"{', '.join(dict.fromkeys(places))}: {message}" if places else message


def plain(value: Any) -> Any:
    """Return a configuration, or a part of one, in YAML's types, with the keys that users write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        written: dict[str, Any] = {}
        for s in settings_of(type(value)).values():
            if not s.within:
                of = plain(getattr(value, s.path[0]))
                written |= of if s.meaning.bare else {s.key: of}
        return written
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def save_config(config: Any, path: str | Path) -> None:
    """Write the resolved configuration as YAML, atomically."""
    write_text(path, dump_yaml(plain(config), sort_keys=False))


# --- --help ---------------------------------------------------------------------------------------

WIDTH = 100
LEFT = 36  # widest column of keys


def program() -> str:
    """Return the command as it was called: `dcar train`, or `python -m dcar.train`."""
    if sys.argv[0].startswith("dcar "):
        return sys.argv[0]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return Path(sys.argv[0]).name


def default_text(value: Any) -> str:
    """Return a default as a user would type it; … if a setting has none."""
    if value is MISSING or value == "":
        return "…" if value is MISSING else ""
    shown = dump_yaml(plain(value), default_flow_style=True, width=10**6)
    # YAML ends a document that is one word with dots
    return shown.strip().removesuffix("...").strip()


def _rows(settings: list[Setting]) -> list[str]:
    """Return rows of `key=default`, the help text and the allowed values."""
    names = [f"{s.key}={default_text(s.default)}" for s in settings]
    left = min(LEFT, max(map(len, names), default=0))
    lines = []
    for s, name in zip(settings, names, strict=True):
        what = allowed(s.hint, s.meaning)
        if s.default is MISSING:
            what = f"required, {what}"
        if len(what) < 40:
            what = what.replace(" ", "\u00a0")  # no line is broken there
        text = textwrap.wrap(f"{s.meaning} [{what}]", WIDTH - left - 4, break_long_words=False)
        if len(name) > left:  # too long for its column: on a line of its own
            lines.append(f"  {name}")
            name = ""
        lines += [
            f"  {name if i == 0 else '':{left}}  {line}".replace("\u00a0", " ")
            for i, line in enumerate(text)
        ]
    return lines


def help_text(schema: type) -> str:
    """Return usage, the purpose of the command, and its settings: key=default, help text, allowed
    values; groups with a heading.

    Settings of another project's dataclass come last, one line each: the first sentence of their
    help.
    """
    settings = settings_of(schema)
    refused: frozenset[str] = getattr(schema, "REFUSED", frozenset())
    words = [s.key.upper() for s in settings.values() if s.meaning.positional]
    words += [f"[{s.meaning.short} {s.key.upper()}]" for s in settings.values() if s.meaning.short]
    lines = [" ".join(["usage:", program(), *words, "[--config RECIPE]", "[key=value …]"]), ""]
    lines += textwrap.wrap((schema.__doc__ or "").strip().split("\n\n")[0], WIDTH)
    for group in (None, *(s for s in settings.values() if s.group)):
        lines += ["", *([f"{group.key}: {group.meaning}"] if group else [])]
        lines += _rows(
            [
                s
                for s in settings.values()
                if not s.group and s.meaning.declared and s.within == (group.path if group else ())
            ]
        )
    foreign = [
        s
        for s in settings.values()
        if not s.group and not s.meaning.declared and s.path[-1] not in refused
    ]
    if foreign:
        bases = [
            base.__name__ for base in schema.__mro__[1:-1] if not base.__name__.startswith("_")
        ]
        lines += ["", f"and of {', '.join(bases)}:"]
    for s in foreign:
        line = f"{s.key}={default_text(s.default)}: {s.meaning.replace('%%', '%').split('. ')[0]}"
        lines.append(
            "  " + textwrap.shorten(line, WIDTH - 2, placeholder=" …", break_long_words=False)
        )
    return "\n".join(lines)
