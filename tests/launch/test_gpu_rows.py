"""The command for GPU rows, rehearsed on the CPU: every part runs, and its figures come into the table."""

import contextlib
import json
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from dcar.errors import ConfigError
from launch import gpu_rows
from launch.gpu_rows import RowsConfig, main, parts


def in_process(arguments, log: Path, seconds: float) -> None:
    """As `gpu_rows.start`, without a new interpreter for each part."""
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        if arguments[0] == "pytest":
            print("== 9 passed in 1.23s ==")  # they are tests of their own
        else:
            with mock.patch.object(sys, "argv", ["python", *arguments[1:]]), pytest.raises(SystemExit) as ended:
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            assert not ended.value.code


def test_rehearsal_fills_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_rows, "start", in_process)
    monkeypatch.setattr(gpu_rows, "parts", lambda config: {
        name: part for name, part in parts(config).items() if "bfloat16" not in name})  # else it would take too long
    out = tmp_path / "rows"
    assert main(["device=cpu", f"out={out}"]) == 0
    rows = [line.split(" | ") for line in (out / "rows.md").read_text().splitlines() if line.startswith("| ")][2:]
    every = gpu_rows.parts(RowsConfig(out=str(out), device="cpu"))
    assert "no-graphs-float32" in every and len(parts(RowsConfig(out=str(out), device="cpu"))) == len(every) + 5
    assert {row[0].removeprefix("| ") for row in rows} == set(every)
    assert all(len(row) == 4 and row[2].strip() for row in rows)
    what = {row[1] for row in rows}
    for name in ("CAR-1, ms a step", "greedy FAR, hf static, tokens a second", "FAR behind 400 tokens, ms a step",
                 "sd@draft, loop, tokens a second", "pcg-0.42, loop, tokens a second", "sd_over_hf_assisted",
                 "stage one, ms a step of 16 utterances", "rollouts with rewards, a second"):
        assert name in what, name
    assert (out / "rows.md").read_text() in capsys.readouterr().out
    stamp = (out / "stage-one.json").stat().st_mtime_ns
    (out / "tests.json").write_text(json.dumps({"command": ["another"], "rows": []}))
    assert main(["device=cpu", f"out={out}"]) == 0  # what was measured by the same command is kept
    assert (out / "stage-one.json").stat().st_mtime_ns == stamp
    assert json.loads((out / "tests.json").read_text())["rows"][0][1] == "9 passed in 1.23s"


def test_what_fails_leaves_the_rest(tmp_path, monkeypatch, capsys):
    """A part that breaks, or has no time left, is named, and what was measured stays."""
    monkeypatch.setattr(gpu_rows, "parts", lambda config: {
        "broken": (["launch.no_such_module"], lambda out: []),
        "slow": (["timeit", "-n1", "-r1", "import time; time.sleep(99)"], lambda out: []),
        "good": (["platform"], lambda out: [("this", out.with_suffix(".log").read_text().strip(), "")])})
    run = gpu_rows.start
    monkeypatch.setattr(gpu_rows, "start", lambda a, log, seconds: run(a, log, 0.2 if log.stem == "slow" else seconds))
    assert main(["device=cpu", f"out={tmp_path}"]) == 1
    shown = capsys.readouterr().out
    assert "broken: failed with status 1" in shown and "No module named" in shown and "slow: stopped after" in shown
    assert "| broken | not measured yet" in shown and "| good | this | Linux" in shown
    monkeypatch.setattr(gpu_rows.time, "monotonic", iter((0.0, 9e9, 9e9, 9e9)).__next__)
    assert main(["device=cpu", f"out={tmp_path}"]) == 1
    assert "the time is up" in capsys.readouterr().out and "Linux" in (tmp_path / "rows.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys):
    with pytest.raises(ConfigError, match="finds no GPU.*device=cpu"):
        main([])
