"""Lists of methods as users write them: names, mappings, and sweeps over settings.

`ssd-{0,0.2,0.4}` stands for ssd-0, ssd-0.2 and ssd-0.4: braces as in a shell, and nothing more.
Several groups multiply, groups do not nest, no ranges. In YAML and on the command line such a name
is quoted, because braces mean something there: methods: [far, "ssd-{0,0.2,0.4}"]. In a mapping a
list is a sweep: {method: ssd, beta: [0, 0.2, 0.4]}.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dcar.errors import ConfigError
from eval.methods.spec import MethodSpec

_GROUP = re.compile(r"\{([^{}]*)\}")


def read_methods(methods: Iterable[str | Mapping[str, Any]]) -> list[MethodSpec]:
    """Read methods in order, with sweeps expanded; the last setting varies fastest. Raises
    ConfigError for an entry that is not a method."""
    return [
        spec
        for method in methods
        for spec in (
            map(MethodSpec.parse, expand_names([method]))
            if isinstance(method, str)
            else map(MethodSpec.from_mapping, _points(method))
        )
    ]


def read_samplings(words: Sequence[str]) -> list[MethodSpec]:
    """Read samplings, such as t0.4-k10, as those of next-token decoding, with sweeps expanded.
    Raises ConfigError for one that cannot be read."""
    found = []
    for word in expand_names(words):
        try:
            found.append(MethodSpec.parse(f"car-1@{word}"))
        except ConfigError as error:
            raise ConfigError(
                f"sampling '{word}': write temperature, then top-k, then top-p, as in t0.4 or "
                "t0.8-k10-p0.9"
            ) from error
    return found


def _points(mapping: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the mappings of a sweep; `sizes` is one value although it is a list."""
    swept = [v if isinstance(v, list) and k != "sizes" else [v] for k, v in mapping.items()]
    if not all(swept):
        raise ConfigError(f"method {dict(mapping)}: empty list of values")
    return (dict(zip(mapping, chosen, strict=True)) for chosen in itertools.product(*swept))


def expand_names(names: Sequence[str]) -> list[str]:
    """Return all names in order, with every brace group replaced by each of its alternatives; the
    last group varies fastest.

    Raises ConfigError for a brace without its partner, a group in a group, or a group without two
    alternatives.
    """
    return [expanded for name in names for expanded in _expand(name)]


def _expand(name: str) -> list[str]:
    pieces = _GROUP.split(name)  # text, alternatives, text, alternatives, …, text
    texts, groups = pieces[::2], [[a.strip() for a in group.split(",")] for group in pieces[1::2]]
    if any(brace in text for text in texts for brace in "{}"):
        raise ConfigError(
            f"method '{name}': a brace without its partner, or a group within a group; write "
            "ssd-{0,0.2,0.4}, quoted in YAML and on the command line"
        )
    for group in groups:
        if len(group) < 2 or not all(group):
            raise ConfigError(
                f"method '{name}': {{{','.join(group)}}} needs two alternatives or more, "
                "separated by "
                "commas and none of them empty, as in ssd-{0,0.2,0.4}"
            )
    return [
        "".join(itertools.chain(*zip(texts, [*chosen, ""], strict=True)))
        for chosen in itertools.product(*groups)
    ]
