"""Style, types, contracts of imports (pyproject.toml), cost of importing a decoder, and the page of dependencies."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs/dependencies.md").read_text()


def run(*command: str) -> str:
    """What a program of this environment prints at the root of the project; it must end well."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_style() -> None:
    run("-m", "ruff", "check", "--no-cache", ".")


@pytest.mark.slow
def test_types() -> None:
    """A minute and a half where mypy has no cache yet, some seconds afterwards."""
    run("-m", "mypy")


def test_contracts_of_imports_are_kept():
    """In a process of its own: import-linter switches the loggers off that exist, and later tests listen to them."""
    said = run("-c", "from importlinter.cli import lint_imports\n"
                     "raise SystemExit(lint_imports(config_filename='pyproject.toml', no_cache=True))")
    assert "0 broken" in said, said


def test_importing_the_decoder_imports_no_audio_library():
    audio = {"soundfile", "soxr", "librosa", "faster_whisper", "onnxruntime", "nemo", "datasets", "dcar.audio"}
    found = run("-c", "import sys\n"
                      "import dcar.model.load, dcar.decoding, dcar.decoding.fast.passes, dcar.decoding.engine.run\n"
                      f"print(sorted({audio} & set(sys.modules)))")
    assert found.strip() == "[]"


def wanted() -> list[str]:
    """What pyproject.toml asks for, as it stands there."""
    extras = PROJECT["optional-dependencies"]
    every = [*PROJECT["dependencies"], *(text for name in ("nemo", "docs", "dev") for text in extras[name])]
    return [text for text in every if not text.startswith("dcar[")]


def rows() -> dict[str, list[str]]:
    """The table of the page: package -> asked for, tested, licence, for."""
    table = PAGE.partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines if cells[0] not in ("package", "---")}


def test_the_table_of_dependencies_is_complete() -> None:
    asked = {}
    for text in wanted():
        name, range_ = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", text).groups()
        asked[name] = range_ or "any"
    assert {name: cells[0] for name, cells in rows().items()} == asked
    for one in map(Requirement, wanted()):
        assert one.specifier.contains(rows()[one.name][1]), f"{one}: tested with {rows()[one.name][1]}"
