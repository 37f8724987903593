"""YAML 1.2's core schema: what a plain word means, the same in recipes, on the command line and in saved settings.

PyYAML implements YAML 1.1, in which `010` is eight, `1:30` is ninety, and `no` is false. Merge keys (`<<`), which
version 1.2 dropped, are kept, since recipes use them.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dcar.config.schema import Spelled, unspelled
from dcar.errors import ConfigError

MOST_NODES = 10_000
"""Most values of a document with its aliases expanded, against documents that expand without end."""

TAG = "tag:yaml.org,2002:"
CORE = {  # tag -> pattern, and the characters with which it may begin
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
              list("-+.0123456789")),
}
BASES = {"0o": 8, "0x": 16}


class _Loader(yaml.SafeLoader):
    """Reads the core schema; numbers and truth values are `Spelled`, names of a mapping are text as written."""

    yaml_implicit_resolvers = {"<": [(f"{TAG}merge", re.compile("<<$"))]}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, MappingNode):
            self.flatten_mapping(node)
            for key, _ in node.value:
                if isinstance(key, ScalarNode):
                    key.tag = f"{TAG}str"
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around every text that YAML 1.1 or 1.2 would read as something else."""


def _text(dumper: _Dumper, text: str) -> ScalarNode:
    """A text; in double quotes where it holds a line break of Unicode, which PyYAML loses otherwise."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar(f"{TAG}str", text, style)


_Dumper.add_representer(str, _text)


def _spelled(loader: _Loader, node: ScalarNode) -> Spelled:
    text = loader.construct_scalar(node)
    kind = node.tag.removeprefix(TAG)
    if not re.fullmatch(CORE[kind][0], text):  # after an explicit tag
        raise ValueError(f"'{text}' is no {kind}")
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


def _size(node: Node, sizes: dict[int, int], above: frozenset[int]) -> int:
    """Number of values below a node, aliases expanded. ConfigError for a recursive alias or a repeated key."""
    if id(node) in above:
        raise ConfigError(f"line {node.start_mark.line + 1}: an alias that contains itself")
    if id(node) not in sizes:
        children: list[Node] = []
        if isinstance(node, SequenceNode):
            children = node.value
        elif isinstance(node, MappingNode):
            children = [part for pair in node.value for part in pair]
            names = [key.value for key, _ in node.value if isinstance(key, ScalarNode)]
            if twice := [name for name in names if names.count(name) > 1 and name != "<<"]:
                raise ConfigError(f"line {node.start_mark.line + 1}: '{twice[0]}' stands twice")
        if len(children) > 2 * MOST_NODES:
            raise ConfigError(f"more than {MOST_NODES} values: this is no recipe")
        sizes[id(node)] = 1 + sum(_size(part, sizes, above | {id(node)}) for part in children)
    if sizes[id(node)] > MOST_NODES:
        raise ConfigError(f"line {node.start_mark.line + 1}: its aliases stand for more than {MOST_NODES} values")
    return sizes[id(node)]


def _lines(node: Node, prefix: str, found: dict[str, int]) -> dict[str, int]:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                found.setdefault(prefix + key.value, key.start_mark.line + 1)
                _lines(value, f"{prefix}{key.value}.", found)
    return found


def parse_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """A YAML document, its numbers and truth values `Spelled`, and the line of every key, nested ones as a.b.
    ConfigError if it is not valid."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _size(node, {}, frozenset())
        return loader.construct_document(node), _lines(node, "", {})
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML ({' '.join(str(error).split())})") from error
    except RecursionError as error:
        raise ConfigError("nested too deeply") from error
    except (ValueError, OverflowError, AttributeError) as error:  # values that Python or PyYAML refuses
        raise ConfigError(f"not valid YAML ({error})") from error


def load_yaml(text: str) -> Any:
    """A YAML document in Python's types. ConfigError if it is not valid."""
    return unspelled(parse_yaml(text)[0])


def dump_yaml(value: Any, **options: Any) -> str:
    """A value of YAML's types as a document that `load_yaml` and readers of YAML 1.1 read alike."""
    return yaml.dump(value, Dumper=_Dumper, allow_unicode=True, **options)
