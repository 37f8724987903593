"""Digest of the code that a result depends on, so that results of another version are not used
again."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = ("heads", "dcar", "rl", "eval", "launch")


def code_digest(code: Any, base: type = object) -> str:
    """Return the SHA-256 (hex) of the code of a class, a function or an object of a class.

    It covers the module where each class of its hierarchy below `base` is written, and what those
    import: of this project modules of the same package (but not of that of `base`, an engine with a
    version of its own); of a user's own code modules of the same package, or next to it. Comments,
    docstrings and layout do not count. Of what is written in a notebook it covers the definition.
    """
    while isinstance(code, functools.partial):
        code = code.func
    of = code if isinstance(code, type) or hasattr(code, "__code__") else type(code)
    first = sys.modules[of.__module__]
    modules: dict[str, ModuleType] = {}
    for cls in of.__mro__ if isinstance(of, type) else (of,):
        module = sys.modules[cls.__module__]
        below = not isinstance(cls, type) or (issubclass(cls, base) and cls is not base)
        if below and (_same_owner(first, module) or _top(module) in OURS):
            _collect(module, modules, sys.modules[base.__module__].__package__ or "")
    texts = [(name, _text(module)) for name, module in sorted(modules.items())]
    if not getattr(first, "__file__", None):  # of a notebook
        texts.append((first.__name__, _source(of)))
    return hashlib.sha256(repr([of.__qualname__, *texts]).encode()).hexdigest()


def _top(module: ModuleType) -> str:
    return module.__name__.partition(".")[0]


def _collect(module: ModuleType, modules: dict[str, ModuleType], engine: str) -> None:
    if module.__name__ in modules:
        return
    modules[module.__name__] = module
    ours = _top(module) in OURS
    if ours and module.__package__ == engine:
        return
    for name in _imports(module):
        other = sys.modules.get(name)
        if other is None:
            continue
        if other.__package__ == module.__package__ if ours else _same_owner(module, other):
            _collect(other, modules, engine)


def _same_owner(module: ModuleType, other: ModuleType) -> bool:
    """Return whether two modules are of one package, or of one folder of a user's own."""
    if _top(module) == _top(other):
        return True
    if _top(other) in OURS or not getattr(other, "__file__", None):
        return False
    shared = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    return _root(module) == _root(other) and _root(module) not in shared


def _root(module: ModuleType) -> Path:
    """Return the folder in which the top-level package of a module lies."""
    file = Path(module.__file__ or "").resolve()
    return file.parents[module.__name__.count(".") + (file.name == "__init__.py")]


def _imports(module: ModuleType) -> Iterator[str]:
    """Iterate over the modules that a module imports; of `from a import b` also a.b."""
    tree = _tree(module)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.__package__ or ""
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _tree(module: ModuleType) -> ast.Module | None:
    """Return the syntax tree of a module; None for one that is not written in Python."""
    file = Path(getattr(module, "__file__", None) or "")
    return ast.parse(file.read_bytes()) if file.suffix == ".py" else None


def _source(of: Any) -> str:
    """Return a definition that is in no file; without its text, the code of a function."""
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):
        code = getattr(of, "__code__", None)
        return repr((code.co_code, code.co_consts, code.co_names)) if code else of.__qualname__


def _text(module: ModuleType) -> str:
    """Return a module's code without comments, docstrings and layout."""
    if not getattr(module, "__file__", None):
        return ""
    tree = _tree(module)
    if tree is None:
        return hashlib.sha256(Path(module.__file__ or "").read_bytes()).hexdigest()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[0] = ast.Pass()
    return ast.unparse(ast.fix_missing_locations(tree))
