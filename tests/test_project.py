"""What holds of the project as a whole: style and types, launch/ included; contracts of imports (pyproject.toml) and
what importing a decoder costs; the citation; dependencies.

docs/dependencies.md names what pyproject.toml asks for; everything that is needed, and needed in turn, is installed, in
a version that all accept, under a licence that the page names. Known vulnerabilities cannot be looked up offline; the
page has the command for a machine that can.
"""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs/dependencies.md").read_text()
COPYLEFT = {"num2words", "soxr", "tqdm", "hypothesis", "certifi", "pathspec", "text-unidecode"}


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


def test_the_citation_is_of_this_project_and_its_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "type"} <= set(cited)  # the first four are required
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])
    paper = cited["preferred-citation"]
    assert {"type", "title", "authors"} <= set(paper) and len(paper["authors"]) == 8
    assert paper["title"] in " ".join((ROOT / "README.md").read_text().split()) and "2506.22023" in paper["url"]


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


def needed() -> tuple[dict[str, importlib.metadata.Distribution], list[str]]:
    """All distributions that the project needs, directly or in turn, by name; and what is wrong with them."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen, wrong, todo = set(), [], [("dcar", Requirement(text)) for text in wanted()]
    while todo:
        asker, one = todo.pop()
        name = canonicalize_name(one.name)
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{asker} needs {one}: not installed")
            continue
        if not one.specifier.contains(found[name].version, prereleases=True):
            wrong.append(f"{asker} needs {one}: installed is {found[name].version}")
        for extra in {"", *one.extras} - {e for n, e in seen if n == name}:
            seen.add((name, extra))
            inner = [Requirement(text) for text in found[name].requires or []]
            todo += [(name, r) for r in inner if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found, wrong


def licence(of: importlib.metadata.Distribution) -> str:
    """What a distribution declares: its licence expression, classifiers, or the first line of its text."""
    classified = [c.split(" :: ")[-1] for c in of.metadata.get_all("Classifier", []) if c.startswith("License ::")]
    said = of.metadata.get("License-Expression") or "; ".join(classified) or of.metadata.get("License") or ""
    return said.strip().split("\n")[0]


def test_the_table_of_dependencies_is_complete() -> None:
    asked = {}
    for text in wanted():
        name, range_ = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", text).groups()
        asked[name] = range_ or "any"
    assert {name: cells[0] for name, cells in rows().items()} == asked
    for one in map(Requirement, wanted()):
        assert one.specifier.contains(rows()[one.name][1]), f"{one}: tested with {rows()[one.name][1]}"


def test_what_is_needed_is_installed_in_versions_that_all_accept() -> None:
    found, wrong = needed()
    assert not wrong and len(found) > 100


def test_licences_are_declared_and_copyleft_is_named() -> None:
    found, _ = needed()
    said = {name: licence(one) for name, one in found.items()}
    assert not [name for name, text in said.items() if not text or text == "UNKNOWN"]
    copyleft = {name for name, text in said.items() if re.search(r"GPL|General Public|MPL|Mozilla", text)}
    assert copyleft <= COPYLEFT and all(name in PAGE for name in COPYLEFT)
