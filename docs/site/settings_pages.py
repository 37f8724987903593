"""Pages of commands, their settings and the recipes, generated from the code."""

from __future__ import annotations

import html
import importlib
import re
from dataclasses import MISSING

from dcar.cli import RECIPES, TASKS, jobs, kind_of
from dcar.config import recipes
from dcar.config.load import default_text
from dcar.config.schema import Setting, allowed, settings_of

HEAD = "| setting | default | may be | meaning |\n| --- | --- | --- | --- |\n"


def cell(text: str) -> str:
    """Return a text for a table cell: everything is shown literally except `code`."""
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    plain = [re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(part, quote=False)) for part in parts]
    return "".join(code(parts[i]) if i % 2 else plain[i] for i in range(len(parts)))


def code(text: str) -> str:
    """Return a text as code for a table cell."""
    escaped = html.escape(text).replace("|", "&#124;").replace("*", "&#42;").replace("_", "&#95;")
    return f"<code>{escaped}</code>"


def row(s: Setting) -> str:
    """Return the table row of a setting."""
    if s.default is MISSING:
        default = "required"
    else:
        text = default_text(s.default)
        default = code(text) if text else "empty"
    meaning = cell(s.meaning.replace("%%", "%"))
    return f"| {code(s.key)} | {default} | {cell(allowed(s.hint, s.meaning))} | {meaning} |\n"


def page_of(job: str) -> str:
    """Return the path of a job's settings page: settings/prepare-retokenize.md for `prepare
    mode=retokenize`."""
    return f"settings/{re.sub(r' [a-z]+=', '-', job)}.md"


def settings_page(name: str) -> str:
    """Return the page of a job: what it does, its settings, then those of groups, then those
    inherited from other projects."""
    module, summary = jobs()[name]
    schema = importlib.import_module(module).CONFIG
    known = settings_of(schema).values()
    refused: frozenset[str] = getattr(schema, "REFUSED", frozenset())
    rows = [s for s in known if not s.group and s.path[-1] not in refused]
    ours = [s for s in rows if s.meaning.declared]
    what = cell(summary[0].upper() + summary[1:])
    text = f"# dcar {name}\n\n{what}. Module `{module}`, settings `{schema.__name__}`.\n"
    if plain := [s for s in ours if not s.within]:
        text += f"\n{HEAD}{''.join(map(row, plain))}"
    for group in (s for s in known if s.group):
        within = [s for s in ours if s.within == group.path]
        text += f"\n## {group.key}\n\n{cell(group.meaning)}\n\n{HEAD}{''.join(map(row, within))}"
    if foreign := [s for s in rows if not s.meaning.declared]:
        bases = ", ".join(
            base.__name__ for base in schema.__mro__[1:-1] if not base.__name__.startswith("_")
        )
        text += f"\n## Settings of {bases}\n\nSee the documentation of that class.\n\n"
        text += HEAD + "".join(map(row, foreign))
    return text


def commands_page() -> str:
    """Return the page of all commands by task, each job with a link to its settings."""
    text = (
        "# Commands\n\nAll commands are run as `dcar COMMAND`. Settings are given as `key=value`, "
        "in the recipe of `--config RECIPE` or on the command line, which takes precedence. "
        "`dcar COMMAND --help` lists them, and so do the pages here.\n"
    )
    for task, commands in TASKS.items():
        text += f"\n## {task[0].upper() + task[1:]}\n\n| command | what it does |\n| --- | --- |\n"
        rows = {job: what for job, (_, what) in jobs().items() if job.partition(" ")[0] in commands}
        text += "".join(
            f"| [dcar {job}]({page_of(job)}) | {cell(what)} |\n" for job, what in rows.items()
        )
    return text


def recipes_page() -> str:
    """Return the page of all recipes and their variants, by command."""
    text = "# Recipes\n\nUse them by `--config NAME` or `--config NAME:VARIANT`, in any folder.\n"
    for kind, command in RECIPES.items():
        rows = ""
        for recipe in (r for r in recipes.shipped() if kind_of(r.name) == kind):
            rows += f"| {code(recipe.name)} | {cell(recipe.summary)} |\n"
            rows += "".join(
                f"| {code(f'{recipe.name}:{v}')} | {cell(what)} |\n"
                for v, what in recipe.variants.items()
            )
        if rows:
            text += f"\n## {kind} (dcar {command})\n\n| recipe | what |\n| --- | --- |\n{rows}"
    return text
