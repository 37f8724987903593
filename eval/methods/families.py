"""Which rows of a comparison are one method at several settings: a family is one line of the plot.

`ssd-0.2` and `ssd-0.4` are the family ssd at β = 0.2 and 0.4; words behind a name (`ssd-0.4@heads`) make a family of
its own, because they change the method and not its setting. The names behind `dcar@` are settings: policies, and the
dial of a policy (`dcar@d0.3`); how many chunks it chooses among makes a family (`dcar@n4`). A sampling of its own makes
a family too: `car-3@t0.4` and `car-5@t0.4` are the family car@t0.4, one line by k beside the line of the common
sampling, and the methods at their own best sampling, whichever that is for each, are the family car@tuned. What a kind
of method is called and how it is drawn stands in its entry of METHODS (eval/methods/registry.py).

A sweep in a recipe names several settings at once: `ssd-{0,0.2,0.4}` stands for ssd-0, ssd-0.2 and ssd-0.4. Braces as
in a shell, and nothing more: several groups multiply, groups do not nest, no ranges. In YAML and on the command line
such a name is quoted, because braces mean something there: methods: [far, "ssd-{0,0.2,0.4}"].
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcar.errors import ConfigError
from eval.methods.registry import METHODS, MethodKind, Style, prefix_of, turned
from eval.methods.samplings import split_label

OTHER = Style("", "#4d4d4d", "x")  # of rows whose method this version does not know
_GROUP = re.compile(r"\{([^{}]*)\}")
_PART = re.compile(r"[-@](-?\d+(?:\.\d+)?(?=[-@]|$)|[^-@]+)")


@dataclass(frozen=True)
class MethodName:
    """A method's name taken apart. words: what makes it a family of its own within its kind, ("eos", "draft") of
    ssd-0.4-eos@draft; settings: what varies within the family, numbers or names; sampling: t0.4, tuned, or empty for
    the common one; num_candidates: that a policy chooses among."""

    kind: str
    words: tuple[str, ...]
    settings: tuple[float | str, ...]
    sampling: str = ""
    num_candidates: int = 1

    @property
    def family(self) -> str:
        """ssd, ssd@heads, ssd@heads@t0.4: itself the name of a method."""
        return at_sampling("@".join([self.kind, *self.words]), self.sampling)

    @property
    def entry(self) -> MethodKind | None:
        """What the registry knows of the kind."""
        return METHODS.get(self.kind)

    @property
    def style(self) -> Style:
        """How it is drawn; families that differ by their sampling alone look alike."""
        return (self.entry.style if self.entry else OTHER).of_candidates(self.num_candidates)

    @property
    def label(self) -> str:
        """What a reader calls the family: SSD, SSD (heads), SSD (heads, T 0.4)."""
        words = [f"{self.num_candidates} candidates"] if self.num_candidates > 1 else list(self.words)
        if self.sampling:
            words.append(split_label(f"@{self.sampling}")[2])
        label = self.style.label or self.kind
        return f"{label} ({', '.join(words)})" if words else label

    @property
    def setting(self) -> str:
        """The setting as text, 0.4 or 2-3-4; empty where there is none."""
        return "-".join(f"{s:g}" if isinstance(s, float) else s for s in self.settings)


def parse_method(name: str) -> MethodName:
    """Take a method's name apart; a kind that METHODS does not know is what stands before the first number."""
    name, sampling, _ = split_label(name)
    if "@" not in name:
        name = name.replace(":", "@heads:")  # a draft of so many tokens by the heads, which are the default
    kind = prefix_of(name) or re.split(r"[-@](?=\d)|@", name, maxsplit=1)[0]
    rest = name.removeprefix(kind)
    if kind in METHODS and METHODS[kind].policies:
        asked = turned(rest)
        policy, candidates, dial = asked["before"], asked["num_candidates"], asked["dial"]
        settings = [*([policy[1:]] if policy else []), *([float(dial)] if dial else [])]
        return MethodName(kind, (f"n{candidates}",) if candidates else (), tuple(settings), sampling,
                          int(candidates or 1))
    parts = _PART.findall(rest)
    numbers = [p for p in parts if re.fullmatch(r"-?\d+(\.\d+)?", p)]
    return MethodName(kind, tuple(p for p in parts if p not in numbers), tuple(map(float, numbers)), sampling)


def short_name(name: str) -> str:
    """A method's name as it is said in a sentence: random-4…16 for random-4-5-6-…-16, of four sizes or more that follow
    each other."""
    def ends(m: re.Match[str]) -> str:
        sizes = [int(size) for size in m[0].split("-")]
        follow = len(sizes) > 3 and sizes == list(range(sizes[0], sizes[0] + len(sizes)))
        return f"{sizes[0]}…{sizes[-1]}" if follow else m[0]

    return re.sub(r"(?<=-)\d+(?:-\d+)+(?![\w.])", ends, name)


def at_sampling(name: str, sampling: str) -> str:
    """The name of a method at a sampling: far@t0.4; empty: the common one."""
    return f"{name}@{sampling}" if sampling else name


def group_families(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of methods (no references) by family, in the order of METHODS, then of candidates, each sorted by its
    setting."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "method":
            grouped.setdefault(parse_method(row["method"]).family, []).append(row)
    order = list(METHODS)

    def rank(family: str) -> tuple[int, int, str]:
        name = parse_method(family)
        return (order.index(name.kind) if name.kind in order else len(order), name.num_candidates, family)

    def setting(row: dict[str, Any]) -> tuple[tuple[int, float, str], ...]:
        name = parse_method(row["method"])
        settings = name.settings
        if name.entry and name.entry.policies and not any(isinstance(s, float) for s in settings):
            settings = (*settings, 0.0)  # a policy without a dial stands at 0
        return tuple((0, s, "") if isinstance(s, float) else (1, 0.0, s) for s in settings)

    return {family: sorted(grouped[family], key=setting) for family in sorted(grouped, key=rank)}


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
