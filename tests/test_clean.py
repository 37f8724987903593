"""Style and types hold for the whole project: what `ruff check .` and `mypy` say, by their settings in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("command", [["ruff", "check", "--no-cache", "."], ["mypy"]], ids=["style", "types"])
def test_nothing_is_found(command: list[str]) -> None:
    """mypy keeps its cache between runs: some seconds, a minute the first time."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
