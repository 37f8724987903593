"""Tests of README, CONTRIBUTING and docs: links, paths, commands and their settings; their Python
runs."""

import functools
import importlib
import importlib.util
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from dcar.cli import COMMANDS, resolve
from dcar.config import load_config
from dcar.config.schema import settings_of
from dcar.errors import ConfigError

ROOT = Path(__file__).parents[1]
HISTORY = ROOT / "docs/history.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(p for p in (ROOT / "docs").glob("*.md") if p != HISTORY),
]
CARDS = sorted((ROOT / "dcar" / "assets").glob("*/README.md"))
FLOORS = ("heads", "dcar", "rl", "eval", "launch")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# Python that cannot run here comes after a comment with the reason: <!-- not run: needs a GPU -->
NOT_RUN = re.compile(r"<!-- not run: (\w[^>]{8,}) -->\n+$")
PYTHON = [
    pytest.param(block[2], id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(FENCE.finditer(page.read_text()))
    if block[1] == "python" and not NOT_RUN.search(page.read_text()[: block.start()])
]
# a path of this repository; "{a,b}" and "*" may occur in prose
ROOTS = "(?:heads|dcar|rl|eval|launch|tests|docs)"
PATH = re.compile(rf"(?<![\w/.{{*-])({ROOTS}/[\w./-]*?\.(?:py|c|md|yaml|sh|sbatch|png))\b")


def ids(paths: list[Path]) -> list:
    return [pytest.param(p, id=p.relative_to(ROOT).as_posix()) for p in paths]


# --- links ----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    text = FENCE.sub("", page.read_text())
    titles = (re.sub(r"[`*]", "", t) for t in re.findall(r"^#+ +(.+?) *$", text, re.M))
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", ids([*PAGES, HISTORY, *CARDS, ROOT / "CHANGELOG.md"]))
def test_every_relative_link_leads_somewhere(page):
    text = FENCE.sub("", page.read_text())
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(target)
    assert not lost


@pytest.mark.parametrize("page", ids([*PAGES, *CARDS]))
def test_every_path_exists(page):
    assert not {path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()}


def test_the_core_is_as_long_as_its_table_says():
    rows = re.findall(
        r"^\| \d+ \| `(\S+)` \| (\d+) \|", (ROOT / "docs/architecture.md").read_text(), re.M
    )
    assert len(rows) > 20
    for file, lines in rows:
        assert abs(len((ROOT / file).read_text().splitlines()) - int(lines)) <= 0.1 * int(lines), (
            file
        )


# --- commands -------------------------------------------------------------------------------------


def bash_lines(text: str) -> list[str]:
    """Return the lines of the bash blocks in a page's text, continued ones joined, without
    comments."""
    lines = [
        re.split(r"(?:^|\s)#", line)[0].strip()
        for block in FENCE.finditer(text)
        if block[1] == "bash"
        for line in block[2].replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line]


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return (module, arguments) of every command of this project in a page, from its bash
    blocks and its prose."""
    lines = bash_lines(page.read_text()) + re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text()))
    found = []
    for line in lines:
        line = re.split(r"\s(?:&&|\||>)\s", f"{line} ")[0]
        try:
            words = shlex.split(line)
        except ValueError:  # not a command
            continue
        words = words[1:] if words[:1] == ["./launch/quickstart.sh"] else words
        if line.startswith("./launch/quickstart.sh"):
            found.append(("launch.quickstart", words))
        elif "-m" in words[:-1] and words[0] in ("accelerate", "python"):
            at = words.index("-m") + 1
            after = words[at + 1 :]
            found.append(resolve(after)[1:] if words[at] == "dcar.cli" else (words[at], after))
        elif words[:1] == ["dcar"] and words[1:] and words[1] in COMMANDS:
            found.append(resolve(words[1:])[1:])
    return [
        (module, arguments) for module, arguments in found if module.partition(".")[0] in FLOORS
    ]


@functools.cache
def config_of(module: str) -> type:
    """Settings of the command `python -m module`."""
    name = (
        f"{module}.__main__"
        if (ROOT / module.replace(".", "/") / "__main__.py").is_file()
        else module
    )
    main = importlib.import_module(name).main
    return importlib.import_module(main.__module__).CONFIG


@pytest.mark.parametrize("page", ids(PAGES))
def test_commands_are_accepted_with_their_settings_and_values(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert not refused(page)


def refused(page: Path) -> list[str]:
    """Return `module arguments: reason` of the page's commands that their own schema refuses: keys,
    values, recipes.

    "…" stands for what a reader fills in. Such arguments are left out, and a refusal counts only if
    it names one that is there.
    """
    lost = []
    for module, given in commands(page):
        if not given or {"--help", "-h"} & set(given):
            continue
        arguments = [word for word in given if "…" not in word]
        if arguments and arguments[-1] == "--config":  # --config …
            arguments.pop()
        if (
            arguments and not re.match(r"-|[\w.]+=|\w", arguments[0])
        ) or " → " in f" {' '.join(given)} ":
            continue
        schema = config_of(module)
        try:
            load_config(schema, arguments)
        except ConfigError as error:
            there = {word.partition("=")[0].lstrip("-") for word in arguments}
            absent = any("…" in word for word in given) and not there & set(
                re.findall(r"[\w.]+", str(error))
            )
            # `dcar speak --vocoder`: the page only names an option
            alone = len(given) == 1 and given[0].startswith("--")
            first = re.match(r"[\w.]*", str(error))[0]
            # a page may leave out required settings
            unset = first in settings_of(schema) and first not in there
            if not (absent or alone or unset):
                lost.append(f"{module} {' '.join(arguments)}: {error}")
    return lost


def test_commands_with_unknown_settings_or_wrong_values_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = tmp_path / "page.md"
    page.write_text(
        "`dcar analyse what=speed --quick sizes=[paper]` and `python -m eval.speed.run "
        "sises=[paper]`\n\n"
        "```bash\n"
        "dcar train --config launch/recipes/car_paper.yaml \\\n  model.dropout=0 model.dropuot=0  "
        "# two\n"
        "dcar train --config … per_device_train_batch_size=0   # none\n"
        "dcar compare --config launch/recipes/compare_papers.yaml\n```\n"
    )
    why = refused(page)
    assert [line.split(" ", 1)[0] for line in why] == ["dcar.train.car"] * 2 + [
        "eval.compare.run",
        "eval.speed.run",
    ]
    wrong = ["dropuot", "per_device_train_batch_size", "compare_papers", "sises"]
    assert all(word in line for word, line in zip(wrong, why, strict=True))


# other programs in bash blocks; they are not run here, but what they name must exist
PROGRAMS = set(
    "pip pytest ruff mypy lint-imports import-linter sbatch srun docker mkdocs mkdir cp echo arecord .".split()
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("page", ids(PAGES))
def test_every_line_of_a_bash_block_is_a_command_that_is_known(page):
    unknown = []
    for line in bash_lines(page.read_text()):
        program, *words = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line).split()
        ours = program in ("dcar", "accelerate", "python", "python3.11") or program in PROGRAMS
        script = program.startswith("./") and os.access(ROOT / program, os.X_OK)
        if not (ours or script) or (
            program == "dcar" and words[0] not in (*COMMANDS, "--help", "--recipes", "--version")
        ):
            unknown.append(line)
        for extras in re.findall(r"(?:'\.|dcar)\[([\w,]+)\]", line):
            unknown += [line for extra in extras.split(",") if extra not in EXTRAS]
        unknown += [
            line
            for path in re.findall(r"(?:-r|-f) ((?:docs|launch)/\S+)", line)
            if not (ROOT / path).exists()
        ]
    assert not unknown


# --- Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PYTHON)
def test_python_runs_as_printed(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "page", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out
