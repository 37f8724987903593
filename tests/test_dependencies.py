"""What can be said of dependencies without a network.

docs/dependencies.md names what pyproject.toml asks for; everything that is needed, and needed in turn, is installed, in
a version that all accept, under a licence that the page names. Known vulnerabilities cannot be looked up offline; the
page has the command for a machine that can.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/dependencies.md").read_text()
COPYLEFT = {"num2words", "soxr", "tqdm", "hypothesis", "certifi", "pathspec", "text-unidecode"}


def wanted() -> list[str]:
    """What pyproject.toml asks for, as it stands there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    every = [*project["dependencies"], *(text for name in ("nemo", "docs", "dev") for text in extras[name])]
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
