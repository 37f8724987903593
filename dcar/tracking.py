"""Provenance of results: versions, machine, command."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from dcar.storage import digest, files_of, write_text, writing

PACKAGES = "dcar torch transformers trl accelerate datasets nemo_toolkit jiwer numpy".split()


def machine() -> str:
    """Return the name of the processor (or GPU) on which figures were measured, and the number
    of threads."""
    import torch  # here, because writing a file does not need it

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def provenance(**inputs: Any) -> dict[str, Any]:
    """Return versions, machine, source revision, command line and the given inputs, for the file
    next to a checkpoint."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    try:
        revision = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        revision = "unknown (not a git checkout)"
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "revision": revision,
        "python": sys.version,
        "versions": versions,
        "machine": machine(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **inputs,
    }


def write_provenance(
    folder: Path, source: Mapping[str, Any], files: Iterable[str] | None = None
) -> None:
    """Write provenance.json with the digests of files in its folder (None: of all), which `dcar
    doctor FOLDER` compares. Raises StorageError if it cannot be written."""
    path = folder / "provenance.json"
    names = files_of(folder) if files is None else files
    digests = {name: digest(folder / name) for name in names if name != path.name}
    write_json(path, {**source, "files": digests})


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON atomically: the file is either the old one or the complete new one. Raises
    StorageError if it cannot be written."""
    with writing(path):
        write_text(path, json.dumps(value, indent=2, default=float) + "\n")
