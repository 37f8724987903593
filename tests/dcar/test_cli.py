"""The `dcar` command: help, exit statuses, errors without tracebacks, doctor."""

import errno
import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from tiny_corpora import tone, write_manifest

from dcar import doctor
from dcar.cli import CHOICES, COMMANDS, RECIPES, jobs, kind_of, main, resolve
from dcar.config import recipes
from dcar.config.schema import settings_of
from dcar.corpus.read import load_corpus
from dcar.errors import DCARError
from dcar.prepare.prepared import load_prepared
from dcar.process import run_command
from dcar.sources import packages
from dcar.sources.shipped import shipped
from dcar.tokens.load import load_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def arguments_restored(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))  # the command sets it for tools that read it
    monkeypatch.delenv("DCAR_TRACEBACK", raising=False)


def status_of(arguments: list[str]) -> int:
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("name", jobs())
def test_help_of_every_job(name, capsys):
    assert status_of([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert (
        sys.argv[0] == f"dcar {name}"
        and shown.startswith(f"usage: dcar {name} ")
        and len(shown.splitlines()) > 2
    )
    key, values = CHOICES.get(name, ("", {}))
    assert all(
        f"  {key}={value} " in shown and text in shown for value, (_, text) in values.items()
    )


@pytest.mark.parametrize("name", CHOICES)
def test_what_chooses_a_job_is_no_setting_of_it(name):
    key, values = CHOICES[name]
    for value, (module, _) in values.items():
        assert key not in settings_of(importlib.import_module(module).CONFIG)
        for word in (f"{key}={value}", f"--{key}={value}"):
            assert resolve([name, "out=a", word, "-x"])[1:] == (module, ["out=a", "-x"])
    assert status_of([name, f"{key}=other"]) == 2


def test_recipes_are_listed_by_command_with_their_variants(capsys):
    assert status_of(["--recipes"]) == 0
    shown = capsys.readouterr().out
    for recipe in recipes.shipped():
        assert f"  {recipe.name} " in shown and all(
            f"  {recipe.name}:{v} " in shown for v in recipe.variants
        )
        assert recipe.summary and all(recipe.variants.values()) and kind_of(recipe.name)
        assert resolve(RECIPES[kind_of(recipe.name)].split())[1]
    assert "\ndcar train:\n" in shown and max(map(len, shown.splitlines())) <= 120


def test_overview_lists_the_commands_and_imports_nothing_heavy(capsys):
    assert status_of(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dcar 0.")
    for arguments in ([], ["--help"], ["help"]):
        assert status_of(arguments) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in COMMANDS)
    program = (
        "import sys, dcar.cli; dcar.cli.main(['--help']); assert 'torch' not in sys.modules; "
        "import eval.compare.run; assert not {'transformers', 'peft', 'datasets'} & "
        "set(sys.modules); "
        "dcar.cli.main(['speak', '--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: dcar COMMAND" in done.stdout and "voice=" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "buffered"),
    [(["--help"], ""), (["doctor"], ""), (["doctor"], "1"), (["sing"], "")],
)
def test_a_reader_that_goes_ends_a_command_without_a_word(arguments, buffered, tmp_path):
    """`dcar doctor | head -1`, with a head that has left before anything is written."""
    program = (
        "import sys; from dcar import cli, doctor; doctor.CHECKS = {'one': lambda: 'fine'}; "
        "cli.main(sys.argv[1:])"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": buffered},
    )
    os.close(write)
    if arguments == ["sing"]:  # it says so to standard error, which somebody reads
        assert done.returncode == 2 and "unknown command" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (141, "")


def test_a_player_that_ends_leaves_a_whole_file(tmp_path):
    """`dcar speak … --stream -o out.wav | head -c 1000`, which is no full disk."""
    command = (
        "dcar.cli speak 'The tide came in. It went out again.' --stream -o out.wav | head -c 9"
    )
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m {command}; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert done.returncode == 141 and b"could not be written" not in done.stderr
    assert sf.info(tmp_path / "out.wav").duration > 1


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "caf? ?"), ("latin-1", "café ?"), ("utf-8", "café ?")]
)
def test_what_standard_output_cannot_encode_is_replaced(encoding, shown):
    program = (
        "from dcar import cli, doctor; doctor.CHECKS = {'one': lambda: 'caf\\xe9 \\ud800'}; "
        "cli.main(['doctor'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding).strip().endswith(shown)


@pytest.mark.parametrize("hides", ["rl/__init__.py", "eval/notes.txt", "heads.py"])
def test_a_folder_that_hides_a_package_is_named(hides, tmp_path):
    """Most checkouts of research have one, and `python -m` looks into the working directory."""
    (tmp_path / hides).parent.mkdir(exist_ok=True)
    (tmp_path / hides).write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "dcar.cli", "speak", "--voices"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}"},
        capture_output=True,
        text=True,
    )
    package = hides.partition("/")[0].removesuffix(".py")
    assert done.returncode == 1 and not done.stdout
    assert f"{tmp_path / hides.partition('/')[0]}" in done.stderr
    assert f"hides the package {package} of DCAR" in done.stderr


def test_a_broken_pipe_of_a_worker_is_not_taken_for_it():
    def command():
        raise BrokenPipeError("of a service")

    with pytest.raises(BrokenPipeError, match="of a service"):
        run_command("dcar train", command)


