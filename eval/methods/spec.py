"""Method with its settings, and its compact name.

    MethodSpec.from_mapping({"method": "ssd", "beta": 0.4, "draft": "draft", "temperature": 0.8})
    MethodSpec.parse("ssd-0.4@draft@t0.8")      # the same
    str(spec)                                   # ssd-0.4@draft@t0.8

The name contains the settings that were given, with numbers as Python writes them; stored records
are looked up by it. Temperature, top-k and top-p at its end (`car-5@t0.8-k10-p0.9`) belong to the
method; those that it omits come from the comparison's common sampling.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcar.config.schema import fitting
from dcar.errors import ConfigError
from eval.methods.kinds import SAMPLING, MethodKind, MethodSetting
from eval.methods.plugins import find_kind

NUMBER = r"-?\d{1,20}(?:\.\d{1,20})?(?:e[-+]?\d{1,3})?"


@dataclass(frozen=True)
class MethodSpec:
    """Method with the settings that were given and those of its sampling ({"tuned": True} in the
    names of rows at the method's best sampling). Build it with `parse` or `from_mapping`."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str, of: MethodKind | None = None) -> MethodSpec:
        """Parse a compact name. Raises ConfigError for one that is unknown, malformed or
        incomplete.

        of: the kind, if the name may be that of a family (`ssd@eos`), in which required settings
        may be missing.
        """
        kind = of or find_kind(name)
        settings = (*kind.settings, *SAMPLING)
        found = re.fullmatch(
            "".join(map(_pattern, settings)), name.removeprefix(kind.prefix), re.DOTALL
        )
        if found is None:
            raise ConfigError(f"method '{name}' is not written as {kind.example}; {_about(kind)}")
        given = {s.name: _value(s, found[s.name]) for s in settings if found[s.name] is not None}
        return cls._made(kind, given, name, complete=of is None)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> MethodSpec:
        """Build a method from {"method": …, setting: value, …}. Raises ConfigError for an
        unknown, impossible or missing setting."""
        given = {key: value for key, value in mapping.items() if value is not None}
        method = given.pop("method", None)
        if not isinstance(method, str):
            raise ConfigError(f"{dict(mapping)} names no method; write {{method: ssd, beta: 0.4}}")
        kind = find_kind(method)
        if method != kind.prefix:
            raise ConfigError(
                f"method '{method}': in a mapping the method is {kind.prefix}; {_about(kind)}"
            )
        return cls._made(kind, given, method)

    @classmethod
    def _made(
        cls, kind: MethodKind, given: Mapping[str, Any], name: str, complete: bool = True
    ) -> MethodSpec:
        if unknown := given.keys() - {s.name for s in (*kind.settings, *SAMPLING)}:
            raise ConfigError(
                f"method '{name}' has no {', '.join(sorted(unknown))}; {_about(kind)}"
            )
        sampling = _checked(SAMPLING, given, name, complete)
        if sampling and not {"temperature", "tuned"} & sampling.keys():
            raise ConfigError(
                f"method '{name}': {', '.join(sampling)} without temperature; set the temperature "
                "too"
            )
        return cls(
            kind.prefix, _checked(kind.settings, given, name, complete, kind.example), sampling
        )

    def __str__(self) -> str:
        settings = "".join(
            s.written(self.settings[s.name])
            for s in find_kind(self.method).settings
            if s.name in self.settings
        )
        return f"{self.method}{settings}" + (f"@{self.word}" if self.sampling else "")

    @property
    def word(self) -> str:
        """Sampling as in the name, t0.4-k10 or tuned; empty for the common one."""
        return "".join(
            s.written(self.sampling[s.name]) for s in SAMPLING if s.name in self.sampling
        )[1:]

    @property
    def arguments(self) -> dict[str, Any]:
        """Return every setting of the method by name, including defaults, as its builder expects
        them."""
        given = ((s, self.settings.get(s.name, s.default)) for s in find_kind(self.method).settings)
        return {s.name: float(v) if s.type is float and isinstance(v, int) else v for s, v in given}


def _about(kind: MethodKind) -> str:
    own = ", ".join(s.name for s in kind.settings)
    return (
        f"it has the settings {f'{own} and ' if own else ''}temperature, top_k, top_p (at the end, "
        "as in @t0.8-k10-p0.9)"
    )


def _pattern(s: MethodSetting) -> str:
    """Return the regular expression of a setting in a compact name; words may also follow @, as
    in a family's name."""
    value = {str: r".+?", bool: ""}.get(s.type, NUMBER)
    mark = f"[-@]{s.mark[1:]}" if s.word and s.mark[0] == "-" else s.mark
    if typing.get_origin(s.type) is list:
        return f"(?P<{s.name}>(?:{mark}{value})+)?"
    lazy = "?" if s.type is str else ""
    return f"(?:{mark}(?P<{s.name}>{value}))?{lazy}"


def _number(text: str) -> int | float:
    return float(text) if set(text) & set(".e") else int(text)


def _value(s: MethodSetting, text: str) -> Any:
    """Convert the text of a setting in a compact name to the value that YAML would yield."""
    if s.type in (bool, str):
        return text or True
    if typing.get_origin(s.type) is list:
        return [_number(n) for n in re.findall(f"-({NUMBER})", text)]
    return _number(text)


def _checked(
    known: Sequence[MethodSetting],
    given: Mapping[str, Any],
    name: str,
    complete: bool,
    example: str = "",
) -> dict[str, Any]:
    """Return the given settings in order, converted. Raises ConfigError for one that is
    impossible or missing."""
    # positional, so those before a given one are written too
    numbers = [s.name for s in known if s.mark == "-"]
    before = numbers[: max((i for i, s in enumerate(numbers) if s in given), default=0)]
    settings: dict[str, Any] = {}
    for s in known:
        value = given.get(s.name, s.default if s.name in before else None)
        if value is not None and value is not ...:
            fitted = fitting(f"method '{name}': {s.name}", value, s.type, s.bounds)
            # 0 is written 0, 0.0 is written 0.0
            spelled = s.type is float and isinstance(value, int) and not s.form
            settings[s.name] = value if spelled else fitted
        elif complete and (s.default is ... or s.name in before):
            raise ConfigError(
                f"method '{name}': {s.name} is missing; write {example}, or give {s.name} in a "
                "mapping"
            )
    return {name: value for name, value in settings.items() if value is not False}
