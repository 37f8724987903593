"""Real shells at a pseudo terminal: what stands on the command line after Tab, and what a completion offers.

bash is everywhere; where zsh or fish is not installed, tests that need it are skipped (`needs`).
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import subprocess
import termios
import time
from pathlib import Path
from types import TracebackType

import pytest

SECONDS = 30.0  # a shell that takes longer hangs
SHOW = "\x18\x10"  # Ctrl-X Ctrl-P: write the line to the file `line`, and empty it
LEFT = "\x02"  # Ctrl-B

# What a user's own file would do, then SHOW, and that what is offered is written to the file `.offered`, one a line.
STARTUP = {
    "bash": r"""
PS1='> '
bind 'set bell-style none' 'set page-completions off' 'set completion-query-items 0' 'set enable-bracketed-paste off'
source ./script
tell() { set -u; _dcar "$@"; set +u; printf '%s\n' "${COMPREPLY[@]}" > .offered; }
complete -F tell dcar
show() { printf '%s' "$READLINE_LINE" > .line; mv .line line; READLINE_LINE= READLINE_POINT=0; }
bind -x '"\C-x\C-p": show'
touch ready
""",
    "zsh": r"""
PS1='> '
LISTMAX=100000
unset zle_bracketed_paste
unsetopt beep
bindkey -e
mkdir .functions
cp script .functions/_dcar
fpath=($PWD/.functions $fpath)
autoload -Uz compinit && compinit -u -D
compadd() {  # what it is asked to add is looked up once more: -O, -A and -D add nothing
    if (( ! ${@[(I)-(O|A|D)]} )); then
        local -a looked_up
        builtin compadd -A looked_up "$@"
        (( $#looked_up )) && print -rl -- "${(@)looked_up/#/$IPREFIX}" >> .offered
    fi
    builtin compadd "$@"
}
show() { print -rn -- "$BUFFER" > .line; mv .line line; BUFFER= }
zle -N show
bindkey '^X^P' show
touch ready
""",
    "fish": r"""
function fish_prompt; printf '> '; end
set -g fish_greeting
set -g fish_autosuggestion_enabled 0
source ./script
function show
    printf '%s' (commandline | string collect) > .line
    mv .line line
    commandline ''
    commandline -f cancel
end
bind \cx\cp show
touch ready
""",
}
START = {"bash": ["bash", "--noprofile", "--rcfile", ".startup"], "zsh": ["zsh", "-f", "-i"],
         "fish": ["fish", "--no-config", "-i", "-C", "source ./.startup"]}


def needs(shell: str) -> None:
    """Skip the test where a shell is not installed."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A shell that has read a completion script, at a pseudo terminal, in a folder that is its own.

    with Terminal("zsh", script, folder) as terminal: terminal.after_tab("dcar tr") == "dcar train "
    """

    def __init__(self, shell: str, script: str, folder: Path, more: str = "") -> None:
        """more: lines that its start-up file begins with."""
        needs(shell)
        self.shell, self.folder, self.seen = shell, folder, b""
        (folder / "script").write_text(script)
        (folder / ".startup").write_text(more + STARTUP[shell])
        (folder / ".home").mkdir()
        self.ours, theirs = pty.openpty()
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder / ".home"), "TERM": "xterm", "LC_ALL": "C.UTF-8",
                       "COLUMNS": "200", "LINES": "50"}
        self.process = subprocess.Popen(START[shell], cwd=folder, env=environment, stdin=theirs, stdout=theirs,
                                        stderr=theirs, start_new_session=True, preexec_fn=_take_terminal)
        os.close(theirs)
        if shell == "zsh":  # reads no file of another name
            os.write(self.ours, b". ./.startup\n")
        self._wait("ready")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)

    def _wait(self, name: str) -> str:
        """The text of a file that the shell writes, which is removed. AssertionError with what the terminal showed."""
        file, until = self.folder / name, time.monotonic() + SECONDS
        while not file.exists():
            self._look(0.02)
            assert self.process.poll() is None and time.monotonic() < until, self.seen.decode(errors="replace")
        text = file.read_text()
        file.unlink()
        return text

    def _look(self, seconds: float) -> bool:
        """Read what the shell shows (a full terminal would stop it), if there is something within so many seconds."""
        if not select.select([self.ours], [], [], seconds)[0]:
            return False
        try:
            self.seen += os.read(self.ours, 65536)
        except OSError:  # the shell has ended
            return False
        return True

    def after_tab(self, line: str, behind: str = "") -> str:
        """The command line after `line` and Tab, with the text `behind` behind the cursor."""
        self.seen = b""
        os.write(self.ours, f"{line}{behind}{LEFT * len(behind)}\t{SHOW}".encode())
        return self._wait("line")

    def offered(self, line: str) -> list[str]:
        """What is offered behind `line`, but for hidden files; behind "=", without the key that stands before it."""
        if self.shell == "fish":
            program = "source ./script; complete -C $argv[1]"
            done = subprocess.run(["fish", "--no-config", "-c", program, line], cwd=self.folder, capture_output=True,
                                  text=True, check=True, timeout=SECONDS)
            assert not done.stderr
            found = [row.partition("\t")[0] for row in done.stdout.splitlines()]
        else:
            file = self.folder / ".offered"
            file.unlink(missing_ok=True)
            self.after_tab(line)
            found = file.read_text().splitlines() if file.exists() else []
        key, equals, _ = line.rpartition(" ")[2].lstrip("'\"").partition("=")
        words = [word.replace("\\", "").rstrip("/").removeprefix(key + equals if equals else "") for word in found]
        return [word for word in dict.fromkeys(words) if word and not word.startswith(".")]

    def shown(self, line: str) -> str:
        """What the terminal shows after `line` and Tab."""
        self.after_tab(line)
        while self._look(0.2):
            pass
        return self.seen.decode(errors="replace")
