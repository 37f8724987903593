"""docs/dependencies.md names what pyproject.toml asks for, with the same versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_of_dependencies_is_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {}
    extras = project["optional-dependencies"]
    wanted_by_extras = [wanted for name in ("nemo", "docs", "dev") for wanted in extras[name]]
    for wanted in [*project["dependencies"], *wanted_by_extras]:
        if wanted.startswith("dcar["):
            continue
        found = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", wanted)
        assert found is not None
        asked[found[1]] = found[2] or "any"
    rows = [line.split(" | ") for line in (ROOT / "docs/dependencies.md").read_text().splitlines() if " | " in line]
    assert {row[0].removeprefix("| "): row[1] for row in rows[1:] if "---" not in row[0]} == asked
