"""Tests of style, types, import contracts (pyproject.toml), the cost of importing a decoder, and
the page of dependencies."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs/dependencies.md").read_text()


def run(*command: str, within: Path = ROOT, status: int = 0) -> str:
    """Return what a program of this environment prints in a folder; it must end with this
    status."""
    done = subprocess.run([sys.executable, *command], cwd=within, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.needs("ruff")
def test_style() -> None:
    run("-m", "ruff", "check", "--no-cache", ".")
    run("-m", "ruff", "format", "--check", "--no-cache", ".")


@pytest.mark.slow
@pytest.mark.needs("mypy")
def test_types() -> None:
    """Check types: a minute and a half if mypy has no cache yet, a few seconds afterwards."""
    run("-m", "mypy")


# In a process of its own, because import-linter disables existing loggers, which later tests need.
LINT_IMPORTS = """from importlinter.cli import lint_imports
raise SystemExit(lint_imports(config_filename="pyproject.toml", no_cache=True))"""


@pytest.mark.needs("importlinter")
def test_contracts_of_imports_are_kept():
    assert "0 broken" in run("-c", LINT_IMPORTS)


@pytest.mark.needs("importlinter")
def test_a_circle_of_two_files_of_one_package_breaks_a_contract(tmp_path):
    """Check imports for types only, too: until November 2026 dcar/vocoder/streaming.py imported
    model.py for a type, which no contract detected."""
    for package in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "root_packages"
    ]:
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=lambda folder, names: [n for n in names if Path(n).suffix not in ("", ".py")],
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "dcar/vocoder/streaming.py").open("a") as file:
        file.write(
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from dcar.vocoder.model import TokenVocoder\n"
        )
    output = run("-c", LINT_IMPORTS, within=tmp_path, status=1)
    assert "No cycles are allowed in dcar.vocoder" in output, output


def test_importing_the_decoder_imports_no_audio_library():
    audio = set(
        "soundfile av soxr librosa faster_whisper onnxruntime nemo datasets dcar.audio".split()
    )
    found = run(
        "-c",
        "import sys\n"
        "import dcar.model.load, dcar.decoding\n"
        f"print(sorted({audio} & set(sys.modules)))",
    )
    assert found.strip() == "[]"


NO_AUDIO = """
import sys
for name in ("soundfile", "av", "soxr", "librosa", "onnxruntime", "faster_whisper", "ctranslate2", "jiwer", "gruut", "nemo"):
    sys.modules[name] = None  # as if it were not installed: transformers uses some of them if it can
from dcar.cli import main
main(["train", "--config", "car_tiny", "max_steps=1", "out=" + sys.argv[1]])
ours = [name for name in sys.modules if name.split(".")[0] in ("dcar", "heads", "rl", "eval", "launch")]
print([name for name in ours if name.startswith((
    "dcar.audio", "dcar.voices", "dcar.vocoder", "dcar.recognition", "dcar.decoding", "dcar.corpus", "eval", "rl"))])
"""


def test_stage_one_needs_no_audio_library(tmp_path):
    """Check a whole run, because imports within functions count, too."""
    assert run("-c", NO_AUDIO, str(tmp_path / "out")).splitlines()[-1] == "[]"
    assert (tmp_path / "out" / "model.safetensors").is_file()


def wanted() -> list[str]:
    """Return the requirements in pyproject.toml, as written there."""
    extras = PROJECT["optional-dependencies"]
    every = [
        *PROJECT["dependencies"],
        *(text for extra in extras.values() for text in extra),
    ]
    return [text for text in every if not text.startswith("dcar[")]


def rows() -> dict[str, list[str]]:
    """Return the table of the page: package -> required range, tested version, licence, purpose."""
    table = PAGE.partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines if cells[0] not in ("package", "---")}


CONSTRAINTS = dict(
    line.split("==")
    for line in (ROOT / "launch/constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)
NOT_REQUIRED = {
    "cosyvoice": "a tokenizer and vocoder that a user has",
    "hibari": "launch/starter/make_corpus.py, which makes the shipped corpus",
    "misaki": "launch/starter/make_corpus.py, for a corpus in Mandarin",
    "resemblyzer": "launch/requirements-models.txt",
    "s3tokenizer": "a tokenizer that a user has",
    "speechtokenizer": "a tokenizer that a user has",
}
"""Packages that are imported and not required, with the reason."""


def imported() -> set[str]:
    """Return the packages of others that our modules import, anywhere in them."""
    names: set[str] = set()
    ours = ("dcar", "heads", "rl", "eval", "launch")
    for path in (path for package in ours for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module))
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, *ours}


def test_every_import_is_declared() -> None:
    """Until November 2026 numpy, pyyaml and pyarrow came by luck of other packages."""
    declared = {canonicalize_name(Requirement(text).name) for text in wanted()}
    distributions = packages_distributions()
    undeclared = {
        name
        for name in imported()
        if not declared & {canonicalize_name(d) for d in distributions.get(name, [name])}
    }
    assert undeclared <= {*NOT_REQUIRED, "nemo"}, "declare these in pyproject.toml"
    assert set(NOT_REQUIRED) <= imported(), "these are not imported any more"


def test_constraints_are_what_was_tested_and_leave_torch_alone() -> None:
    names = {one.name: one.specifier for one in map(Requirement, wanted())}
    assert set(CONSTRAINTS) == set(names) - {"torch", "triton"}
    for name, version in CONSTRAINTS.items():
        assert names[name].contains(version) and rows()[name][1] == version, name


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu"])
def test_installing_beside_the_torch_of_a_machine_replaces_nothing(version):
    """Of all packages that an environment holds, those that ask for torch accept this one."""
    asking = {
        (distribution.name, str(requirement))
        for distribution in distributions()
        if distribution.name != "dcar"
        for requirement in map(Requirement, distribution.requires or ())
        if requirement.name == "torch"
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and not requirement.specifier.contains(version)
    }
    assert not asking
    (own,) = (one for one in map(Requirement, wanted()) if one.name == "torch")
    assert own.specifier.contains(version) and not own.specifier.contains("2.14.0")


def test_the_table_of_dependencies_is_complete() -> None:
    required = {}
    for text in wanted():
        name, range_ = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?([^;]*).*", text).groups()
        required[name] = range_ or "any"
    assert {name: cells[0] for name, cells in rows().items()} == required
    for one in map(Requirement, wanted()):
        assert one.specifier.contains(rows()[one.name][1]), (
            f"{one}: tested with {rows()[one.name][1]}"
        )
