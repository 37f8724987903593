"""`dcar --print-completion SHELL`: a script that completes commands, settings, their choices, names, recipes and files.

    dcar --print-completion bash > ~/.local/share/bash-completion/completions/dcar
    dcar --print-completion zsh > ~/.zfunc/_dcar                       # a folder of $fpath
    dcar --print-completion fish > ~/.config/fish/completions/dcar.fish

Everything that can be completed stands in the script as one table, so that pressing Tab starts no Python. Print it
again after an update. One awk program looks words up for all shells; each shell adds files and inserts the word.
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
    """What can be completed behind a command: its settings but for groups, its bare word, recipes for --config."""

    name: str
    summary: str
    settings: tuple[Setting, ...]
    bare: Setting | None = None
    recipes: tuple[str, ...] = ()


def command_of(name: str, summary: str, schema: type, recipes: Iterable[str] = ()) -> Command:
    """A command by its schema; settings that it has no use for (`UNUSED`) are left out, as by `--help`."""
    unused: frozenset[str] = getattr(schema, "UNUSED", frozenset())
    known = [s for s in settings_of(schema).values() if not s.group and s.path[-1] not in unused]
    return Command(name, summary, tuple(s for s in known if not s.meaning.positional),
                   next((s for s in known if s.meaning.positional), None), tuple(recipes))


def shipped_commands(commands: Mapping[str, tuple[str, str]],
                     several: Mapping[str, tuple[str, Mapping[str, tuple[str, str]]]],
                     recipes: Mapping[str, Iterable[str]]) -> list[Command]:
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
        found.append(Command(name, summary, tuple(settings.values()), jobs[0].bare, tuple(recipes.get(name, ()))))
    return found


def row(command: str, s: Setting) -> str:
    """Of the table: command, key, which files will do beside the words (all, folder, none), words, meaning."""
    choices = [c for c in s.meaning.choices if c] or ["true", "false"] * (s.hint is bool)
    default = s.default if isinstance(s.default, str) and re.fullmatch(r"[a-z][\w-]*", s.default) else ""
    names = [] if s.meaning.place else dict.fromkeys(n for n in (*s.meaning.names, default) if n)
    files = "none" if choices else "folder" if s.meaning.place == "folder" else "all"
    meaning = re.split(r"\. (?=[A-Z])", " ".join(s.meaning.replace("%%", "%").split()))[0].rstrip(".")
    meaning = meaning if len(meaning) <= 70 else f"{meaning[:69]}…"
    return "\t".join([command, s.key, files, " ".join(choices or names), meaning])


def table(commands: Iterable[Command]) -> str:
    """Everything that is known of the commands, one line each."""
    lines = []
    for c in commands:
        lines += [f"{c.name}\t\t\t\t{c.summary}", f"{c.name}\tconfig\tyaml\t{' '.join(c.recipes)}\t"]
        lines += [row(c.name, s) for s in c.settings]
        lines += [f"{c.name}\t{s.meaning.short}\tletter\t{s.key}\t" for s in c.settings if s.meaning.short]
        lines += [f"{c.name}\t=\t{c.bare.meaning.place}\t\t"] if c.bare and c.bare.meaning.place else []
    return "\n".join(lines)


def script(shell: str, commands: Iterable[Command]) -> str:
    """The script for one of SHELLS."""
    quote = shlex.quote if shell != "fish" else _fished
    body = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell]
    return body.replace("@TABLE@", quote(table(commands))).replace("@AWK@", quote(AWK))


def _fished(text: str) -> str:
    """A text in fish's single quotes, where only the quote and the backslash are special."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# In: the table; in the environment the command (empty: it is completed itself), the word before and the word that is
# completed. Out: what is offered (commands, settings, values), the part of the word before it, its own beginning, which
# files will do; then a candidate a line, with its meaning.
AWK = r"""
function offer(word, text) { if (index(word, value) == 1) found = found "\n" word "\t" text }
function all(words, i, n, parts) { n = split(words, parts, " "); for (i = 1; i <= n; i++) offer(parts[i], "") }
BEGIN {
    FS = "\t"; command = ENVIRON["DCAR_COMMAND"]; before = ENVIRON["DCAR_BEFORE"]; value = word = ENVIRON["DCAR_WORD"]
    what = command == "" ? "commands" : "settings"; files = "none"
}
command == "" && $2 == "" { if (word !~ /^-/) offer($1, $5) }
$1 == command && $2 != "" {
    if ($3 == "letter") { letters = letters " " $2; if (before == $2) key = $4 }
    else if ($2 == "=") bare = $3
    else { kind[$2] = $3; words[$2] = $4; text[$2] = $5; if ($2 != "config") order[++count] = $2 }
}
END {
    if (command == "" && word ~ /^-/) all("--help --print-completion --recipes --version")
    if (command == "--print-completion" && before == command) all("bash zsh fish")
    if (match(word, /=/)) { key = substr(word, 1, RSTART - 1); stem = key "="; value = substr(word, RSTART + 1) }
    else if (before ~ /^--[^=]+$/) key = before
    sub(/^--/, "", key); gsub(/-/, "_", key)
    if (!(key in kind) || stem == "" && words[key] == "true false") key = ""
    if (key != "") {
        if (value ~ /^\[/) {
            last = value; sub(/.*[[,]/, "", last)
            stem = stem substr(value, 1, length(value) - length(last)); value = last
        }
        what = "values"; files = kind[key]; all(words[key])
    }
    else if (count) {
        if (stem == "" && word ~ /^-/) all("--config --help" letters)
        else if (stem == "") {
            for (i = 1; i <= count; i++) offer(order[i] "=", text[order[i]])
            if (bare != "") files = bare == "file" ? "all" : bare
        }
    }
    print what "\t" stem "\t" value "\t" files found
}
"""

