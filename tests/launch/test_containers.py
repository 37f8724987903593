"""Container files, read without an engine: what they copy exists, their shell parses, commands are known.

How they were built rule-based stands in docs/install.md.
"""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from dcar.cli import COMMANDS
from dcar.config import load_config
from eval.demo.page import DemoConfig

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "launch/containers").glob("*.Dockerfile"))
KNOWN = {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENV", "USER", "ENTRYPOINT", "CMD"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, rest) of every line, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", file.read_text(), flags=re.M))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_there_is_one_for_cpus_and_one_for_gpus():
    assert [f.name for f in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
    for file in FILES:
        assert file.with_name(f"{file.name}.dockerignore").read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_what_it_copies_and_runs(file):
    found = instructions(file)
    assert {name for name, _ in found} <= KNOWN and found[0][0] == "FROM"
    copied = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {p.rstrip("*") for p in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    texts = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert packages | texts == set(copied)
    for name, rest in found:
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
            assert all((ROOT / path).exists() for path in re.findall(r"\blaunch/[\w./-]+", rest))
            assert all(word in COMMANDS for word in re.findall(r"(?:^|&& )dcar (\S+)", rest))
    torch = next(d for d in project["project"]["dependencies"] if d.startswith("torch"))
    assert f'"{torch}"' in file.read_text()
    (extras,) = (rest for name, rest in found if name == "ARG" and rest.startswith("EXTRAS"))
    assert extras.split("=")[1].strip("[]") in project["project"]["optional-dependencies"]
    assert json.loads(dict(found)["ENTRYPOINT"]) == ["dcar"]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_launch_lines_on_top_are_of_this_file(file):
    top = re.match(r"(?:#.*\n)+", file.read_text())
    assert top is not None
    text = re.sub(r" \\\n#\s+", " ", top[0])
    assert f"docker build -f launch/containers/{file.name} " in text
    for command in re.findall(r"dcar:\w+ (\w[\w-]*)", text):
        assert command == "launch" or command in COMMANDS
    for path in re.findall(r"\b((?:recipes|accelerate)/[\w.]+)", text):
        assert (ROOT / "launch" / path).exists()


def test_docker_lines_of_the_documentation_are_of_these_files():
    """What is built is one of the files with arguments and extras that there are; what is run was built before, and is
    a command with settings that it has."""
    lines = re.findall(r"^docker (.*)$", (ROOT / "docs/install.md").read_text(), re.M)
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    built: set[str] = set()
    for verb, *words in (shlex.split(line, comments=True) for line in lines):
        if verb == "build":
            file = ROOT / words[words.index("-f") + 1]
            assert file in FILES and words[-1] == "."
            built.add(words[words.index("-t") + 1])
            given = [word.partition("=") for word in words if "=" in word]
            arguments = {rest.partition("=")[0] for name, rest in instructions(file) if name == "ARG"}
            assert {name for name, _, _ in given} <= arguments
            assert {e for name, _, value in given if name == "EXTRAS" for e in value.strip("[]").split(",")} <= extras
        else:
            image = next(word for word in words if word.startswith("dcar:"))
            command, *settings = words[words.index(image) + 1:]
            assert verb == "run" and image in built and command in COMMANDS
            if command == "demo":
                assert load_config(DemoConfig, settings).host == "0.0.0.0"  # or it would not be seen from outside
    assert len(lines) >= 6 and len(built) == 3
