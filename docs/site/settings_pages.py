"""Pages of settings, one a command, made of the dataclasses that the commands take their settings from."""

from __future__ import annotations

import html
import importlib
import re
from dataclasses import MISSING

from dcar.cli import COMMANDS
from dcar.config import schema_of
from dcar.config.load import default_text
from dcar.config.schema import Setting, allowed, settings_of

HEAD = "| setting | default | may be | meaning |\n| --- | --- | --- | --- |\n"


def cell(text: str) -> str:
    """A text inside of a table, read as it is but for `code`."""
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    plain = [re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(part, quote=False)) for part in parts]
    return "".join(code(parts[i]) if i % 2 else plain[i] for i in range(len(parts)))


def code(text: str) -> str:
    """A text as code inside of a table."""
    return f"<code>{html.escape(text).replace('|', '&#124;').replace('*', '&#42;').replace('_', '&#95;')}</code>"


def row(s: Setting) -> str:
    """One line of a table."""
    required = s.default is MISSING
    default = "required" if required else code(default_text(s.default)) if default_text(s.default) else "empty"
    also = f" Earlier: {', '.join(s.meaning.old)}." if s.meaning.old else ""
    meaning = s.meaning.replace("%%", "%") + also
    return f"| {code(s.key)} | {default} | {cell(allowed(s.hint, s.meaning))} | {cell(meaning)} |\n"


def settings_page(name: str) -> str:
    """The page of a command: what it does, its settings, those of groups behind them, those of other projects last."""
    module, summary = COMMANDS[name]
    schema = schema_of(importlib.import_module(module).main)
    known = settings_of(schema).values()
    unused: frozenset[str] = getattr(schema, "UNUSED", frozenset())
    rows = [s for s in known if not s.group and s.path[-1] not in unused]
    ours = [s for s in rows if s.meaning.declared]
    what = cell(summary[0].upper() + summary[1:])
    text = f"# dcar {name}\n\n{what}. Module `{module}`, settings `{schema.__name__}`.\n"
    if plain := [s for s in ours if "." not in s.key]:
        text += f"\n{HEAD}{''.join(map(row, plain))}"
    for group in (s for s in known if s.group):
        within = [s for s in ours if s.key.rpartition(".")[0] == group.key]
        text += f"\n## {group.key}\n\n{cell(group.meaning)}\n\n{HEAD}{''.join(map(row, within))}"
    if foreign := [s for s in rows if not s.meaning.declared]:
        bases = ", ".join(base.__name__ for base in schema.__mro__[1:-1] if not base.__name__.startswith("_"))
        text += f"\n## Of {bases}\n\nAs there.\n\n{HEAD}{''.join(map(row, foreign))}"
    return text


def index() -> str:
    """The table of commands, each with a link to its page."""
    rows = [f"| [dcar {name}](settings/{name}.md) | {cell(summary)} |\n" for name, (_, summary) in COMMANDS.items()]
    return f"\n## Every command\n\n| command | what it does |\n| --- | --- |\n{''.join(rows)}"
