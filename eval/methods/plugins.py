"""Methods from outside this project: chunk rules and verifiers, one class each, given by its dotted
path.

    dcar compare methods=[car-5,my_package.rules.Calm-2.0]

The numbers after the path are the constructor's arguments, which a mapping gives by name,
{method: my_package.rules.Calm, nats: 2.0}. A class is one of

- a chunk rule: extends `dcar.ChunkRule`,
- a verifier of drafted chains: extends `eval.verifiers.chain.ChainVerifier`; its names also accept
  @draft and :LENGTH,
- any other method: extends `dcar.decoding.Method`.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dcar.decoding import Method
from dcar.errors import ConfigError
from dcar.sources.packages import imported
from eval.methods.kinds import KINDS, SAMPLING, MethodKind, MethodSetting, Style, verifier_kind
from eval.verifiers.chain import ChainVerifier

NUMBER = int | float  # of a constructor: whole where it is written so
TAKEN = ("method", "draft", "length", "eos", *(s.name for s in SAMPLING))  # names of other settings
_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?=[-@:]|$)")


def prefix_of(name: str) -> str:
    """Return the longest prefix of a method's name that is in KINDS; empty if none is."""
    known = (p for p in KINDS if name == p or name.startswith((f"{p}-", f"{p}@", f"{p}:")))
    return max(known, key=len, default="")


def find_kind(name: str) -> MethodKind:
    """Return the kind of a method by its name without a sampling: a shipped one, or a class by its
    path.

    Raises ConfigError for an unknown name, and for a class that cannot be imported or is not a
    method.
    """
    if prefix := prefix_of(name):
        return KINDS[prefix]
    dotted = _PATH.match(name)
    if dotted is None:
        known = ", ".join(kind.example for kind in KINDS.values())
        raise ConfigError(
            f"unknown method '{name}'; methods are written {known} (see docs/methods.md); a class "
            "of your own is written package.module.Class"
        )
    prefix = dotted[1]
    made = imported(f"method '{name}'", prefix)
    if not isinstance(made, type) or not issubclass(made, Method):
        raise ConfigError(
            f"method '{name}': {made!r} is not the class of a method: extend dcar.ChunkRule or "
            "eval.verifiers.chain.ChainVerifier"
        )
    style = getattr(made, "style", Style(""))
    if issubclass(made, ChainVerifier):
        return verifier_kind(prefix, prefix, made, style, *_chain_numbers(made))
    return MethodKind(prefix, prefix, style, _numbers(made), made)


def _numbers(made: type[Any], kind: Any = NUMBER) -> tuple[MethodSetting, ...]:
    """Return the settings that a constructor's arguments define, in order; a name with another
    meaning in a mapping gets a trailing underscore."""
    found = []
    for p in inspect.signature(made).parameters.values():
        name = f"{p.name}_" if p.name in TAKEN else p.name
        if p.kind is p.VAR_POSITIONAL:
            found.append(MethodSetting(name, list[kind], "-", []))
        elif p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD):
            default = ... if p.default is p.empty else p.default
            found.append(MethodSetting(name, kind, "-", default))
    return tuple(found)


def _chain_numbers(made: type[ChainVerifier]) -> list[MethodSetting]:
    """Return the settings of a verifier, as many as its `numbers` allows; the first two
    arguments are name and drafter."""
    found = _numbers(made, float)[2 : 2 + max(made.numbers)]
    least = min(made.numbers)
    required = [replace(s, default=...) for s in found[:least]]
    optional = [replace(s, default=None if s.default is ... else s.default) for s in found[least:]]
    return required + optional


def plugged(made: type[Any], name: str, arguments: Iterable[Any]) -> tuple[Method, dict[str, str]]:
    """Build a chunk rule or another method; also return the facts that its tokens depend on."""
    method = made(
        *(n for value in arguments for n in (value if isinstance(value, list) else [value]))
    )
    method.name = name
    # with the text of its module: records of another version are not used again
    file = getattr(sys.modules[made.__module__], "__file__", None)
    text = Path(file).read_bytes() if file else b""
    identity = {
        "class": f"{made.__module__}.{made.__qualname__} {hashlib.sha256(text).hexdigest()[:16]}"
    }
    return method, identity
