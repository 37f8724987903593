"""What `--help` prints of a schema: one setting a line, wrapped for a terminal of 100 columns."""

from __future__ import annotations

import enum
import sys
import textwrap
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import yaml

from dcar.config.schema import Setting, settings_of
from dcar.config.values import allowed

WIDTH = 100
TOGETHER = "\u00a0"  # a space at which no line is broken
LEFT = 36  # widest column of keys


def program() -> str:
    """How the command that runs was called: `dcar train`, or `python -m dcar.train`."""
    if sys.argv[0].startswith("dcar "):
        return sys.argv[0]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return Path(sys.argv[0]).name


def default_text(value: Any) -> str:
    if value is MISSING:
        return "…"
    if isinstance(value, enum.Enum):
        value = value.value
    if value == "":
        return ""
    if isinstance(value, tuple):
        value = list(value)
    shown = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return shown.strip().removesuffix("...").strip()  # YAML ends a document that is one word with dots


def _rows(settings: list[Setting], left: int = 0) -> list[str]:
    """`key=default`, and beside it the meaning and what is allowed."""
    names = [f"{s.key}={default_text(s.default)}" for s in settings]
    left = left or min(LEFT, max(map(len, names), default=0))
    lines = []
    for s, name in zip(settings, names, strict=True):
        what = "required, " * (s.default is MISSING) + allowed(s.hint, s.meaning)
        if len(what) < 40:
            what = what.replace(" ", TOGETHER)
        text = textwrap.wrap(f"{s.meaning} [{what}]", WIDTH - left - 4, break_long_words=False)
        if len(name) > left:  # too long for its column: on a line of its own
            lines.append(f"  {name}")
            name = ""
        lines += [f"  {name if i == 0 else '':{left}}  {line}".replace(TOGETHER, " ") for i, line in enumerate(text)]
    return lines


def _foreign(s: Setting) -> str:
    """One line for a setting of another project's dataclass: the first sentence of its help."""
    line = f"  {s.key}={default_text(s.default)}: {s.meaning.replace('%%', '%').split('. ')[0]}"
    return textwrap.shorten(line.strip(), WIDTH - 2, placeholder=" …", break_long_words=False)


def help_text(schema: type, description: str = "") -> str:
    """Usage, what the command does, and its settings: key=default, what it may be, meaning; groups with a heading."""
    known = settings_of(schema)
    words = [f"{s.key.upper()}" for s in known.values() if s.meaning.positional]
    words += [f"[{s.meaning.short} {s.key.upper()}]" for s in known.values() if s.meaning.short]
    lines = [" ".join(["usage:", program(), *words, "[--config FILE.yaml]", "[key=value …]"]), ""]
    lines += [*textwrap.wrap(description or (schema.__doc__ or "").strip().split("\n\n")[0], WIDTH), ""]
    rows = [s for s in known.values() if not s.group]
    ours = [s for s in rows if s.meaning.declared]
    lines += _rows([s for s in ours if "." not in s.key])
    for group in (s for s in known.values() if s.group):
        lines += ["", f"{group.key}: {group.meaning}"]
        lines += _rows([s for s in ours if s.key.rpartition(".")[0] == group.key])
    unused: frozenset[str] = getattr(schema, "UNUSED", frozenset())
    if foreign := [s for s in rows if not s.meaning.declared and s.path[-1] not in unused]:
        bases = [base.__name__ for base in schema.__mro__[1:-1] if not base.__name__.startswith("_")]
        lines += ["", f"and of {', '.join(bases)}:"]
        lines += [f"  {_foreign(s)}" for s in foreign]
    return "\n".join(lines)
