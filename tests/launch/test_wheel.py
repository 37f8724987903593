"""The wheel, from a source distribution, in environments of its own: one in which NeMo is not to be
had, and one with the requirements of no extra.

They borrow the packages of this one (nothing is downloaded), but not this checkout.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_docs import FENCE, bash_lines

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.needs("build")]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Folder with sdist and wheel; the wheel is made from the sdist, as `python -m build` does."""
    out, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in tracked:  # a copy: setuptools leaves folders behind
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
        timeout=600,
    )
    return out


def wheel(built: Path) -> Path:
    (found,) = built.glob("dcar-*.whl")
    return found


def shipped_files() -> set[str]:
    """Everything in the five packages that git knows, by its path in the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "dcar", "heads", "rl", "eval", "launch"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return set(listed)


def test_wheel_and_sdist_hold_every_file_of_the_packages(built):
    inside = set(zipfile.ZipFile(wheel(built)).namelist())
    assert not shipped_files() - inside
    assert {name.partition("/")[0] for name in inside if ".dist-info/" not in name} == set(
        "dcar heads rl eval launch".split()
    )
    (sdist,) = built.glob("dcar-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not shipped_files() - names and {"pyproject.toml", "LICENSE", "README.md"} <= names


def fresh_environment(built: Path, folder: Path) -> Path:
    """Return bin/ of a virtual environment with the wheel and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(folder / "bin/python"),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            str(wheel(built)),
        ],
        check=True,
        timeout=300,
        # which pip would take as installed
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory) -> Path:
    """bin/ of a fresh virtual environment with the wheel and the packages of this one."""
    programs = fresh_environment(built, tmp_path_factory.mktemp("venv"))
    (site,) = programs.parent.glob("lib/python*/site-packages")
    # a folder that a .pth names is searched last, and .pth files in it (of this checkout's
    # installation) are not read
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])
    (site / "nemo.py").write_text("raise ModuleNotFoundError(\"No module named 'nemo'\")\n")
    return programs


def run(folder: Path, *command: str, programs: str = "") -> subprocess.CompletedProcess:
    """programs: folders that are searched first, each with a colon behind it."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    variables |= {"OMP_NUM_THREADS": "1", "PATH": programs + os.environ["PATH"]}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )


INSTALLS = ("python3.11 -m venv", "pip install")
"""How lines begin that need the network; the environment has what they bring."""
SOUND = {
    "aplay": 'test "$(wc -c)" -gt 20000',
    "arecord": f'for name; do :; done; cp {ROOT}/docs/audio/far.mp3 "$name"',
}
"""What stands for programs that need a loudspeaker or a microphone."""


def test_the_first_hour_of_docs_start_in_an_empty_folder(environment, tmp_path):
    """Every command and program in order, as it is printed, but what installs."""
    folder, programs = tmp_path / "empty", tmp_path / "sound"
    folder.mkdir()
    programs.mkdir()
    for name, does in SOUND.items():
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    page = (ROOT / "docs/start.md").read_text()
    for line in (
        line
        for block in FENCE.finditer(page)
        for line in (
            [f"python -c {shlex.quote(block[2])}"] if block[1] == "python" else bash_lines(block[0])
        )
    ):
        if line.startswith(INSTALLS):
            continue
        done = run(
            folder,
            "bash",
            "-o",
            "pipefail",
            "-c",
            line,
            programs=f"{programs}:{environment}:",
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, (
            f"{line}\n{done.stdout}\n{done.stderr}"
        )
        for file in re.findall(r"(?:-o|>) (\S+)", line):
            assert (folder / file).stat().st_size > 0, line
        # the sound of the sentence that is asked for, which nothing has written over
        if line.startswith("dcar score"):
            assert float(re.search(r'"wer": {"moonshine": ([\d.]+)', done.stdout)[1]) < 0.4
    assert "<audio" in (folder / "runs/my_texts/report.html").read_text()


def test_what_ships_is_found_and_the_missing_extra_is_named(environment, tmp_path):
    (tmp_path / "look.py").write_text(
        "import dcar, launch\nfrom pathlib import Path\n"
        "from dcar.decoding.cpu.native import load\nfrom dcar.sources.shipped import NAMES, "
        "shipped\n"
        "import torch\n[shipped(name) for name in NAMES]\n"
        "inside = Path(launch.__file__).parent\nassert (inside / "
        "'recipes/car_starter.yaml').is_file()\n"
        "assert 'site-packages' in dcar.__file__, dcar.__file__\nload()\n"
        "from dcar.errors import AssetError\nfrom dcar.recognition.load import load_recognizer\n"
        "load_recognizer('starter')\n"
        "try:\n    load_recognizer('nemo:stt_en_conformer_ctc_small')\nexcept AssetError as "
        "error:\n    print(error)\n"
    )
    done = run(tmp_path, str(environment / "python"), "look.py")
    assert done.returncode == 0, done.stderr
    assert "pip install 'dcar[nemo]'" in done.stdout


# --- without extras -------------------------------------------------------------------------------


def closure(*names: str) -> dict[str, Distribution]:
    """Return these distributions and all that they require, by name."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found[name] = distribution(name)
            waiting += [
                one.name
                for one in map(Requirement, found[name].requires or ())
                if one.marker is None or one.marker.evaluate({"extra": ""})
            ]
    return found


@pytest.fixture(scope="module")
def base(built, tmp_path_factory) -> Path:
    """bin/ of a fresh virtual environment with the wheel and what it requires without extras."""
    programs = fresh_environment(built, tmp_path_factory.mktemp("base"))
    (site,) = programs.parent.glob("lib/python*/site-packages")
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for one in closure(*(Requirement(text).name for text in required)).values():
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(one.locate_file(top))
    return programs


LOADED = """
import sys
import dcar
from dcar.sources.shipped import shipped
model = dcar.load("starter")
spoken = model.generate("The tide came in.", "bm_george", policy=str(shipped("policy-t1.0")), temperature=1.0)
pieces = list(model.stream("The tide came in before we had packed the blankets."))
assert len(pieces) > 1 and spoken.audio.size > 10000
extras = "accelerate datasets trl peft jiwer pandas matplotlib librosa faster_whisper sklearn pydantic"
assert not set(extras.split()) & set(sys.modules)
"""


def test_the_base_alone_speaks_and_names_the_missing_extra(base, tmp_path):
    spoken = run(tmp_path, str(base / "dcar"), "speak", "The tide came in.", "-o", "out.wav")
    assert spoken.returncode == 0, spoken.stderr
    done = run(tmp_path, str(base / "python"), "-c", LOADED)
    assert done.returncode == 0, done.stderr
    healthy = run(tmp_path, str(base / "dcar"), "doctor")
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    for words, extra in (
        ("train --config car_tiny", "train"),
        ("compare --config compare_tiny", "report"),
        ("score audio=out.wav text=tide", "judge"),
        ("speak Tide. --voice out.wav", "judge"),
    ):
        refused = run(tmp_path, str(base / "dcar"), *words.split())
        (line,) = refused.stderr.splitlines()
        assert refused.returncode == 1 and f"pip install 'dcar[{extra}]'" in line, line