@pytest.mark.parametrize("module", ["dcar.train", "rl.train", "eval.compare", "dcar.train.draft"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_entry_points_of_a_module_end_like_the_command(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "nothing=1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 1
    assert "'nothing'" in capsys.readouterr().err.splitlines()[-1]


def test_an_error_is_a_message_not_a_traceback(tmp_path, monkeypatch, capsys):
    wrong = ["train", f"data={tmp_path}/nowhere", f"out={tmp_path}"]
    assert status_of(wrong) == 1
    shown = capsys.readouterr()
    assert (
        shown.err.startswith("dcar train: ")
        and "prepared.json" in shown.err
        and "`dcar prepare`" in shown.err
    )
    assert len(shown.err.splitlines()) == 1
    monkeypatch.setenv("DCAR_TRACEBACK", "1")
    with pytest.raises(DCARError):
        main(wrong)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/data/out"), "/data/out: "),
        # a fault of ours
        (FileNotFoundError(errno.ENOENT, "No such file or directory", f"{ROOT}/no/file"), ""),
        (OSError(errno.EIO, "Input/output error", "/data/out"), ""),  # not ours to explain
    ],
)
def test_a_folder_that_may_not_be_written_is_a_message(fault, told, monkeypatch, capsys):
    """Root may write everywhere, so the system's answer is played."""

    def fails(arguments):
        raise fault

    monkeypatch.setattr(doctor, "main", fails)
    if told:
        assert status_of(["doctor"]) == 1
        assert capsys.readouterr().err.startswith(f"dcar doctor: {told}")
    else:
        with pytest.raises(type(fault), match=fault.strerror):
            main(["doctor"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sing", "la"], "'sing'"),
        (["sing", "la"], "  speak "),  # all commands are listed
        (["train-polcy"], "'train-policy'"),
        (["sped"], "'speak'"),
        (["speak", "-5 degrees outside."], "hyphen"),
        (["speak", "Yes.", "-o", "out.xyz"], "out.xyz: "),
        (["train-vocoder"], "python -m dcar.vocoder.training.pack"),
        (["train", "out_dri=x"], "'out_dri'"),
        (["compare", "temperatur=1"], "'temperature'"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml: "),
        (["train", "optim=sgd"], "optim "),
        (
            (
                "compare data=starter decoder=starter methods=[car-2] limit=1 device=nowhere out=x"
            ).split(),
            "device",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_is_near(arguments, message, capsys):
    assert status_of(arguments) == (1 if arguments[0] in COMMANDS else 2)
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and "Traceback" not in shown.err


def test_validating_a_manifest_prints_its_broken_lines(tmp_path, capsys):
    manifest = write_manifest(tmp_path, [{}, {"audio": "missing.wav"}], [tone(1.0)])
    arguments = ["prepare", "corpus=jsonl", f"path={manifest}", "validate=true"]
    assert status_of(arguments) == 1
    shown = capsys.readouterr()
    (found,) = (row for row in shown.out.splitlines() if "m.jsonl:" in row)
    assert "m.jsonl:2" in found and "missing.wav" in found and "Traceback" not in shown.err
    assert not (tmp_path / "out").exists()
    manifest.write_text(manifest.read_text().splitlines()[0])
    assert status_of(arguments) == 0
    assert "0 problems" in capsys.readouterr().out


def test_doctor_names_what_is_missing(tmp_path, monkeypatch, capsys):
    """An installation without its assets: every other check still runs."""
    monkeypatch.setattr("dcar.sources.shipped.ASSETS", tmp_path)
    monkeypatch.setitem(doctor.CHECKS, "packaged models", lambda: "not looked at here")
    assert status_of(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 7 + ["FAIL"]
    assert f"shipped models: AssetError: {tmp_path}/decoder" in lines[-1]
    assert "torch 2." in lines[0] and "CPU kernels" in lines[3]


def test_doctor_is_content_where_everything_is_there(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: "fine", "two": lambda: "fine"})
    assert status_of(["doctor"]) == 0
    assert capsys.readouterr().out == "ok    one: fine\nok    two: fine\n"
    monkeypatch.setenv("DCAR_NATIVE", "off")
    assert "DCAR_NATIVE" in doctor._kernels()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1e9})())
    with pytest.raises(DCARError, match="1.0 GB"):
        doctor._space()


def test_doctor_names_a_cuda_build_that_nothing_uses(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "pip uninstall -y && pip install" in doctor._device()
    monkeypatch.setattr("torch.version.cuda", None)
    assert "CUDA build" not in doctor._device()


@pytest.mark.parametrize(
    ("arguments", "absent", "extra"),
    [
        (["train", "--config", "car_tiny"], "trl", "train"),
        (["compare", "--config", "compare_tiny"], "matplotlib", "report"),
        (["score", "audio=x.wav", "text=x"], "jiwer", "judge"),
    ],
)
def test_a_missing_extra_is_named_before_anything_is_loaded(
    arguments, absent, extra, monkeypatch, capsys
):
    installed = packages.is_installed
    monkeypatch.setattr(packages, "is_installed", lambda name: name != absent and installed(name))
    assert status_of(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"needs {absent}, " in line and f"[{extra}]'" in line
    assert f"no {extra}, for " in doctor._extras()


MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("dcar", "heads", "rl", "eval", "launch")
    for path in (ROOT / package).rglob("*.py")
)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported(module):
    """Also the scripts that only a command line reaches: a name moved elsewhere once broke the
    quickstart's check."""
    importlib.import_module(module)


def test_shipped_tokens_are_those_of_the_shipped_tokenizer():
    """Processors differ in the last bits, so a state between two codes may fall either way: 2 %
    are tolerated."""
    row = load_prepared(shipped("prepared"), "dev")[0]
    wave, rate = next(u for u in load_corpus("starter", None, "dev") if u.id == row["id"]).load(
        16_000
    )
    (tokens,) = load_tokenizer("starter").encode([wave], rate)
    assert len(tokens) == len(row["speech"]) and np.mean(tokens != row["speech"]) <= 0.02
