"""Completion of commands, settings and choices by real shells: bash, and zsh and fish where these are installed."""

from __future__ import annotations

import importlib
import shlex
import subprocess
from dataclasses import dataclass

import pytest
from shells import Terminal, needs

from dcar.cli import jobs, print_completion
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
    data: str = setting("", "A folder: where 100% of it is.", place="folder")
    parts: list[str] = setting([], "Several.", choices=("", "high", "low", "lower"))
    out: str = setting("x.wav", "It is written.", short="-o", place="file")
    deep: bool = setting(False, "Whether.")
    decoder: str = setting("starter", "A folder, or a word.", names=("far", "starter"))
    judge: str = setting("moonshine", "Its default is a word.")
    inner: Inner = setting(Inner, "A group.")


@dataclass
class Small:
    """Another toy."""

    folder: str = setting(meaning="A bare word.", positional=True, place="folder")
    kind: str = setting("a", "Which.", choices=("alto", "bass"))


TOYS = [command_of("train", "a \\ 'toy'", Toy, ["toy", "toy:far"]), command_of("tune", "another: toy", Small)]


@pytest.fixture(scope="module", params=SHELLS)
def terminal(request, tmp_path_factory):
    """Each shell, in a folder with a folder and files."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "folder").mkdir()
    for name in ("recipe.yaml", "recipe.yml", "readme.md", "two words.wav"):
        (folder / name).touch()
    with Terminal(request.param, script(request.param, TOYS), folder) as opened:
        yield opened


FILES = ["folder", "readme.md", "recipe.yaml", "recipe.yml", "script", "two words.wav"]


@pytest.mark.parametrize(("line", "offered"), [
    ("dcar t", ["train", "tune"]),
    ("dcar -", ["--help", "--print-completion", "--recipes", "--version"]),
    ("dcar --print-completion ", ["bash", "zsh", "fish"]),
    ("dcar --print-completion bash ", []),
    ("dcar train ", ["data", "parts", "out", "deep", "decoder", "judge", "inner.width", "inner.kind"]),
    ("dcar train data=x inner.", ["inner.width", "inner.kind"]),
    ("dcar train tune inner.", ["inner.width", "inner.kind"]),  # a bare word that is a command's name
    ("dcar train inner.kind=ba", ["bass", "baritone"]),
    ("dcar train --inner.kind=ba", ["bass", "baritone"]),
    ("dcar train --inner.kind ba", ["bass", "baritone"]),
    ("dcar train 'inner.kind=ba", ["bass", "baritone"]),
    ("dcar train 'a text' inner.kind=ba", ["bass", "baritone"]),
    ("dcar train deep=", ["true", "false"]),
    ("dcar train --deep inner.", ["inner.width", "inner.kind"]),  # a switch needs no value
    ("dcar train data=", ["folder"]),
    ("dcar train out=re", ["readme.md", "recipe.yaml", "recipe.yml"]),
    ("dcar train -o re", ["readme.md", "recipe.yaml", "recipe.yml"]),
    ("dcar train decoder=f", ["far", "folder"]),
    ("dcar train --decoder=st", ["starter"]),
    ("dcar train judge=", ["moonshine", *FILES]),
    ("dcar train inner.width=", FILES),
    ("dcar train nothing=", []),
    ("dcar train parts=", ["high", "low", "lower"]),
    ("dcar train 'parts=[high,lo", ["[high,low", "[high,lower"]),
    ("dcar train 'decoder=[far,s", ["[far,starter", "[far,script"]),
    ("dcar train -", ["--config", "--help", "-o"]),
    ("dcar train --config ", ["folder", "recipe.yaml", "recipe.yml", "toy", "toy:far"]),
    ("dcar train --config=re", ["recipe.yaml", "recipe.yml"]),
    ("dcar tune k", ["kind"]),
    ("dcar tune fo", ["folder"]),
    ("dcar tune read", []),
    ("dcar other k", []),
])
def test_what_is_offered(line, offered, terminal):
    found = terminal.offered(line)
    if terminal.shell != "zsh":  # which adds "=" when it inserts
        found = [word.removesuffix("=") for word in found]
    assert sorted(found) == sorted(offered)


@pytest.mark.parametrize(("line", "after"), [
    ("dcar tr", "dcar train "),
    ("dcar --p", "dcar --print-completion "),
    ("dcar train inner.k", "dcar train inner.kind="),
    ("dcar train inner.kind=al", "dcar train inner.kind=alto "),
    ("dcar train inner.kind=b", "dcar train inner.kind=ba"),
    ("dcar train --inner.kind=al", "dcar train --inner.kind=alto "),
    ("dcar train --inner.kind al", "dcar train --inner.kind alto "),
    ("dcar train 'inner.kind=al", "dcar train 'inner.kind=alto' "),
    ("dcar train 'parts=[high,lo", "dcar train 'parts=[high,low"),
    ("dcar train data=fo", "dcar train data=folder/"),
    ("dcar train decoder=star", "dcar train decoder=starter "),
    ("dcar train out=tw", "dcar train out=two\\ words.wav "),
    ("dcar train out=two\\ w", "dcar train out=two\\ words.wav "),
    ("dcar train 'out=tw", "dcar train 'out=two words.wav' "),
    ("dcar train --config rea", "dcar train --config rea"),
    ("dcar tune fo", "dcar tune folder/"),
    ("dcar tune ki", "dcar tune kind="),
])
def test_the_line_after_tab(line, after, terminal):
    assert terminal.after_tab(line) == after


def test_a_value_before_other_words(terminal):
    assert terminal.after_tab("dcar train inner.kind=al", " deep=true").split() == [
        "dcar", "train", "inner.kind=alto", "deep=true"]
    assert terminal.after_tab("dcar train inner.ki", " deep=true").startswith("dcar train inner.kind=")


def test_a_quote_behind_the_equals_sign(terminal):
    assert shlex.split(terminal.after_tab("dcar train out='tw")) == ["dcar", "train", "out=two words.wav"]
    assert shlex.split(terminal.after_tab("dcar train inner.kind='al")) == ["dcar", "train", "inner.kind=alto"]


def test_descriptions_with_colons_percent_signs_and_quotes(terminal):
    if terminal.shell == "bash":
        pytest.skip("bash shows no descriptions")
    assert "another: toy" in terminal.shown("dcar t") and "a \\ 'toy'" in terminal.shown("dcar t")
    settings = terminal.shown("dcar train d")
    assert "A folder: where 100% of it is" in settings and "A folder, or a word" in settings
    assert "It's the width: of `it`" in terminal.shown("dcar train inner.")


def test_where_bash_does_not_divide_words_at_the_equals_sign(tmp_path):
    (tmp_path / "folder").mkdir()
    with Terminal("bash", script("bash", TOYS), tmp_path, "COMP_WORDBREAKS=${COMP_WORDBREAKS//=}\n") as terminal:
        assert terminal.offered("dcar train inner.kind=ba") == ["bass", "baritone"]
        assert terminal.after_tab("dcar train inner.kind=al") == "dcar train inner.kind=alto "
        assert terminal.after_tab("dcar train data=fo") == "dcar train data=folder/"


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_of_dcar_itself(shell, tmp_path, capsys):
    needs(shell)
    assert print_completion([shell]) == 0
    (tmp_path / "take.wav").touch()
    with Terminal(shell, capsys.readouterr().out, tmp_path) as terminal:
        assert sorted(terminal.offered("dcar train-c")) == ["train-chunk-scorer"]
        assert terminal.offered("dcar speak policy=starter-") == ["starter-t0.4"]
        assert sorted(terminal.offered("dcar tune-voice recipe=fi")) == [
            "finetune_cosyvoice2_lora", "finetune_far_starter", "finetune_starter"]
        assert terminal.after_tab("dcar speak 'The tide.' voice=ta") == "dcar speak 'The tide.' voice=take.wav "
        assert terminal.offered("dcar train --config car_smo") == ["car_smollm2_lora"]
        assert sorted(terminal.offered("dcar prepare mode=re")) == ["resynthesize", "retokenize"]
        assert sorted(terminal.offered("dcar analyse 'sizes=[tiny,")) == ["[tiny,paper", "[tiny,starter", "[tiny,tiny"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell, tmp_path):
    needs(shell)
    (tmp_path / "script").write_text(script(shell, TOYS))
    subprocess.run([shell, "-n", "script"], cwd=tmp_path, check=True, timeout=20)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_every_command_setting_and_choice(shell, capsys):
    assert print_completion([shell]) == 0
    printed = capsys.readouterr().out
    for name, (module, _) in jobs().items():
        found = command_of(name, "", schema_of(importlib.import_module(module).main))
        assert name.partition(' ')[0] in printed and all(s.key in printed for s in found.settings)
        assert all(choice in printed for s in found.settings for choice in (*s.meaning.choices, *s.meaning.names))


def test_an_unknown_shell_is_refused(capsys):
    assert print_completion(["csh"]) == print_completion([]) == 2
    assert "one of bash, zsh, fish" in capsys.readouterr().err
