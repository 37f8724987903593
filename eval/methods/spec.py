"""Method with its settings, and its compact name.

    MethodSpec.from_mapping({"method": "ssd", "beta": 0.4, "draft": "draft", "temperature": 0.8})
    MethodSpec.parse("ssd-0.4@draft@t0.8")      # the same
    str(spec)                                   # ssd-0.4@draft@t0.8

A comparison stores the mapping; the name is a way to type it, and its label in tables. Both contain
only settings that differ from their defaults. Temperature, top-k and top-p at the end of a name
(`car-5@t0.8-k10-p0.9`) belong to the method; those that it omits come from the comparison's common
sampling.

In a list of methods, `ssd-{0,0.2,0.4}` stands for ssd-0, ssd-0.2 and ssd-0.4: braces as in a shell,
and nothing more. Several groups multiply, groups do not nest, no ranges. In YAML and on the command
line such a name is quoted, because braces mean something there: methods: [far, "ssd-{0,0.4}"].
"""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dcar.config.schema import fitting
from dcar.errors import ConfigError
from eval.methods.kinds import LIMIT, SAMPLING, MethodKind, MethodSetting
from eval.methods.plugins import find_kind

NUMBER = r"-?\d{1,20}(?:\.\d{1,20})?(?:e[-+]?\d{1,3})?"
SAMPLED = {s.name for s in SAMPLING}


@dataclass(frozen=True)
class MethodSpec:
    """Method with its settings and those of its sampling, without defaults. Build it with `parse`
    or `from_mapping`.

    limit: utterances of the first set of texts that a comparison decodes with it, and no other set;
    0 = all sets, as many as with the other methods. A name cannot contain it.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limit: int = 0

    @classmethod
    def parse(cls, name: str) -> MethodSpec:
        """Parse a compact name. Raises ConfigError for one that is unknown, malformed or
        incomplete."""
        kind = find_kind(name)
        known = (*kind.settings, *SAMPLING)
        match = re.fullmatch(
            "".join(map(_pattern, known)), name.removeprefix(kind.prefix), re.DOTALL
        )
        if match is None:
            raise ConfigError(f"method '{name}' is not written as {kind.example}; {_about(kind)}")
        given = {s.name: _value(s, match[s.name]) for s in known if match[s.name] is not None}
        return cls._checked(kind, given, name)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> MethodSpec:
        """Build a method from {"method": …, setting: value, …}, perhaps with "limit". Raises
        ConfigError for an unknown, impossible or missing setting."""
        given = {key: value for key, value in mapping.items() if value is not None}
        method, limit = given.pop("method", None), given.pop(LIMIT.name, 0)
        if not isinstance(method, str):
            raise ConfigError(f"{dict(mapping)} names no method; write {{method: ssd, beta: 0.4}}")
        kind = find_kind(method)
        if method != kind.prefix:
            raise ConfigError(
                f"method '{method}': in a mapping the method is {kind.prefix}; {_about(kind)}"
            )
        limit = fitting(f"method '{method}': {LIMIT.name}", limit, LIMIT.type, LIMIT.bounds)
        return replace(cls._checked(kind, given, method), limit=limit)

    @classmethod
    def _checked(cls, kind: MethodKind, given: Mapping[str, Any], name: str) -> MethodSpec:
        known = (*kind.settings, *SAMPLING)
        if unknown := given.keys() - {s.name for s in known}:
            raise ConfigError(
                f"method '{name}' has no {', '.join(sorted(unknown))}; {_about(kind)}"
            )
        before = _before(kind, given)
        values: dict[str, Any] = {}
        for s in known:
            if s.name in given:
                value = fitting(f"method '{name}': {s.name}", given[s.name], s.type, s.bounds)
                if value != s.default:
                    values[s.name] = value
            elif s.default is ... or (s in before and s.default is None):
                raise ConfigError(
                    f"method '{name}': {s.name} is missing; write {kind.example}, or give "
                    f"{s.name} in a mapping"
                )
        settings, sampling = split_sampling(values)
        if sampling and not {"temperature", "tuned"} & sampling.keys():
            raise ConfigError(
                f"method '{name}': {', '.join(sampling)} without temperature; set the temperature "
                "too"
            )
        return cls(kind.prefix, settings, sampling)

    def to_mapping(self) -> dict[str, Any]:
        """Return the mapping that `from_mapping` reads."""
        limit = {LIMIT.name: self.limit} if self.limit else {}
        return {"method": self.method, **self.settings, **self.sampling, **limit}

    def __str__(self) -> str:
        kind = find_kind(self.method)
        before = {s.name: s.default for s in _before(kind, self.settings)}
        values = {**before, **self.settings}
        settings = "".join(s.written(values[s.name]) for s in kind.settings if s.name in values)
        word = sampling_word(self.sampling)
        return f"{self.method}{settings}" + (f"@{word}" if word else "")

    @property
    def arguments(self) -> dict[str, Any]:
        """Every setting of the method by name, including defaults, as its builder expects them."""
        return {
            s.name: self.settings.get(s.name, s.default) for s in find_kind(self.method).settings
        }


def split_sampling(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a method without its sampling, and those of its sampling."""
    own = {name: value for name, value in mapping.items() if name not in SAMPLED}
    return own, {name: value for name, value in mapping.items() if name in SAMPLED}


