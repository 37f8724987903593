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

from dcar.config.schema import Meaning, fitting, meaning_of, setting
from dcar.config.schema import settings_of as settings_of_schema
from dcar.decoding import Method
from dcar.decoding.declare import MethodSetting, compact_name, settings_before, settings_of
from dcar.errors import ConfigError
from dcar.methods.find import class_of, find_method
from dcar.model.models import Borrowed
from dcar.sampling import SamplingConfig

NUMBER = r"-?\d{1,20}(?:\.\d{1,20})?(?:e[-+]?\d{1,3})?"


def _of_sampling(name: str, type: Any, mark: str) -> MethodSetting:
    meaning = settings_of_schema(SamplingConfig)[name].meaning
    return MethodSetting(name, type, mark, None, meaning=meaning)


SAMPLING = (
    _of_sampling("temperature", float, "@t"),
    _of_sampling("top_k", int, "-k"),
    _of_sampling("top_p", float, "-p"),
    MethodSetting("tuned", bool, "@tuned", False),
)
"""Settings that end every name: car-5@t0.8-k10-p0.9. car-5@tuned is a row at the best sampling
of a tuned.json."""
SAMPLED = {s.name for s in SAMPLING}
LIMIT: Meaning = meaning_of(setting(None, minimum=0))


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
        kind, of = find_method(name)
        settings = (*settings_of(of), *SAMPLING)
        match = re.fullmatch("".join(map(_pattern, settings)), name.removeprefix(kind), re.DOTALL)
        if match is None:
            raise ConfigError(
                f"method '{name}' is not written as {of.example or kind}; {_about(of)}"
            )
        written = {s.name: match[s.name] for s in settings if match[s.name] is not None}
        values = {s.name: _value(s, written[s.name]) for s in settings if s.name in written}
        return cls._checked(kind, of, values, name)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> MethodSpec:
        """Build a method from {"method": …, setting: value, …}, perhaps with "limit". Raises
        ConfigError for an unknown, impossible or missing setting."""
        values = {key: value for key, value in mapping.items() if value is not None}
        method, limit = values.pop("method", None), values.pop("limit", 0)
        if not isinstance(method, str):
            raise ConfigError(f"{dict(mapping)} names no method; write {{method: ssd, beta: 0.4}}")
        kind, of = find_method(method)
        if method != kind:
            raise ConfigError(f"method '{method}': in a mapping the method is {kind}; {_about(of)}")
        limit = fitting(f"method '{method}': limit", limit, int, LIMIT)
        return replace(cls._checked(kind, of, values, method), limit=limit)

    @classmethod
    def _checked(
        cls, kind: str, of: type[Method], values: Mapping[str, Any], name: str
    ) -> MethodSpec:
        listed = (*settings_of(of), *SAMPLING)
        if unknown := values.keys() - {s.name for s in listed}:
            raise ConfigError(f"method '{name}' has no {', '.join(sorted(unknown))}; {_about(of)}")
        before = settings_before(of, values)
        changed: dict[str, Any] = {}
        for s in listed:
            if s.name in values:
                value = fitting(f"method '{name}': {s.name}", values[s.name], s.type, s.meaning)
                if value != s.default:
                    changed[s.name] = value
            elif s.default is ... or (s in before and s.default is None):
                raise ConfigError(
                    f"method '{name}': {s.name} is missing; write {of.example or kind}, or give "
                    f"{s.name} in a mapping"
                )
        settings, sampling = split_sampling(changed)
        if sampling and not {"temperature", "tuned"} & sampling.keys():
            raise ConfigError(
                f"method '{name}': {', '.join(sampling)} without temperature; set the temperature "
                "too"
            )
        return cls(kind, settings, sampling)

    def to_mapping(self) -> dict[str, Any]:
        """Return the mapping that `from_mapping` reads."""
        limit = {"limit": self.limit} if self.limit else {}
        return {"method": self.method, **self.settings, **self.sampling, **limit}

    @property
    def of(self) -> type[Method]:
        """Class of the method."""
        return class_of(self.method)

    @property
    def plain(self) -> MethodSpec:
        """The same method without a sampling or a limit of its own."""
        return replace(self, sampling={}, limit=0)

    def __str__(self) -> str:
        word = sampling_word(self.sampling)
        return compact_name(self.method, self.of, self.settings) + (f"@{word}" if word else "")

    def build(self) -> Method:
        """Make the method; it still has to be bound to its models."""
        values = {s.attribute: self.settings.get(s.name, s.default) for s in settings_of(self.of)}
        return self.of(**values).named(str(self.plain))

    def bound(self, models: Borrowed) -> Method:
        """Make the method with the models that it needs. Raises ConfigError if one is missing, or
        if the settings do not fit the decoder."""
        method = self.build()
        method.bind(models)
        method.width(models.heads)  # raises for more tokens than the decoder has heads
        return method


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


def _about(of: type[Method]) -> str:
    own = ", ".join(s.name for s in settings_of(of))
    return (
        f"it has the settings {f'{own} and ' if own else ''}temperature, top_k, top_p (at the end, "
        "as in @t0.8-k10-p0.9)"
    )


def _pattern(s: MethodSetting) -> str:
    """Return the regular expression of a setting in a compact name."""
    if s.type is bool:
        return f"(?P<{s.name}>{s.mark})?"
    if s.type is str:
        return f"(?:{s.mark}(?P<{s.name}>.+?))??"
    if typing.get_origin(s.type) in (list, tuple):
        return f"(?P<{s.name}>(?:{s.mark}{NUMBER})+)?"
    return f"(?:{s.mark}(?P<{s.name}>{NUMBER}))?"


def _value(s: MethodSetting, text: str) -> Any:
    """Convert the text of a setting in a compact name to the value that YAML would yield."""
    if s.type is bool:
        return True
    if s.type is str:
        return text
    if typing.get_origin(s.type) in (list, tuple):
        return [_number(n) for n in re.findall(f"-({NUMBER})", text)]
    return _number(text)


def _number(text: str) -> int | float:
    return float(text) if set(text) & set(".e") else int(text)
