"""`dcar --print-completion SHELL`: a script that completes commands, settings, their choices, names and files.

    dcar --print-completion bash > ~/.local/share/bash-completion/completions/dcar
    dcar --print-completion zsh > ~/.zfunc/_dcar                       # a folder of $fpath
    dcar --print-completion fish > ~/.config/fish/completions/dcar.fish

Everything that can be completed stands in the script, so that pressing Tab starts no Python; print it again after an
update.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dcar.config import schema_of
from dcar.config.schema import Meaning, Setting, settings_of

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Command:
    """What can be completed behind a command: its settings but for groups, its bare word, its letters."""

    name: str
    summary: str
    settings: tuple[Setting, ...]
    bare: Setting | None = None

    @property
    def letters(self) -> dict[str, str]:
        """Option of one letter -> key of its setting."""
        return {s.meaning.short: s.key for s in self.settings if s.meaning.short}


def command_of(name: str, summary: str, schema: type) -> Command:
    """A command by its schema; settings that it has no use for (`UNUSED`) are left out, as by `--help`."""
    unused: frozenset[str] = getattr(schema, "UNUSED", frozenset())
    known = [s for s in settings_of(schema).values() if not s.group and s.path[-1] not in unused]
    return Command(name, summary, tuple(s for s in known if not s.meaning.positional),
                   next((s for s in known if s.meaning.positional), None))


def shipped_commands(commands: Mapping[str, tuple[str, str]],
                     several: Mapping[str, tuple[str, Mapping[str, tuple[str, str]]]]) -> list[Command]:
    """The commands of the tables in `dcar.cli`; one that does several jobs has the settings of all of them."""
    found = []
    for name, (module, summary) in commands.items():
        key, values = several.get(name, ("", {"": (module, summary)}))
        jobs = [command_of(name, summary, schema_of(importlib.import_module(m).main)) for m, _ in values.values()]
        settings = {s.key: s for job in reversed(jobs) for s in job.settings}
        if key:
            meaning = Meaning("Which job.")
            vars(meaning).update(choices=tuple(values))
            settings = {key: Setting(key, (key,), str, meaning, next(iter(values)))} | settings
        found.append(Command(name, summary, tuple(settings.values()), jobs[0].bare))
    return found


def choices(s: Setting) -> tuple[str, ...]:
    """Words that a setting may be, as far as it says; empty where it may be anything."""
    return tuple(c for c in s.meaning.choices if c) or (("true", "false") if s.hint is bool else ())


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


def _values(commands: list[Command], line: str) -> str:
    """A line of the script for every setting of which more is known than that it may be a file.

    line: has places for `of` (COMMAND KEY, quoted), `variable` (values: nothing else will do; named: files will, too;
    place: only folders will) and `words`.
    """
    found = []
    for c in commands:
        for s in c.settings:
            known = {"values": choices(s), "named": names(s), "place": ("folder",) * (s.meaning.place == "folder")}
            found += [line.format(of=shlex.quote(f"{c.name} {s.key}"), variable=variable, words=" ".join(words))
                      for variable, words in known.items() if words]
    return "\n".join(found)


def _letters(commands: list[Command], line: str) -> str:
    """A line of the script for every option of one letter; line: has places for `of` (COMMAND LETTER, quoted) and
    `key`."""
    return "\n".join(line.format(of=shlex.quote(f"{c.name} {letter}"), key=key)
                     for c in commands for letter, key in c.letters.items())


def _bare(commands: list[Command]) -> dict[str, str]:
    """Command -> "folder" or "file", where its bare word is one of these."""
    return {c.name: c.bare.meaning.place for c in commands if c.bare and c.bare.meaning.place}


def _bash(commands: list[Command]) -> str:
    bare = _bare(commands)
    rows = []
    for c in commands:
        known = {"settings": " ".join(f"{s.key}=" for s in c.settings), "letters": " ".join(c.letters),
                 "bare": bare.get(c.name, "")}
        rows.append(f"        {c.name}) {' '.join(f'{k}={shlex.quote(v)}' for k, v in known.items() if v)} ;;")
    return _BASH.format(commands=" ".join(c.name for c in commands), settings="\n".join(rows),
                        letters=_letters(commands, "        {of}) key={key} ;;"),
                        values=_values(commands, "        {of}) {variable}='{words}' ;;"))


# Readline replaces the last piece of the word, which begins behind "=" (if that is among COMP_WORDBREAKS) and behind
# an open quote; what is offered is the whole word without what stays of it (`head`).
_BASH = r"""# bash completion of dcar, printed by `dcar --print-completion bash`
_dcar() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" command="${{COMP_WORDS[1]}}" i=$COMP_CWORD piece word head before one
    local settings= letters= bare= key= value= stem= list= values= named= place= found=
    COMPREPLY=()
    piece="${{COMP_WORDS[i]}}"
    while [[ "$line" != *"$piece" ]]; do piece="${{piece%?}}"; done
    word="$piece"
    while (( i > 2 )) && [[ "$line" == *"${{COMP_WORDS[i-1]}}$word" ]]; do
        (( i -= 1 ))
        word="${{COMP_WORDS[i]}}$word"
    done
    before="${{COMP_WORDS[i-1]}}"
    if [[ "$piece" == = ]]; then head="$word"; else head="${{word%"$piece"}}"; fi
    head="${{head//[\'\"\\]/}}"
    word="${{word//[\'\"\\]/}}"
    if (( i == 1 )); then
        COMPREPLY=($(compgen -W '{commands} --help --print-completion' -- "$word"))
        return
    fi
    if [[ "$command" == --print-completion ]]; then
        (( i > 2 )) || COMPREPLY=($(compgen -W 'bash zsh fish' -- "$word"))
        return
    fi
    case "$command" in
{settings}
    esac
    value="$word"
    if [[ "$word" == *=* ]]; then
        key="${{word%%=*}}" value="${{word#*=}}" stem="${{word%%=*}}="
    elif [[ "$before" == --?* ]]; then
        key="$before"
    fi
    case "$command $before" in
{letters}
    esac
    key="${{key#--}}"
    key="${{key//-/_}}"
    case "$command $key" in
{values}
    esac
    if [[ "$key" != config && " $settings" != *" $key="* || -z "$stem" && "$values" == 'true false' ]]; then
        key= values=
    fi
    if [[ -n "$key" && "$value" == '['* ]]; then
        one="${{value##*[\[,]}}" list=1
        stem="$stem${{value%"$one"}}" value="$one"
    fi
    if [[ "$key" == config ]]; then
        compopt -o filenames 2>/dev/null
        found="$(compgen -f -X '!*.yaml' -- "$value"; compgen -f -X '!*.yml' -- "$value"; compgen -d -- "$value")"
    elif [[ -n "$values" ]]; then
        found="$(compgen -W "$values" -- "$value")"
    elif [[ -n "$key" ]]; then
        compopt -o filenames 2>/dev/null
        if [[ "$place" == folder ]]; then
            found="$(compgen -d -- "$value")"
        else
            found="$(compgen -W "$named" -- "$value"; compgen -f -- "$value")"
        fi
    elif [[ "$word" == -* ]]; then
        found="$(compgen -W "--config --help $letters" -- "$word")"
    elif [[ "$word" != *=* ]]; then
        found="$(compgen -W "$settings" -- "$word")"
        if [[ "$bare" == folder ]]; then
            one="$(compgen -d -- "$word")"
        elif [[ "$bare" == file ]]; then
            one="$(compgen -f -- "$word")"
        else
            one=
        fi
        if [[ -n "$one" ]]; then compopt -o filenames 2>/dev/null; found="$found"$'\n'"$one"; fi
    fi
    while IFS= read -r one; do
        [[ -n "$one" ]] || continue
        [[ "$stem" == "$head" || -z "$key" || -n "$values" || ! -d "$one" ]] || one="$one/"  # no path to readline
        one="$stem$one"
        COMPREPLY+=("${{one#"$head"}}")
    done <<< "$found"
    if [[ -n "$list" || "${{#COMPREPLY[@]}}" == 1 && "${{COMPREPLY[0]}}" == *[=/] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}}