# Readline replaces the last piece of the word, which begins behind "=" (if that is among COMP_WORDBREAKS) and behind
# an open quote; what is offered is the whole word without what stays of it (`head`).
BASH = r"""# bash completion of dcar, printed by `dcar --print-completion bash`
_dcar_table=@TABLE@
_dcar_awk=@AWK@
_dcar() {
    local line="${COMP_LINE:0:COMP_POINT}" command= i=$COMP_CWORD piece word head one what stem value files found
    COMPREPLY=()
    piece="${COMP_WORDS[i]}"
    while [[ "$line" != *"$piece" ]]; do piece="${piece%?}"; done
    word="$piece"
    while (( i > 2 )) && [[ "$line" == *"${COMP_WORDS[i-1]}$word" ]]; do
        (( i -= 1 ))
        word="${COMP_WORDS[i]}$word"
    done
    if [[ "$piece" == = ]]; then head="$word"; else head="${word%"$piece"}"; fi
    head="${head//[\'\"\\]/}"
    word="${word//[\'\"\\]/}"
    (( i > 1 )) && command="${COMP_WORDS[1]}"
    found="$(DCAR_COMMAND="$command" DCAR_BEFORE="${COMP_WORDS[i-1]}" DCAR_WORD="$word" \
        awk "$_dcar_awk" <<< "$_dcar_table"; printf .)"
    one="${found%%$'\n'*}" found="${found#*$'\n'}" found="${found%.}"
    what="${one%%$'\t'*}" one="${one#*$'\t'}"
    stem="${one%%$'\t'*}" one="${one#*$'\t'}"
    value="${one%$'\t'*}" files="${one##*$'\t'}"
    one=
    case "$files" in
        all) one="$(compgen -f -- "$value")" ;;
        folder) one="$(compgen -d -- "$value")" ;;
        yaml) one="$(compgen -f -X '!*.y*ml' -- "$value"; compgen -d -- "$value")" ;;
    esac
    if [[ -n "$one" ]]; then compopt -o filenames 2>/dev/null; found="$found$one"; fi
    while IFS= read -r one; do
        one="${one%%$'\t'*}"
        [[ -n "$one" ]] || continue
        [[ "$stem" == "$head" || "$files" == none || "$what" == settings || ! -d "$one" ]] || one="$one/"
        one="$stem$one"
        COMPREPLY+=("${one#"$head"}")
    done <<< "$found"
    if [[ "$stem" == *[[,]* || "${#COMPREPLY[@]}" == 1 && "${COMPREPLY[0]}" == *[=/] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _dcar dcar
"""

ZSH = r"""#compdef dcar
# zsh completion of dcar, printed by `dcar --print-completion zsh`
_dcar_table=@TABLE@
_dcar_awk=@AWK@
_dcar() {
    local -a lines first found after
    local ret=1 command=
    (( CURRENT > 2 )) && command="$words[2]"
    lines=("${(@f)$(DCAR_COMMAND="$command" DCAR_BEFORE="${words[CURRENT-1]}" DCAR_WORD="${(Q)PREFIX}" \
        awk "$_dcar_awk" <<< "$_dcar_table")}")
    first=("${(@s:	:)lines[1]}")
    shift lines
    [[ "$first[2]" == *=* ]] && compset -P 1 '*='
    if [[ "$first[2]" == *[[,]* ]]; then
        compset -P '*[\[,]'
        after=(-S '')
    fi
    if [[ "$first[1]" == values || "$lines[1]" == -* ]]; then
        found=("${(@)lines%%	*}")
        (( $#lines )) && compadd "$after[@]" -a found && ret=0
    elif (( $#lines )); then
        found=("${(@)${(@)lines//\\/\\\\}/(=|)	/:}")
        if [[ "$first[1]" == settings ]]; then _describe -t settings 'setting' found -S '=' && ret=0
        else _describe -t commands 'command' found && ret=0
        fi
    fi
    case "$first[4]" in
        all) _files "$after[@]" && ret=0 ;;
        folder) _path_files -/ "$after[@]" && ret=0 ;;
        yaml) _path_files -g '*.(yaml|yml)(-.)' && ret=0; _path_files -/ && ret=0 ;;
    esac
    return ret
}
_dcar "$@"
"""

# Fish replaces the whole word, so whole words are offered. It knows files only by completing a command line: that of
# a command that does not exist has nothing but files.
FISH = r"""# fish completion of dcar, printed by `dcar --print-completion fish`
set -g __dcar_table @TABLE@
set -g __dcar_awk @AWK@
function __dcar_complete
    set -l given (commandline -opc)
    set -l word (commandline -ct)
    if string match -qr '[\'"]' -- "$word"
        set word (string replace -ra '[\'"]' '' -- "$word")
    else
        set word (string unescape -- "$word")
    end
    set -l lines (printf '%s\n' $__dcar_table | env DCAR_COMMAND="$given[2]" DCAR_BEFORE="$given[-1]" \
        DCAR_WORD="$word" awk $__dcar_awk)
    set -l first (string split \t -- $lines[1])
    test (count $lines) -gt 1; and printf '%s\n' "$first[2]"$lines[2..-1]
    set -l files
    if test "$first[4]" != none
        set files (complete -C "__dcar_no_such_command "(string escape -- "$first[3]"))
    end
    switch "$first[4]"
        case folder
            set files (string match '*/' -- $files)
        case yaml
            set files (string match -r '.*(?:/|[.]ya?ml)$' -- $files)
    end
    set -q files[1]; and printf '%s\n' "$first[2]"$files
end

complete -c dcar -f -a '(__dcar_complete)'
"""
