"""Kind of a method by its name; methods from outside this project, one class each, given by its
dotted path.

    dcar compare methods=[car-5,my_package.rules.Calm-2.0]

The numbers after the path are the constructor's arguments, which a mapping gives by name,
{method: my_package.rules.Calm, nats: 2.0}. A class is one of

- a chunk rule: extends `dcar.ChunkRule`,
- a verifier of drafted chains: extends `eval.verifiers.chain.ChainVerifier`. Its constructor begins
  with name and drafter; its names also accept @draft and :LENGTH, and -eos if it has the argument
  `eos_strict`,
- any other method: extends `dcar.decoding.Method`.
"""

import hashlib
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dcar.decoding import Method
from dcar.errors import ConfigError
from dcar.sources.packages import imported
from eval.methods.kinds import DRAFTED, EOS, KINDS, SAMPLING, MethodKind, MethodSetting, Style
from eval.verifiers.chain import ChainVerifier

# names of other settings of a method
TAKEN = {"method", EOS.name, *(s.name for s in (*DRAFTED, *SAMPLING))}
_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?=[-@:]|$)")


def find_kind(name: str) -> MethodKind:
    """Return the kind of a method by its compact name: a shipped one, or a class by its path.

    Raises ConfigError for an unknown name, and for a class that cannot be imported or is not a
    method.
    """
    prefixes = (p for p in KINDS if name == p or name.startswith((f"{p}-", f"{p}@", f"{p}:")))
    if prefix := max(prefixes, key=len, default=""):
        return KINDS[prefix]
    dotted = _PATH.match(name)
    if dotted is None:
        known = ", ".join(kind.example for kind in KINDS.values())
        raise ConfigError(
            f"unknown method '{name}'; methods are written {known} (see docs/methods.md); a class "
            "of your own is written package.module.Class"
        )
    path = dotted[1]
    plugin = imported(f"method '{name}'", path)
    if not isinstance(plugin, type) or not issubclass(plugin, Method):
        raise ConfigError(
            f"method '{name}': {plugin!r} is not the class of a method: extend dcar.ChunkRule or "
            "eval.verifiers.chain.ChainVerifier"
        )
    if issubclass(plugin, ChainVerifier):
        settings = _numbers(plugin, float)[2:]  # after name and drafter
        eos = [EOS] if "eos_strict" in inspect.signature(plugin).parameters else []
        settings = [s for s in settings if s.name != "eos_strict"]
        return MethodKind(
            path, path, Style(""), (*settings, *eos, *DRAFTED), verifies=True, plugin=plugin
        )
    return MethodKind(path, path, Style(""), tuple(_numbers(plugin, int | float)), plugin=plugin)


def _numbers(plugin: type[Any], kind: Any) -> list[MethodSetting]:
    """Return the settings that a constructor's arguments define, in order; a name with another
    meaning in a mapping gets a trailing underscore."""
    settings = []
    for p in inspect.signature(plugin).parameters.values():
        name = f"{p.name}_" if p.name in TAKEN else p.name
        if p.kind is p.VAR_POSITIONAL:
            settings.append(MethodSetting(name, list[kind], "-", []))
        elif p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD):
            default = ... if p.default is p.empty else p.default
            settings.append(MethodSetting(name, kind, "-", default))
    return settings


def plugged(plugin: type[Any], name: str, values: Iterable[Any]) -> tuple[Method, dict[str, str]]:
    """Build a chunk rule or another method; also return the facts that its tokens depend on."""
    method = plugin(
        *(n for value in values for n in (value if isinstance(value, list) else [value]))
    )
    method.name = name
    module = plugin.__module__
    return method, {"class": f"{module}.{plugin.__qualname__} {module_digest(module)[:16]}"}


def module_digest(module: str) -> str:
    """Return the SHA-256 of the text of an imported module: results of another version are not
    used again."""
    file = getattr(sys.modules[module], "__file__", None)
    return hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()
