"""`dcar --print-completion SHELL`: a script that completes commands, settings, their choices, names and files.

    dcar --print-completion bash > ~/.local/share/bash-completion/completions/dcar
    dcar --print-completion zsh > ~/.zfunc/_dcar                       # a folder of $fpath
    dcar --print-completion fish > ~/.config/fish/completions/dcar.fish

Everything that can be completed stands in the script, so that pressing Tab starts no Python; print it again after an
update.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from dcar.config.schema import Setting, settings_of

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Command:
    """What can be completed behind a command: its settings but for groups, and what each is for."""

    name: str
    summary: str
    settings: tuple[Setting, ...]


def command_of(name: str, summary: str, schema: type) -> Command:
    """A command by its schema; settings that it has no use for (`UNUSED`) are left out, as by `--help`."""
    unused: frozenset[str] = getattr(schema, "UNUSED", frozenset())
    return Command(name, summary, tuple(s for s in settings_of(schema).values()
                                        if not s.group and not s.meaning.positional and s.path[-1] not in unused))


def choices(s: Setting) -> tuple[str, ...]:
    """Words that a setting may be, as far as it says; empty where it may be anything."""
    return s.meaning.choices or (("true", "false") if s.hint is bool else ())


def names(s: Setting) -> tuple[str, ...]:
    """Words that a setting may be beside a path: those that it declares, and a default that is no path itself."""
    default = s.default if isinstance(s.default, str) and re.fullmatch(r"[a-z][\w-]*", s.default) else ""
    return () if choices(s) or s.meaning.place else tuple(dict.fromkeys(n for n in (*s.meaning.names, default) if n))


def meaning(s: Setting) -> str:
    """The first sentence of a setting's meaning, short enough for a list."""
    first = re.split(r"\. (?=[A-Z])", " ".join(s.meaning.replace("%%", "%").split()))[0].rstrip(".")
    return first if len(first) <= 70 else f"{first[:69]}…"


def script(shell: str, commands: Iterable[Command]) -> str:
    """The script for one of SHELLS."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](list(commands))


def _bash(commands: list[Command]) -> str:
    settings = [f"        {c.name}) settings='{' '.join(f'{s.key}=' for s in c.settings)}' ;;" for c in commands]
    values = [f"        {shlex.quote(f'{c.name} {s.key}')}) values='{' '.join(choices(s))}' ;;"
              for c in commands for s in c.settings if choices(s)]
    values += [f"        {shlex.quote(f'{c.name} {s.key}')}) words='{' '.join(names(s))}' ;;"
               for c in commands for s in c.settings if names(s)]
    return _BASH.format(commands=" ".join(c.name for c in commands), settings="\n".join(settings),
                        values="\n".join(values))


# "=" may or may not be among the characters at which bash divides words (COMP_WORDBREAKS): the word is taken from the
# line itself, and what is offered begins behind "=" where bash replaces that part alone.
_BASH = """\
# bash completion of dcar, printed by `dcar --print-completion bash`
_dcar() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" word before settings= values= words= key kept=
    word="${{line##*[[:space:]]}}"
    before="${{line%"$word"}}"
    before="${{before%"${{before##*[![:space:]]}}"}}"
    COMPREPLY=()
    if [[ "$before" != *[[:space:]]* ]]; then
        COMPREPLY=($(compgen -W '{commands} --help --print-completion' -- "$word"))
        return
    fi
    if [[ "$before" == *--print-completion ]]; then
        COMPREPLY=($(compgen -W 'bash zsh fish' -- "$word"))
        return
    fi
    if [[ "$before" == *[[:space:]]--config ]]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -f -X '!*.yaml' -- "$word") $(compgen -d -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{settings}
    esac
    if [[ "$word" == *=* ]]; then
        key="${{word%%=*}}"
        [[ "$COMP_WORDBREAKS" == *=* ]] || kept="$key="
        case "${{COMP_WORDS[1]}} ${{key#--}}" in
{values}
        esac
        if [[ -n "$values" ]]; then
            COMPREPLY=($(compgen -P "$kept" -W "$values" -- "${{word#*=}}"))
        else
            compopt -o filenames 2>/dev/null
            COMPREPLY=($(compgen -P "$kept" -W "$words" -- "${{word#*=}}") $(compgen -P "$kept" -f -- "${{word#*=}}"))
        fi
    elif [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W '--config --help' -- "$word"))
    else
        compopt -o nospace 2>/dev/null
        COMPREPLY=($(compgen -W "$settings" -- "$word"))
    fi
}}
complete -o default -F _dcar dcar
"""


def _zsh(commands: list[Command]) -> str:
    rows = [f"        {_described(c.name, c.summary)}" for c in commands]
    settings = []
    for c in commands:
        keys = "\n".join(f"            {_described(s.key, meaning(s))}" for s in c.settings)
        settings.append(f"    {c.name}) settings=(\n{keys}\n        ) ;;")
    values = [f"        {shlex.quote(f'{c.name} {s.key}')}) values=({' '.join(choices(s))}) ;;"
              for c in commands for s in c.settings if choices(s)]
    values += [f"        {shlex.quote(f'{c.name} {s.key}')}) named=({' '.join(names(s))}) ;;"
               for c in commands for s in c.settings if names(s)]
    return _ZSH.format(commands="\n".join(rows), settings="\n".join(settings), values="\n".join(values))


def _described(name: str, text: str) -> str:
    """`name:text` for zsh's _describe, in which a colon of the name would need a backslash; none has one."""
    return shlex.quote(f"{name}:{text}")


_ZSH = """\
#compdef dcar
# zsh completion of dcar, printed by `dcar --print-completion zsh`
_dcar() {{
    local -a commands settings values named
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe -t commands 'command' commands
        return
    fi
    if [[ "$words[CURRENT-1]" == --config ]]; then
        _files -g '*.(yaml|yml)(-.)'
        return
    fi
    case "$words[2]" in
    --print-completion) values=(bash zsh fish); compadd -a values; return ;;
{settings}
    esac
    if [[ "$PREFIX" == *=* ]]; then
        local key="${{${{PREFIX%%=*}}#--}}"
        compset -P '*='
        case "$words[2] $key" in
{values}
        esac
        if (( $#values )); then compadd -a values; else compadd -a named; _files; fi
    elif [[ "$PREFIX" == -* ]]; then
        compadd -- --config --help
    else
        _describe -t settings 'setting' settings -S '='
    fi
}}
_dcar "$@"
"""


def _fish(commands: list[Command]) -> str:
    lines = ["# fish completion of dcar, printed by `dcar --print-completion fish`"]
    first = "test (count (commandline -opc)) -eq 1"
    for c in commands:
        lines.append(f"complete -c dcar -f -n {_fished(first)} -a {c.name} -d {_fished(c.summary)}")
    for c in commands:
        here = _fished(f"__fish_seen_subcommand_from {c.name}")
        lines.append(f"complete -c dcar -n {here} -l config -r -d 'Recipe (YAML)'")
        lines.append(f"complete -c dcar -n {here} -l help -f -d 'Settings of the command'")
        for s in c.settings:
            words = " ".join(f"{s.key}={choice}" for choice in choices(s) or names(s)) or f"{s.key}="
            lines.append(f"complete -c dcar -n {here} -a {_fished(words)} -d {_fished(meaning(s))}")
    return "\n".join(lines) + "\n"


def _fished(text: str) -> str:
    """A text in fish's single quotes, where only the quote and the backslash are special."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
