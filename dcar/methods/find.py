"""Classes of decoding methods by name. A name that nothing has registered yet is looked for in
the modules that bring further methods; a class of a user's own is given by its dotted path.

    dcar compare methods=[car-5,my_package.rules.Calm-2.0]
"""

from __future__ import annotations

import importlib
import re
from functools import cache

from dcar.decoding import Method
from dcar.decoding.declare import METHODS, settings_of
from dcar.errors import ConfigError
from dcar.sources.packages import imported

PROVIDERS = ("eval.verifiers",)
"""Modules that register the methods of higher packages, imported when one is asked for."""
_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?=[-@:]|$)")


@cache
def every_method() -> dict[str, type[Method]]:
    """Return all methods of this project by name, in the order of tables."""
    for module in PROVIDERS:
        importlib.import_module(module)
    return METHODS


def find_method(name: str) -> tuple[str, type[Method]]:
    """Return the method that a compact name begins with, and its class.

    Raises ConfigError for an unknown name, and for a class that cannot be imported or is not a
    method.
    """
    methods = every_method()
    prefixes = (p for p in methods if name == p or name.startswith((f"{p}-", f"{p}@", f"{p}:")))
    if prefix := max(prefixes, key=len, default=""):
        return prefix, methods[prefix]
    dotted = _PATH.match(name)
    if dotted is None:
        written = ", ".join(cls.example for cls in methods.values())
        raise ConfigError(
            f"unknown method '{name}'; methods are written {written} (see docs/methods.md); a "
            "class of your own is written package.module.Class"
        )
    path = dotted[1]
    cls = imported(f"method '{name}'", path)
    if not isinstance(cls, type) or not issubclass(cls, Method):
        raise ConfigError(
            f"method '{name}': {cls!r} is not the class of a method: extend dcar.ChunkRule or "
            "eval.verifiers.chain.ChainVerifier"
        )
    if "__init__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
        raise ConfigError(
            f"method '{name}': its constructor hides its settings; make them fields, as in "
            "`nats: float = 2.0`, under the decorator dcar.decoding_method()"
        )
    settings_of(cls)  # raises for a field that cannot be written in a name
    return path, cls


def class_of(method: str) -> type[Method]:
    """Return the class of a method by its name without settings; `Method` for one that no name
    lists, as an entry of one's own may have."""
    if method in (methods := every_method()):
        return methods[method]
    return find_method(method)[1] if re.fullmatch(_PATH, method) else Method
