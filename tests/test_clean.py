"""Style and types of the whole project, launch/ included: what `ruff check .` and `mypy` find, by pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def nothing_is_found(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_style() -> None:
    nothing_is_found("ruff", "check", "--no-cache", ".")


@pytest.mark.slow
def test_types() -> None:
    """A minute and a half where mypy has no cache yet, some seconds afterwards."""
    nothing_is_found("mypy")
