"""Completion of commands, settings and choices, asked of a real bash; the scripts of zsh and fish where these are."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcar.cli import COMMANDS, print_completion
from dcar.completion import SHELLS, command_of, script
from dcar.config import schema_of, setting


@dataclass
class Inner:
    """A group."""

    width: int = setting(4, "It's the width: of `it`.", minimum=1)
    kind: str = setting("a", "Which.", choices=("alto", "bass", "baritone"))


@dataclass
class Toy:
    """A toy of a schema."""

    text: str = setting(meaning="A bare word.", positional=True)
    data: str = setting("", "A folder.")
    deep: bool = setting(False, "Whether.")
    decoder: str = setting("starter", "A folder, or a word.", names=("far", "starter"))
    judge: str = setting("moonshine", "Its default is a word.")
    inner: Inner = setting(Inner, "A group.")


TOYS = [command_of("train", "a \\ 'toy'", Toy), command_of("tune", "another: toy", Inner)]


def completed(line: str, folder: Path, breaks: str = " \t\n\"'><=;|&(:") -> list[str]:
    """What bash offers behind `line`, whose words it divides at `breaks`."""
    (folder / "dcar.bash").write_text(script("bash", TOYS))
    program = ('set -u; COMP_WORDBREAKS="$2"; source ./dcar.bash; COMP_LINE="$1" COMP_POINT=${#1}; '
               'COMP_WORDS=($1) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _dcar; printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "--norc", "-c", program, "bash", line, breaks], cwd=folder, capture_output=True,
                          text=True, check=True, timeout=20)
    assert not done.stderr
    return [word for word in done.stdout.split("\n") if word]


@pytest.mark.parametrize(("line", "offered"), [
    ("dcar t", ["train", "tune"]),
    ("dcar --p", ["--print-completion"]),
    ("dcar --print-completion z", ["zsh"]),
    ("dcar train ", ["data=", "deep=", "decoder=", "judge=", "inner.width=", "inner.kind="]),
    ("dcar train data=x in", ["inner.width=", "inner.kind="]),
    ("dcar train inner.kind=ba", ["bass", "baritone"]),
    ("dcar train --inner.kind=al", ["alto"]),
    ("dcar train deep=", ["true", "false"]),
    ("dcar train data=fold", ["folder"]),
    ("dcar train decoder=f", ["far", "folder"]),
    ("dcar train --decoder=st", ["starter"]),
    ("dcar train judge=", ["moonshine", "dcar.bash", "folder", "readme.md", "recipe.yaml"]),
    ("dcar train --c", ["--config"]),
    ("dcar train --config r", ["recipe.yaml"]),
    ("dcar tune k", ["kind="]),
    ("dcar other k", []),
])
def test_what_bash_offers(line, offered, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "readme.md").touch()
    found = completed(line, tmp_path)
    assert found[:1] == offered[:1] and sorted(found) == sorted(offered)


def test_where_bash_does_not_divide_words_at_the_equals_sign_the_whole_word_is_offered(tmp_path):
    assert completed("dcar train inner.kind=ba", tmp_path, " \t\n") == ["inner.kind=bass", "inner.kind=baritone"]
    (tmp_path / "folder").mkdir()
    assert completed("dcar train decoder=f", tmp_path, " \t\n") == ["decoder=far", "decoder=folder"]


def test_recipes_are_offered_by_name(capsys):
    assert print_completion(["bash"]) == 0
    assert "'tune-voice recipe') words='finetune_cosyvoice2_lora finetune_far_starter finetune_starter'" in (
        capsys.readouterr().out)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script(shell, TOYS))
    subprocess.run([shell, "-n", "script"], cwd=tmp_path, check=True, timeout=20)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_every_command_setting_and_choice(shell, capsys):
    assert print_completion([shell]) == 0
    printed = capsys.readouterr().out
    for name, (module, _) in COMMANDS.items():
        found = command_of(name, "", schema_of(importlib.import_module(module).main))
        assert name in printed and all(s.key in printed for s in found.settings)
        assert all(choice in printed for s in found.settings for choice in (*s.meaning.choices, *s.meaning.names))


def test_an_unknown_shell_is_refused(capsys):
    assert print_completion(["csh"]) == print_completion([]) == 2
    assert "one of bash, zsh, fish" in capsys.readouterr().err
