"""The command for GPU rows, rehearsed on the CPU: parts run in this process, and their figures
come into the table."""

import json

import pytest
import torch

from dcar.errors import ConfigError
from launch import gpu_rows
from launch.gpu_rows import PARTS, RowsConfig, main, parts, shown


def test_rehearsal_fills_the_table(tmp_path, capsys):
    """Both precisions differ in their settings only, and `compiled` and `no-graphs` say nothing
    on a CPU."""
    out, some = (
        tmp_path / "rows",
        ["methods", "rounds", "peers", "stage-one", "stage-two", "growth", "steps-float32"],
    )
    assert main(["device=cpu", f"out={out}", f"parts=[{','.join(some)}]"]) == 0
    rows = [
        line.split(" | ")
        for line in (out / "rows.md").read_text().splitlines()
        if line.startswith("| ")
    ][2:]
    assert list(dict.fromkeys(row[0].removeprefix("| ") for row in rows)) == some
    assert all(len(row) == 4 and row[2].strip() for row in rows)
    what = {row[1] for row in rows}
    for name in (
        "dcar@n4, RTF end to end; of the decoder",
        "vadusa-2, RTF end to end; of the decoder",
        "CAR-1, ms a step",
        "greedy FAR, hf static, tokens a second",
        "FAR after 400 tokens, ms a step",
        "sd@draft, ms a round; tokens a second at batch 1, 32",
        "round_over_far_step",
        "decision_over_pass",
        "dcar_speedup_over_mean_chunk",
        "floor_share_far",
        "sd_over_hf_assisted",
        "stage one, ms a step of 16 utterances",
        "rollouts with rewards, a second",
    ):
        assert name in what, name
    assert "vocoder" in next(row[2] for row in rows if row[1] == "stage two, seconds of a step")
    assert (out / "rows.md").read_text() in capsys.readouterr().out
    stamp = (out / "methods.json").stat().st_mtime_ns
    (out / "growth.json").write_text(json.dumps({"arguments": ["another"], "rows": []}))
    # the same arguments are not run again
    assert main(["device=cpu", f"out={out}", "parts=[methods,growth]"]) == 0
    assert (out / "methods.json").stat().st_mtime_ns == stamp and json.loads(
        (out / "growth.json").read_text()
    )["rows"]


def test_what_fails_leaves_the_rest(tmp_path, monkeypatch, capsys):
    """A part that breaks, or has no time left, is named, and what was measured stays."""

    def broken(arguments, out):
        print("so far so good")
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(
        gpu_rows,
        "parts",
        lambda config: {
            "steps": ([], broken),
            "peers": (["status"], lambda arguments, out: raise_exit()),
            "rounds": ([], lambda arguments, out: [("this", "3", "")]),
        },
    )
    asked = ["device=cpu", f"out={tmp_path}", "parts=[steps,peers,rounds]"]
    assert main(asked) == 1
    said = capsys.readouterr().out
    assert "steps: RuntimeError: the device is gone; see" in said and "peers: SystemExit: 2" in said
    assert "| steps | not measured yet" in said and "| rounds | this | 3 |" in said
    log = (tmp_path / "steps.log").read_text()
    assert log.startswith("so far so good") and "Traceback" in log
    monkeypatch.setattr(gpu_rows.time, "monotonic", iter((0.0, 9e9, 9e9)).__next__)
    assert main(asked) == 1
    assert (
        "the time is up" in capsys.readouterr().out
        and "| this | 3 |" in (tmp_path / "rows.md").read_text()
    )


def raise_exit():
    raise SystemExit(2)


def test_every_part_has_a_place_in_the_order():
    assert set(parts(RowsConfig(device="cpu"))) == set(PARTS)
    assert shown(0.5) == "0.50" and shown({"a": 1.0, "b": {"1": 0.1, "2": 0.3}}) == "a 1.00, b 0.20"


def test_settings_are_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cpu rehearses it"):
        RowsConfig()
    with pytest.raises(ConfigError, match="parts"):
        RowsConfig(device="cpu", parts=["everything"])
