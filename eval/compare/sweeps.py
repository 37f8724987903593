"""Sweeps of method names in a recipe: `ssd-{0,0.2,0.4}` stands for ssd-0, ssd-0.2 and ssd-0.4.

Braces as in a shell, and nothing more: several groups multiply, groups do not nest, no ranges. In YAML and on the
command line such a name is quoted, because braces mean something there: methods: [far, "ssd-{0,0.2,0.4}"].
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from dcar.errors import ConfigError

_GROUP = re.compile(r"\{([^{}]*)\}")


def expand_names(names: Sequence[str]) -> list[str]:
    """All names in order, every brace group replaced by each of its alternatives; the last group varies fastest.

    Raises ConfigError for a brace without its partner, a group in a group, or a group without two alternatives.
    """
    return [expanded for name in names for expanded in _expand(name)]


def _expand(name: str) -> list[str]:
    pieces = _GROUP.split(name)  # text, alternatives, text, alternatives, …, text
    texts, groups = pieces[::2], [[a.strip() for a in group.split(",")] for group in pieces[1::2]]
    if any(brace in text for text in texts for brace in "{}"):
        raise ConfigError(f"method '{name}': a brace without its partner, or a group within a group; write "
                          "ssd-{0,0.2,0.4}, quoted in YAML and on the command line")
    for group in groups:
        if len(group) < 2 or not all(group):
            raise ConfigError(f"method '{name}': {{{','.join(group)}}} needs two alternatives or more, separated by "
                              "commas and none of them empty, as in ssd-{0,0.2,0.4}")
    return ["".join(itertools.chain(*zip(texts, [*chosen, ""], strict=True))) for chosen in itertools.product(*groups)]