def sampling_word(sampling: Mapping[str, Any]) -> str:
    """Return a sampling as in a name: t0.4-k10, tuned, or nothing."""
    return "".join(s.written(sampling[s.name]) for s in SAMPLING if s.name in sampling)[1:]


def read_methods(methods: Iterable[str | Mapping[str, Any]]) -> list[MethodSpec]:
    """Read names, with sweeps expanded, and mappings, in order. Raises ConfigError for an entry
    that is not a method."""
    specs: list[MethodSpec] = []
    for method in methods:
        if isinstance(method, str):
            specs += map(MethodSpec.parse, expand_sweep(method))
        else:
            specs.append(MethodSpec.from_mapping(method))
    return specs


def expand_sweep(name: str) -> list[str]:
    """Replace every brace group of a name by each of its alternatives; the last group varies
    fastest. Raises ConfigError for a brace without its partner, a group in a group, or a group
    without two alternatives."""
    pieces = re.split(r"\{([^{}]*)\}", name)  # text, alternatives, text, …, text
    texts, groups = pieces[::2], [[a.strip() for a in group.split(",")] for group in pieces[1::2]]
    if any(brace in text for text in texts for brace in "{}") or any(
        len(group) < 2 or not all(group) for group in groups
    ):
        raise ConfigError(
            f"method '{name}': a sweep is two or more alternatives in one pair of braces, as in "
            "ssd-{0,0.2,0.4}, quoted in YAML and on the command line"
        )
    return ["{}".join(texts).format(*chosen) for chosen in itertools.product(*groups)]


def _about(kind: MethodKind) -> str:
    own = ", ".join(s.name for s in kind.settings)
    return (
        f"it has the settings {f'{own} and ' if own else ''}temperature, top_k, top_p (at the end, "
        "as in @t0.8-k10-p0.9)"
    )


def _before(kind: MethodKind, given: Mapping[str, Any]) -> list[MethodSetting]:
    """Return the settings before the last given one that have no mark but their position: a name
    contains them too."""
    positional = [s for s in kind.settings if s.mark == "-"]
    last = max((i for i, s in enumerate(positional) if s.name in given), default=0)
    return positional[:last]


def _pattern(s: MethodSetting) -> str:
    """Return the regular expression of a setting in a compact name."""
    if s.type is bool:
        return f"(?P<{s.name}>{s.mark})?"
    if s.type is str:
        return f"(?:{s.mark}(?P<{s.name}>.+?))??"
    if typing.get_origin(s.type) is list:
        return f"(?P<{s.name}>(?:{s.mark}{NUMBER})+)?"
    return f"(?:{s.mark}(?P<{s.name}>{NUMBER}))?"


def _value(s: MethodSetting, text: str) -> Any:
    """Convert the text of a setting in a compact name to the value that YAML would yield."""
    if s.type is bool:
        return True
    if s.type is str:
        return text
    if typing.get_origin(s.type) is list:
        return [_number(n) for n in re.findall(f"-({NUMBER})", text)]
    return _number(text)


def _number(text: str) -> int | float:
    return float(text) if set(text) & set(".e") else int(text)
