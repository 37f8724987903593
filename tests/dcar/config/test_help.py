"""`dcar COMMAND --help`: every setting with default, bounds and meaning, in 100 columns."""

import dataclasses
import sys
from pkgutil import resolve_name

import pytest

from dcar.cli import jobs
from dcar.config import load_config, setting
from dcar.config.load import help_text
from dcar.config.schema import allowed, fitting, settings_of
from dcar.errors import DCARError

MODULES = {
    **{name: module for name, (module, _) in jobs().items()},
    "pack": "dcar.vocoder.training.pack",
    "quickstart": "launch.quickstart",
}


@pytest.mark.parametrize("name", MODULES)
def test_every_setting_of_every_command_is_declared_with_a_meaning(name, monkeypatch):
    schema = resolve_name(f"{MODULES[name]}:CONFIG")
    monkeypatch.setattr(sys, "argv", [f"dcar {name}"])
    shown = help_text(schema)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100 and lines[0].startswith(f"usage: dcar {name}")
    refused = getattr(schema, "REFUSED", frozenset())
    flat = " ".join(shown.split())
    for key, s in settings_of(schema).items():
        if s.group:
            assert s.meaning and f"{key}: {s.meaning}" in flat
        elif s.path[-1] not in refused:
            assert f"  {key}=" in shown, key
            if s.meaning.declared:
                assert s.meaning and allowed(s.hint, s.meaning) in flat, key
            else:
                assert s.meaning, key  # another project's


@pytest.mark.parametrize("name", MODULES)
def test_defaults_are_within_their_own_bounds(name):
    for key, s in settings_of(resolve_name(f"{MODULES[name]}:CONFIG")).items():
        if (
            s.meaning.declared and not s.group and s.default not in (dataclasses.MISSING, "")
        ) or s.default is None:
            assert fitting(key, s.default, s.hint, s.meaning) == s.default


@dataclasses.dataclass
class Inner:
    """Inner."""

    width: int = setting(4, "Width of it.", minimum=1)


@dataclasses.dataclass
class Toy:
    """A toy of a schema."""

    word: str = setting(meaning="A bare word.", positional=True)
    out: str = setting("x", "Where.", short="-o")
    kind: str = setting("a", "Which.", choices=("a", "b"))
    rate: float | None = setting(None, "How fast.", above=0, maximum=1)
    inner: Inner = setting(Inner, "A group.")


def test_what_it_looks_like(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dcar toy"])
    assert (
        help_text(Toy)
        == """\
usage: dcar toy WORD [-o OUT] [--config RECIPE] [key=value …]

A toy of a schema.

  word=…     A bare word. [required, text]
  out=x      Where. [text]
  kind=a     Which. [a | b]
  rate=null  How fast. [number > 0 and ≤ 1, or null]

inner: A group.
  inner.width=4  Width of it. [whole number ≥ 1]"""
    )


def test_help_needs_no_settings_and_prints_to_standard_output(capsys):
    with pytest.raises(SystemExit) as end:
        load_config(Toy, ["word", "--help"])
    assert end.value.code == 0 and "usage:" in capsys.readouterr().out
    with pytest.raises(DCARError, match="^word "):
        load_config(Toy, [])
