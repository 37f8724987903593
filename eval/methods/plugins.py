"""Methods from outside this project: chunk rules and verifiers, one class each.

    [project.entry-points."dcar.methods"]          # in the pyproject.toml of your package
    calm = "my_package.rules:Calm"

Then `calm-2.0` is a method: the numbers behind the name are the constructor's arguments. Without installing anything
`my_package.rules.Calm-2.0` is the same. A class is one of

- a chunk rule: has `choose` (extend `dcar.ChunkRule`),
- a verifier of drafted chains: extends `eval.verifiers.chain.ChainVerifier`; its names also take @draft and :LENGTH,
- any method of the loop: has `propose` and `keep` (`dcar.decoding.Method`).

It may have a `style` (eval.methods.registry.Style) for tables and plots.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from dcar.decoding import ChunkMethod, Method
from dcar.errors import ConfigError
from eval.verifiers.chain import ChainVerifier

GROUP = "dcar.methods"
_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?=[-@:]|$)")
_NUMBERS = re.compile(r"(?:-\d+(?:\.\d+)?)*")


@cache
def installed() -> dict[str, EntryPoint]:
    """Entry points of installed packages, by the name of the method."""
    return {point.name: point for point in entry_points(group=GROUP)}


def imported(what: str, path: str, point: EntryPoint | None) -> Any:
    """What an entry point or else a dotted path names. ConfigError that says of `what` that it cannot be imported."""
    module, _, attribute = path.rpartition(".")
    try:
        return point.load() if point else getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} cannot be imported ({error}); install its package, or put its folder on PYTHONPATH"
                          ) from error


def find_class(name: str, prefix: str = "") -> tuple[str, type[Any]] | None:
    """The class behind a method's name, and what of the name stands for it; None where it is neither the entry point
    `prefix` nor a dotted path. ConfigError for one that cannot be imported or is no method."""
    dotted = _PATH.match(name)
    if not (prefix or dotted):
        return None
    point = installed()[prefix] if prefix else None
    prefix = prefix or dotted[1]  # type: ignore[index]
    made = imported(f"method '{name}': {prefix}", prefix, point)
    is_method = isinstance(made, type) and (issubclass(made, ChainVerifier) or hasattr(made, "choose")
                                            or hasattr(made, "propose") and hasattr(made, "keep"))
    if not is_method:
        raise ConfigError(f"method '{name}': {made!r} is no class of a method: extend dcar.ChunkRule or "
                          "eval.verifiers.chain.ChainVerifier")
    return prefix, made


def rule_from_name(made: type[Any], name: str, rest: str, *models: Any) -> tuple[Callable[[], Method], dict[str, str]]:
    """`NAME-NUMBER-NUMBER…` of a chunk rule or another method -> how to build it, and what its tokens depend on."""
    if not _NUMBERS.fullmatch(rest):
        raise ConfigError(f"method '{name}': write only numbers behind its name, as in {name.removesuffix(rest)}-2")
    numbers = [float(n) if "." in n else int(n) for n in rest.split("-")[1:]]

    def build() -> Method:
        method = made(*numbers)
        method.name = name
        return ChunkMethod(method) if hasattr(method, "choose") else method

    try:
        inspect.signature(made).bind(*numbers)
    except TypeError as error:
        raise ConfigError(f"method '{name}': {made.__name__} does not take {len(numbers)} numbers ({error})") from error
    build()  # refuses what is impossible before anything runs
    # with the text of its module: records of another version are not used again
    file = getattr(sys.modules[made.__module__], "__file__", None)
    text = Path(file).read_bytes() if file else b""
    return build, {"class": f"{made.__module__}.{made.__qualname__} {hashlib.sha256(text).hexdigest()[:16]}"}
