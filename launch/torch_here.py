"""Say which torch this Python has: prints `gpu` if it sees a GPU and is one of the versions in
pyproject.toml, `cpu` if it sees none, `other` for another version, or `none`.

environment.sh runs it before the project is installed, so it imports nothing of it.
"""

import re
import tomllib
from pathlib import Path


def torch_here() -> str:
    """Return the word for this Python's torch."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library of a broken installation
        return "none"
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for requirement in tomllib.loads(text)["project"]["dependencies"]:
        limits = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", requirement)
        if limits and numbers(limits[1]) <= numbers(torch.__version__) < numbers(limits[2]):
            return "gpu" if torch.cuda.is_available() else "cpu"
    return "other"


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version such as 2.11.0+cu130."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


if __name__ == "__main__":
    print(torch_here())