complete -F _dcar dcar
"""


def _zsh(commands: list[Command]) -> str:
    bare = _bare(commands)
    rows = [f"        {_described(c.name, c.summary)}" for c in commands]
    settings = []
    for c in commands:
        keys = "\n".join(f"            {_described(s.key, meaning(s))}" for s in c.settings)
        more = [f"letters=({' '.join(c.letters)})"] * bool(c.letters)
        more += [f"bare={bare[c.name]}"] if c.name in bare else []
        settings.append(f"    {c.name}) {' '.join([*more, 'settings=('])}\n{keys}\n        ) ;;")
    return _ZSH.format(commands="\n".join(rows), settings="\n".join(settings),
                       letters=_letters(commands, "    {of}) key={key} ;;"),
                       values=_values(commands, "    {of}) {variable}=({words}) ;;"))


def _described(name: str, text: str) -> str:
    """`name:text` for zsh's _describe, which takes away backslashes; a name with a colon would need one, none has."""
    return shlex.quote(f"{name}:{text}".replace("\\", "\\\\"))


_ZSH = r"""#compdef dcar
# zsh completion of dcar, printed by `dcar --print-completion zsh`
_dcar() {{
    local -a commands settings letters values named place
    local key= bare= before="${{words[CURRENT-1]}}" inside= ret=1
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        if [[ "$PREFIX" == -* ]]; then compadd -- --help --print-completion
        else _describe -t commands 'command' commands
        fi
        return
    fi
    case "$words[2]" in
    --print-completion) (( CURRENT == 3 )) && compadd bash zsh fish; return ;;
{settings}
    esac
    if [[ "$PREFIX" == *=* ]]; then
        key="${{PREFIX%%=*}}" inside=1
    elif [[ "$before" == --?* && "$before" != *=* ]]; then
        key="$before"
    fi
    case "$words[2] $before" in
{letters}
    esac
    key="${{${{key#--}}//-/_}}"
    case "$words[2] $key" in
{values}
    esac
    if [[ "$key" != config && -z "${{settings[(r)${{key}}:*]}}" || -z "$inside" && "$values" == 'true false' ]]; then
        key=
    fi
    if [[ -z "$key" ]]; then
        if [[ -n "$inside" ]]; then return 1
        elif [[ "$PREFIX" == -* ]]; then compadd -- --config --help $letters && ret=0
        else
            _describe -t settings 'setting' settings -S '=' && ret=0
            [[ "$bare" == folder ]] && _path_files -/ && ret=0
            [[ "$bare" == file ]] && _files && ret=0
        fi
        return ret
    fi
    [[ -n "$inside" ]] && compset -P 1 '*='
    local -a after
    if [[ "$PREFIX" == (|\\)\[* ]]; then
        compset -P '*[\[,]'
        after=(-S '')
    fi
    if [[ "$key" == config ]]; then
        _path_files -g '*.(yaml|yml)(-.)' && ret=0
        _path_files -/ && ret=0
    elif (( $#values )); then compadd "$after[@]" -a values && ret=0
    elif [[ "$place" == folder ]]; then _path_files -/ "$after[@]" && ret=0
    else
        compadd "$after[@]" -a named && ret=0
        _files "$after[@]" && ret=0
    fi
    return ret
}}
_dcar "$@"
"""


