"""Parse YAML files and command lines into settings, each with its place (file and line, or the command line)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcar.config.recipes import recipe_file
from dcar.config.schema import Setting
from dcar.config.yaml12 import parse_yaml
from dcar.errors import ConfigError

MOST_BYTES = 1_000_000
NULLS = ("null", "Null", "NULL", "~")


@dataclass(frozen=True)
class Given:
    """A setting that a user has given: its key as written, its value, and where (file:line, or the command line)."""

    key: str
    value: Any
    where: str


def read_yaml(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML file and the line of every key. ConfigError if it cannot be read or is something else."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read it ({error})") from error
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path}: more than {MOST_BYTES} bytes: this is no recipe")
    try:
        loaded, lines = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of settings, one `key: value` a line")
    return loaded, lines


def file_settings(named: str | Path, groups: frozenset[str]) -> list[Given]:
    """The settings of a recipe, those of its variant last; mappings under one of `groups` (keys, a.b) are flattened.
    ConfigError for an unknown variant."""
    path, variant = recipe_file(named)
    loaded, lines = read_yaml(path)
    variants = loaded.pop("variants", {})
    if not isinstance(variants, dict) or not all(isinstance(v, dict) for v in variants.values()):
        raise ConfigError(f"{path}:{lines['variants']}: variants: give each as a mapping of the settings that differ")
    if variant and variant not in variants:
        raise ConfigError(f"{path}: no variant '{variant}'; there are: {', '.join(map(str, variants)) or 'none'}")

    def flat(mapping: dict[Any, Any], within: str) -> Iterator[Given]:
        return leaves(mapping, groups, lambda key: f"{path}:{lines[within + key]}" if within + key in lines
                      else str(path))

    return [*flat(loaded, ""), *(flat(variants[variant], f"variants.{variant}.") if variant else ())]


def leaves(mapping: dict[Any, Any], groups: frozenset[str], where: Callable[[str], str],
           prefix: str = "") -> Iterator[Given]:
    """The settings of a mapping, those of its `groups` flattened. where: key -> the place to name."""
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if key in groups and isinstance(value, dict):
            yield from leaves(value, groups, where, f"{key}.")
        else:
            yield Given(key, value, where(key))


COMMAND_LINE = "the command line"


def split_arguments(arguments: Sequence[str], names: Mapping[str, Setting]) -> tuple[list[str], list[tuple[str, str]]]:
    """The files of --config, and (key, text) of everything else, both in order. ConfigError for what is neither.

    names: settings and groups by key. key=value, --key=value and --key value are the same, with - for _ in the key; the
    value of a bool may be left out.
    """
    files: list[str] = []
    pairs: list[tuple[str, str]] = []
    queue, letters = list(arguments), {s.meaning.short: s.key for s in names.values() if s.meaning.short}
    bare = next((s.key for s in names.values() if s.meaning.positional), "")

    def next_value(option: str) -> str:
        if not queue:
            raise ConfigError(f"{option} needs a value")
        return queue.pop(0)

    while queue:
        argument = queue.pop(0)
        name, equals, value = argument.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if argument == "--" and bare:
            pairs.append((bare, next_value(argument)))
            bare = ""
        elif name in letters:
            pairs.append((letters[name], value if equals else next_value(name)))
        elif name == "--config" or name == "config" and equals:
            files.append(value if equals else next_value(name))
        elif argument.startswith("--") and len(argument) > 2:
            if not equals:
                is_flag = key in names and names[key].hint is bool
                alone = is_flag and (not queue or queue[0].lower() not in ("true", "false"))
                value = "true" if alone else next_value(argument)
            pairs.append((key, value))
        elif equals and (key in names or not bare):
            pairs.append((key, value))
        elif bare and (argument == "-" or not argument.startswith("-")):
            pairs.append((bare, argument))
            bare = ""
        else:
            text = " (a text that begins with a hyphen stands behind --)" if bare and argument.startswith("-") else ""
            raise ConfigError(f"'{argument}': write options as key=value, or --config FILE.yaml; --help lists the keys"
                              + text)
    return files, pairs


def typed(text: str, is_text: bool) -> Any:
    """A value of the command line as YAML parses it. Text settings take it as it was typed, unless it is in quotes."""
    if is_text and not text.lstrip().startswith(("'", '"')):
        return None if text in NULLS else text
    try:
        return parse_yaml(text)[0]
    except ConfigError:
        if is_text:
            return text
        raise
