"""Tests of style, types, import contracts (pyproject.toml), the cost of importing a decoder, and
the page of dependencies."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs/dependencies.md").read_text()


def run(*command: str, within: Path = ROOT, status: int = 0) -> str:
    """Return what a program of this environment prints in a folder; it must end with this
    status."""
    done = subprocess.run([sys.executable, *command], cwd=within, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_style() -> None:
    run("-m", "ruff", "check", "--no-cache", ".")
    run("-m", "ruff", "format", "--check", "--no-cache", ".")


@pytest.mark.slow
def test_types() -> None:
    """Check types: a minute and a half if mypy has no cache yet, a few seconds afterwards."""
    run("-m", "mypy")


# In a process of its own, because import-linter disables existing loggers, which later tests need.
LINT_IMPORTS = """from importlinter.cli import lint_imports
raise SystemExit(lint_imports(config_filename="pyproject.toml", no_cache=True))"""


def test_contracts_of_imports_are_kept():
    assert "0 broken" in run("-c", LINT_IMPORTS)


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
        "soundfile soxr librosa faster_whisper onnxruntime nemo datasets dcar.audio".split()
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
for name in ("soundfile", "soxr", "librosa", "onnxruntime", "faster_whisper", "ctranslate2", "jiwer", "gruut", "nemo"):
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
        *(text for name in ("nemo", "docs", "dev") for text in extras[name]),
    ]
    return [text for text in every if not text.startswith("dcar[")]


def rows() -> dict[str, list[str]]:
    """Return the table of the page: package -> required range, tested version, licence, purpose."""
    table = PAGE.partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines if cells[0] not in ("package", "---")}


def test_the_table_of_dependencies_is_complete() -> None:
    required = {}
    for text in wanted():
        name, range_ = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", text).groups()
        required[name] = range_ or "any"
    assert {name: cells[0] for name, cells in rows().items()} == required
    for one in map(Requirement, wanted()):
        assert one.specifier.contains(rows()[one.name][1]), (
            f"{one}: tested with {rows()[one.name][1]}"
        )