def _fish(commands: list[Command]) -> str:
    bare = _bare(commands)
    rows = [f"                {_fished(c.name)} {_fished(c.summary)}" for c in commands]
    settings = []
    for c in commands:
        more = [f"set letters {' '.join(c.letters)}"] * bool(c.letters)
        more += [f"set bare {bare[c.name]}"] if c.name in bare else []
        keys = [f"                {_fished(f'{s.key}=')} {_fished(meaning(s))}" for s in c.settings]
        settings.append("\n".join([f"        case {c.name}", *(f"            {m}" for m in more),
                                   " \\\n".join(["            set settings", *keys])]))
    return _FISH.format(commands=" \\\n".join(rows), settings="\n".join(settings),
                        letters=_letters(commands, "        case {of}\n            set key {key}"),
                        values=_values(commands, "        case {of}\n            set {variable} {words}"))


def _fished(text: str) -> str:
    """A text in fish's single quotes, where only the quote and the backslash are special."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# Fish replaces the whole word, so whole words are offered. It knows files only by completing a command line: that of
# a command that does not exist has nothing but files.
_FISH = r"""# fish completion of dcar, printed by `dcar --print-completion fish`
function __dcar_files --argument-names start
    complete -C "__dcar_no_such_command "(string escape -- "$start")
end

function __dcar_complete
    set -l given (commandline -opc)
    set -l word (commandline -ct)
    if string match -qr '[\'"]' -- "$word"
        set word (string replace -ra '[\'"]' '' -- "$word")
    else
        set word (string unescape -- "$word")
    end
    if test (count $given) -eq 1
        if string match -q -- '-*' "$word"
            printf '%s\n' --help --print-completion
        else
            printf '%s\t%s\n' \
{commands}
        end
        return
    end
    set -l command $given[2]
    set -l before $given[-1]
    set -l settings
    set -l letters
    set -l bare
    set -l key
    set -l stem
    set -l value $word
    set -l values
    set -l named
    set -l offered
    set -l place
    switch $command
        case --print-completion
            test (count $given) -eq 2; and printf '%s\n' bash zsh fish
            return
{settings}
    end
    if string match -q -- '*=*' "$word"
        set key (string replace -r '=.*' '' -- "$word")
        set stem "$key="
        set value (string replace -r '^[^=]*=' '' -- "$word")
    else if string match -qr -- '^--[^=]+$' "$before"
        set key $before
    end
    switch "$command $before"
{letters}
    end
    set key (string replace -a -- - _ (string replace -r -- '^--' '' "$key"))
    switch "$command $key"
{values}
    end
    if test "$key" != config; and not contains -- "$key=" $settings
        set key
    else if test -z "$stem" -a "$values" = 'true false'
        set key
    end
    if test -z "$key"
        if string match -q -- '-*' "$word"
            printf '%s\n' --config --help $letters
        else if test -z "$stem"
            set -q settings[1]; and printf '%s\t%s\n' $settings
            test "$bare" = folder; and __dcar_files "$word" | string match '*/'
            test "$bare" = file; and __dcar_files "$word"
        end
        return
    end
    if string match -q -- '[*' "$value"
        set -l last (string replace -r -- '.*[[,]' '' "$value")
        set stem "$stem"(string replace -r -- '[^[,]*$' '' "$value")
        set value $last
    end
    if test "$key" = config
        set offered (__dcar_files "$value" | string match -r '.*(?:/|[.]ya?ml)$')
    else if test "$place" = folder
        set offered (__dcar_files "$value" | string match '*/')
    else if set -q values[1]
        set offered $values
    else
        set offered $named (__dcar_files "$value")
    end
    set -q offered[1]; and printf '%s\n' "$stem"$offered
end

complete -c dcar -f -a '(__dcar_complete)'
"""
