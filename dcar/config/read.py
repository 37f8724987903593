"""Parsing of YAML files and command lines into settings, each with its place (file and line, or the
command line).

Plain words follow YAML 1.2's core schema, in recipes, on the command line and in saved settings.
PyYAML implements YAML 1.1, in which `010` is eight, `1:30` is ninety, and `no` is false. Merge keys
(`<<`), which version 1.2 dropped, are kept, because recipes use them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from dcar.config.recipes import recipe_file
from dcar.config.schema import Setting, Spelled, unspelled
from dcar.errors import ConfigError

NULLS = ("null", "Null", "NULL", "~")
TAG = "tag:yaml.org,2002:"
CORE = {  # tag -> pattern, and the characters with which it may begin
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
BASES = {"0o": 8, "0x": 16}


@dataclass(frozen=True)
class Given:
    """Setting given by the user: its key as written, its value, and its place (file:line, or the
    command line)."""

    key: str
    value: Any
    where: str


class _Loader(yaml.SafeLoader):
    """Loader for the core schema. Numbers and truth values are `Spelled`; names of a mapping are
    text as written."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {"<": [(f"{TAG}merge", re.compile("<<$"))]}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, MappingNode):
            self.flatten_mapping(node)
            for key, _ in node.value:
                if isinstance(key, ScalarNode):
                    key.tag = f"{TAG}str"
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes every text that YAML 1.1 or 1.2 would read as something else."""


def _text(dumper: _Dumper, text: str) -> ScalarNode:
    """Represent a text, in double quotes if it contains a Unicode line break, which PyYAML would
    lose otherwise."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar(f"{TAG}str", text, style)


_Dumper.add_representer(str, _text)


def _spelled(loader: _Loader, node: ScalarNode) -> Spelled:
    text = loader.construct_scalar(node)
    kind = node.tag.removeprefix(TAG)
    if not re.fullmatch(CORE[kind][0], text):  # after an explicit tag
        raise ValueError(f"'{text}' is not a valid {kind}")
    if kind == "bool":
        return Spelled(text, text.lower() == "true")
    if kind == "float":
        return Spelled(text, float(text.lower().replace(".inf", "inf").replace(".nan", "nan")))
    base = BASES.get(text[:2], 10)
    return Spelled(text, int(text[2:] if base != 10 else text, base))


_Loader.add_constructor(f"{TAG}merge", yaml.SafeLoader.construct_yaml_str)  # no key: a text
for kind, (pattern, first) in CORE.items():
    for schema in (_Loader, _Dumper):
        schema.add_implicit_resolver(f"{TAG}{kind}", re.compile(f"(?:{pattern})$"), first)
    if kind != "null":
        _Loader.add_constructor(f"{TAG}{kind}", _spelled)


def _lines(node: Node, prefix: str, found: dict[str, int]) -> dict[str, int]:
    """Add the lines of the keys below a node to those found. Raises ConfigError for a repeated
    key."""
    if isinstance(node, MappingNode):
        names = [key.value for key, _ in node.value if isinstance(key, ScalarNode)]
        if twice := [name for name in names if names.count(name) > 1 and name != "<<"]:
            raise ConfigError(f"line {node.start_mark.line + 1}: '{twice[0]}' is given twice")
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                found.setdefault(prefix + key.value, key.start_mark.line + 1)
                _lines(value, f"{prefix}{key.value}.", found)
    return found


def parse_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """Parse a YAML document. Return its content, with numbers and truth values `Spelled`, and
    the line of every key, nested ones as a.b. Raises ConfigError if it is not valid."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = _lines(node, "", {})
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML ({' '.join(str(error).split())})") from error
    except ValueError as error:  # of a number after an explicit tag
        raise ConfigError(f"not valid YAML ({error})") from error


def load_yaml(text: str) -> Any:
    """Parse a YAML document into Python's types. Raises ConfigError if it is not valid."""
    return unspelled(parse_yaml(text)[0])


def dump_yaml(value: Any, **options: Any) -> str:
    """Return a value of YAML's types as a document that `load_yaml` and readers of YAML 1.1 read
    alike."""
    return yaml.dump(value, Dumper=_Dumper, allow_unicode=True, **options)


def read_yaml(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping in a YAML file and the line of every key. Raises ConfigError if it
    cannot be read or is not a mapping."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    try:
        loaded, lines = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{path}: a recipe must be a mapping of settings, one `key: value` per line"
        )
    return loaded, lines


def file_settings(named: str | Path, groups: frozenset[str]) -> list[Given]:
    """Return the settings of a recipe, those of its variant last; mappings under one of `groups`
    (keys, a.b) are flattened. Raises ConfigError for an unknown variant."""
    path, variant = recipe_file(named)
    loaded, lines = read_yaml(path)
    variants = loaded.pop("variants", {})
    if not isinstance(variants, dict) or not all(isinstance(v, dict) for v in variants.values()):
        raise ConfigError(
            f"{path}:{lines['variants']}: variants: give each as a mapping of the settings that "
            "differ"
        )
    if variant and variant not in variants:
        raise ConfigError(
            f"{path}: no variant '{variant}'; available: {', '.join(map(str, variants)) or 'none'}"
        )

    def flat(mapping: dict[Any, Any], within: str) -> Iterator[Given]:
        return leaves(
            mapping,
            groups,
            lambda key: f"{path}:{lines[within + key]}" if within + key in lines else str(path),
        )

    return [
        *flat(loaded, ""),
        *(flat(variants[variant], f"variants.{variant}.") if variant else ()),
    ]


def leaves(
    mapping: dict[Any, Any], groups: frozenset[str], where: Callable[[str], str], prefix: str = ""
) -> Iterator[Given]:
    """Return the settings of a mapping, with its `groups` flattened. where: function from a key
    to the place to name."""
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if key in groups and isinstance(value, dict):
            yield from leaves(value, groups, where, f"{key}.")
        else:
            yield Given(key, value, where(key))


COMMAND_LINE = "the command line"


def split_arguments(
    arguments: Sequence[str], names: Mapping[str, Setting]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the files of --config, and (key, text) of everything else, both in order. Raises
    ConfigError for an argument that is neither.

    names: settings and groups by key. key=value, --key=value and --key value are equivalent, with -
    for _ in the key; the value of a bool may be omitted.
    """
    files: list[str] = []
    pairs: list[tuple[str, str]] = []
    queue = list(arguments)
    letters = {s.meaning.short: s.key for s in names.values() if s.meaning.short}
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
        elif name == "--config" or (name == "config" and equals):
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
            text = (
                " (a text that begins with a hyphen goes after --)"
                if bare and argument.startswith("-")
                else ""
            )
            raise ConfigError(
                f"'{argument}': write options as key=value, or --config FILE.yaml; --help lists "
                "the keys" + text
            )
    return files, pairs


def typed(text: str, is_text: bool) -> Any:
    """Parse a value of the command line as YAML. Text settings take it as typed, unless it is
    quoted."""
    if is_text and not text.lstrip().startswith(("'", '"')):
        return None if text in NULLS else text
    try:
        return parse_yaml(text)[0]
    except ConfigError:
        if is_text:
            return text
        raise
