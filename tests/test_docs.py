"""Tests that README, CONTRIBUTING and docs only name what exists: links, files, names, settings of
commands; and that their Python runs.

docs/history.md and CHANGELOG.md also name what was removed: only their links are tested.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dcar.cli import COMMANDS, jobs, resolve
from dcar.config import load_config, schema_of
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
CODE = sorted(
    p
    for floor in (*FLOORS, "tests")
    for p in (ROOT / floor).rglob("*")
    if p.suffix in (".py", ".c", ".yaml", ".sh", ".sbatch") and p.name != "test_docs.py"
)

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
FOLDER = re.compile(rf"`({ROOTS}(?:/\w+)*/)`")
DOTTED = re.compile(r"(?<![\w/.@-])((?:heads|dcar|rl|eval|launch)(?:\.[A-Za-z_]\w*)+)")
NOT_MODULES = {"py", "md", "yaml", "json", "pt2"}


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
        if not file.exists() or anchor and anchor not in anchors(file):
            lost.append(target)
    assert not lost


# --- pictures and sounds --------------------------------------------------------------------------


def test_pictures_and_sounds_are_used_and_small():
    text = "".join(p.read_text() for p in [*PAGES, HISTORY])
    files = [p for kind in ("images", "audio") for p in (ROOT / "docs" / kind).iterdir()]
    assert files and not [p.name for p in files if f"{p.parent.name}/{p.name}" not in text]
    assert sum(p.stat().st_size for p in files if p.suffix == ".mp3") <= 250_000


# --- packages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", ["dcar", "eval"])
def test_the_table_of_packages_is_the_contract(floor):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (c["layers"] for c in settings if c.get("containers") == [floor])
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition(f"| packages of `{floor}/`")[2].partition("\n\n")[0].splitlines()[2:]
    rooms = [re.findall(r"`([\w./]+)`", row.replace("\\|", "").split("|")[1]) for row in table]
    assert [[Path(r).stem for r in row] for row in rooms] == [
        layer.split(" | ") for layer in layers
    ]
    assert all((ROOT / floor / r).exists() for row in rooms for r in row)


# --- names ----------------------------------------------------------------------------------------


@functools.cache
def exists(dotted: str) -> bool:
    """Return True if a dotted name is a module of this project, or a name (of a class) in one."""
    owner, _, name = dotted.rpartition(".")
    try:
        pkgutil.resolve_name(dotted)
    except ImportError:
        return False
    except AttributeError:  # a field without a default, or an attribute set by a method
        found = pkgutil.resolve_name(owner) if exists(owner) else None
        return isinstance(found, type) and any(
            name in base.__dict__.get("__annotations__", {})
            or f"self.{name} = " in inspect.getsource(base)
            for base in found.__mro__
            if base.__module__.startswith(FLOORS)
        )
    return True


def dotted_names(text: str) -> set[str]:
    found = {d.rstrip(".") for d in DOTTED.findall(text)}
    return {d for d in found if d.rpartition(".")[2] not in NOT_MODULES}


@pytest.mark.parametrize("file", ids([*PAGES, *CARDS, ROOT / "pyproject.toml", *CODE]))
def test_every_path_and_dotted_name_exists(file):
    """Check pages, and the comments and docstrings of code. There dotted names are quoted,
    because many variables are called heads."""
    text = file.read_text()
    lost = {p for p in PATH.findall(text) if not (ROOT / p).exists()}
    lost |= {f for f in FOLDER.findall(text) if not (ROOT / f).is_dir()}
    named = dotted_names(text)
    if file in CODE:
        named = {
            d
            for d in dotted_names("\n".join(re.findall(r"`([^`\n]+)`", text)))
            if not d.startswith("heads.")
        }
    assert not lost | {d for d in named if not exists(d)}


@pytest.mark.parametrize("page", ids(PAGES))
def test_names_given_with_their_file_are_in_it(page):
    """Check `dcar/text/wer.py: word_errors`, `tests/…/test_x.py::test_y`, and `::test_z` of the
    test file named before it."""
    lost, tests = [], None
    for span in re.findall(r"`([^`\n]+)`", page.read_text()):
        if test := re.fullmatch(r"(tests/[\w/]+\.py)?(?:::(test_\w+))?", span):
            tests = ROOT / test[1] if test[1] else tests
            if test[2] and (tests is None or f"def {test[2]}(" not in tests.read_text()):
                lost.append(span)
        elif named := re.fullmatch(r"((?:heads|dcar|rl|eval|launch)/[\w/]+\.py): ([\w., ]+)", span):
            module = ".".join(Path(named[1]).with_suffix("").parts)
            lost += [
                f"{named[1]}: {n}" for n in named[2].split(", ") if not exists(f"{module}.{n}")
            ]
    assert not lost


def test_names_that_do_not_exist_are_found():
    for name in (
        "dcar.text.wer.word_errors",
        "dcar.model.car.CARDecoder.speech_hidden",
        "rl.train",
        "dcar.decoding.decode",
    ):
        assert exists(name)
    for name in (
        "dcar.tokenizers",
        "dcar.text.wer.letter_errors",
        "dcar.model.car.CARDecoder.speak",
        "rl.draft",
    ):
        assert not exists(name)
    assert dotted_names("`python -m dcar.train`, launch/dcar.sh. See dcar.text.wer.") == {
        "dcar.train",
        "dcar.text.wer",
    }


@functools.cache
def signatures() -> dict[str, set[str]]:
    """Return every function, method and class that this project defines -> the keywords that
    callers may give."""
    found: dict[str, set[str]] = {}
    files = [file for floor in FLOORS for file in (ROOT / floor).rglob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, set()).update(
                    a.arg for a in (*node.args.args, *node.args.kwonlyargs)
                )
            elif isinstance(node, ast.ClassDef):
                # dataclass fields, or arguments of its own constructor
                fields = {
                    part.target.id
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                }
                constructors = [
                    part.args
                    for part in node.body
                    if isinstance(part, ast.FunctionDef) and part.name == "__init__"
                ]
                given = {
                    a.arg
                    for arguments in constructors
                    for a in (*arguments.args, *arguments.kwonlyargs)
                }
                found.setdefault(node.name, set()).update(fields | given)
    return found


@functools.cache
def settings() -> set[str]:
    """Return the settings of all commands, without the groups that they are in."""
    return {
        part
        for module, _ in jobs().values()
        for key in settings_of(schema_of(main_of(module)))
        for part in key.split(".")
    }


def unknown_calls(text: str) -> list[str]:
    """Return the calls `name(…)` and settings `name=…` in a page's prose that neither this
    project nor a library has."""
    lost = []
    for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        if call := re.fullmatch(r"((?:\w+\.)*)([A-Za-z_]\w*)\((.*)\)", span):
            keywords = set(re.findall(r"(?:^|[(,] ?)(\w+)=", call[3]))
            package = call[1].partition(".")[0]
            if package and importlib.util.find_spec(package):  # a library's
                pkgutil.resolve_name(call[1] + call[2])
            elif not keywords <= signatures().get(call[2], set()) or call[2] not in signatures():
                lost.append(span)
        elif setting := re.fullmatch(r"([a-z_]+)=\S*", span):
            known = settings().union(*signatures().values())
            lost += [span] * (setting[1] not in known)
    return lost


@pytest.mark.parametrize("page", ids(PAGES))
def test_calls_and_settings_between_the_words_of_a_page_exist(page):
    assert not unknown_calls(page.read_text())


def test_calls_and_settings_that_do_not_exist_are_found():
    lost = ["policy.see(hidden, logits)", "policy.log_probs(scores, dail=1)", "draws=4"]
    assert (
        unknown_calls(
            ", ".join(f"`{span}`" for span in [*lost, "num_candidates=4", "load_decoder(folder)"])
        )
        == lost
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
            found.append((words[at], words[at + 1 :]))
        elif words[:1] == ["dcar"] and words[1:] and words[1] in COMMANDS:
            found.append(resolve(words[1:])[1:])
    return [
        (module, arguments) for module, arguments in found if module.partition(".")[0] in FLOORS
    ]


@functools.cache
def main_of(module: str) -> Callable:
    name = (
        f"{module}.__main__"
        if (ROOT / module.replace(".", "/") / "__main__.py").is_file()
        else module
    )
    return importlib.import_module(name).main


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
            arguments
            and not re.match(r"-|[\w.]+=|\w", arguments[0])
            or " → " in f" {' '.join(given)} "
        ):
            continue
        schema = schema_of(main_of(module))
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


MODULE = re.compile(r"-m\"?,? \"?((?:dcar|heads|rl|eval|launch)(?:\.\w+)+)")


@pytest.mark.parametrize("file", ids([*PAGES, *CARDS, *CODE]))
def test_modules_that_are_run_can_be_run(file):
    """Check that the modules have an entry point: without one, `python -m` silently does
    nothing."""
    for module in MODULE.findall(file.read_text()):
        path = ROOT / module.replace(".", "/")
        assert (path / "__main__.py").is_file() or "__name__ ==" in path.with_suffix(
            ".py"
        ).read_text(), module


def test_commands_with_unknown_settings_or_wrong_values_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = tmp_path / "page.md"
    page.write_text(
        "`dcar analyse what=speed --quick sizes=[paper]` and `python -m eval.speed.run "
        "sises=[paper]`\n\n"
        "```bash\n"
        "dcar train --config launch/recipes/car_paper.yaml \\\n  model.dropout=0 model.dropuot=0  "
        "# two\n"
        "dcar train --config … batch_size=0   # none\n"
        "dcar compare --config launch/recipes/compare_papers.yaml\n```\n"
    )
    why = refused(page)
    assert [line.split(" ", 1)[0] for line in why] == ["dcar.train.car"] * 2 + [
        "eval.compare.run",
        "eval.speed.run",
    ]
    wrong = ["dropuot", "batch_size", "compare_papers", "sises"]
    assert all(word in line for word, line in zip(wrong, why, strict=True))


# other programs in bash blocks; they are not run here, but what they name must exist
PROGRAMS = {
    "pip",
    "pytest",
    "ruff",
    "mypy",
    "lint-imports",
    "import-linter",
    "sbatch",
    "srun",
    "docker",
    "mkdocs",
    "mkdir",
    "cp",
    "echo",
    "arecord",
    ".",
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("page", ids(PAGES))
def test_every_line_of_a_bash_block_is_a_command_that_is_known(page):
    unknown = []
    for line in bash_lines(page.read_text()):
        program, *words = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line).split()
        ours = program in ("dcar", "accelerate", "python", "python3.11") or program in PROGRAMS
        script = program.startswith("./") and os.access(ROOT / program, os.X_OK)
        if (
            not (ours or script)
            or program == "dcar"
            and words[0] not in (*COMMANDS, "--help", "--recipes", "--version")
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


def test_the_readme_has_python():
    assert any(param.id.startswith("README") for param in PYTHON)


@pytest.mark.parametrize("program", PYTHON)
def test_python_runs_as_printed(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "page", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out
