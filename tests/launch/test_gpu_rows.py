"""The command for GPU rows, rehearsed on the CPU: parts run in this process, and their figures
come into the table."""

import json
from types import SimpleNamespace

import fake_gpu
import pytest
import torch
from tiny_decoders import tiny_decoder

from dcar.decoding import Engine, FixedChunk, Prompt
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from dcar.train.car import CARTrainer
from eval.speed.measure import SpeedRow
from launch import gpu_rows
from launch.gpu_parts import recorded_steps, replay_ms, tokens_per_second
from launch.gpu_rows import RowsConfig, main, read_part


def test_rehearsal_fills_the_table(tmp_path, capsys):
    """Both precisions differ in their settings only, and `operators` and `no-graphs` say nothing
    on a CPU."""
    out = tmp_path / "rows"
    some = (
        "methods replays rounds stage-one rollouts vocoder peers stage-two growth steps-float32"
    ).split()
    assert main(["device=cpu", f"out={out}", f"parts=[{','.join(some)}]"]) == 0
    rows = [
        line.split(" | ")
        for line in (out / "rows.md").read_text().splitlines()
        if line.startswith("| ")
    ][2:]
    assert list(dict.fromkeys(row[0].removeprefix("| ") for row in rows)) == some
    assert all(len(row) == 5 and row[2].strip() for row in rows)
    assert all(row[4].startswith("rehearsal: ") for row in rows)
    what = {row[1] for row in rows}
    for name in (
        "dcar@n4, RTF end to end",
        "vadusa-2, RTF end to end",
        "CAR-1, ms per step",
        "dcar, batch 2, ms per step",
        "greedy FAR, hf static, tokens per second",
        "FAR after 400 tokens, ms per step",
        "sd@draft, ms per round",
        "a round over a FAR step",
        "a decision over a pass",
        "speed-up of DCAR (bottleneck policy) over its tokens per step",
        "floor of bytes over a FAR step",
        "sd over assisted generation",
        "stage one, plain, batches of 1,000 tokens, speech tokens per second",
        "rollouts with rewards, per second",
        "rollouts of 12 tokens, 2 rows, per second: tokens only",
        "vocoder, training steps per second",
        "vocoder, ms of a streamed piece of 0.5 s",
    ):
        assert name in what, name
    stage_two = {row["what"]: row["values"] for row in read_part(out, "stage-two")["rows"]}
    assert stage_two["stage two, seconds per step"]["vocoder"] > 0
    assert (out / "rows.md").read_text() in capsys.readouterr().out
    stamp = (out / "methods.json").stat().st_mtime_ns
    of_a_gpu = json.loads((out / "growth.json").read_text()) | {"device": "cuda"}
    (out / "growth.json").write_text(json.dumps(of_a_gpu))
    # what was measured on this device is not measured again
    assert main(["device=cpu", f"out={out}", "parts=[methods,growth]"]) == 0
    assert (out / "methods.json").stat().st_mtime_ns == stamp
    assert json.loads((out / "growth.json").read_text())["device"] == "cpu"


def test_the_largest_graph_is_replayed_between_two_events(monkeypatch):
    class Event(fake_gpu.Event):
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self, stream=None):
            self.replays = len(fake_gpu.replays)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 3.0 * (end.replays - self.replays)

    with fake_gpu.fake_gpu(monkeypatch) as device:
        model = tiny_decoder().to(device)
        # rows of different lengths: there are graphs of one row and of two
        engine = Engine(model, FixedChunk(2), SamplingConfig(max_tokens=30), 2)
        engine.decode([Prompt("a", [1], [1]), Prompt("b", [1, 2, 3], [1])])
        steps = [key for key in engine.graphs.captured() if key[0] == "step"]
        assert {rows for _, rows, *_ in steps} == {1, 2}
        monkeypatch.setattr(torch.cuda, "Event", Event)
        assert replay_ms(engine, 5) == 3.0
        (key,) = {k for k, g in engine.graphs.captured().items() if g is fake_gpu.replays[-1]}
        assert key == max(steps)


def test_what_fails_leaves_the_rest(tmp_path, monkeypatch, capsys):
    """A part that breaks, or has no time left, is named, and what was measured stays."""

    def broken(device, out):
        print("so far so good")
        raise RuntimeError("the device is gone")

    def leaves(device, out):
        raise SystemExit(2)

    parts = {
        "methods": broken,
        "rounds": leaves,
        "vocoder": lambda device, out: [SpeedRow("this", {"": 3.0})],
    }
    monkeypatch.setattr(gpu_rows, "PARTS", parts)
    asked = ["device=cpu", f"out={tmp_path}", "parts=[methods,rounds,vocoder]"]
    assert main(asked) == 1
    said = capsys.readouterr().out
    assert "methods: RuntimeError: the device is gone" in said and "rounds: SystemExit: 2" in said
    assert "| methods |" in said and "| vocoder | this | 3 |" in said
    log = (tmp_path / "methods.log").read_text()
    assert log.startswith("so far so good") and "Traceback" in log
    monkeypatch.setattr(gpu_rows.time, "monotonic", iter((0.0, 9e9, 9e9, 9e9)).__next__)
    assert main(asked) == 1
    assert "time" in capsys.readouterr().out
    assert "| this | 3 |" in (tmp_path / "rows.md").read_text()


def test_settings_are_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="0 GPUs.*cpu"):
        RowsConfig()
    with pytest.raises(ConfigError, match="parts"):
        RowsConfig(device="cpu", parts=["everything"])


def test_training_is_timed_from_batch_to_batch(monkeypatch):
    """Of six steps, the fourth and the fifth: tokens of their batches, and the time until the
    sixth begins."""
    clock = iter(range(0, 600, 100))
    monkeypatch.setattr("launch.gpu_parts.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(
        CARTrainer, "training_step", lambda self, model, inputs: now.__setitem__(0, now[0] + 7)
    )
    now, trainer = [0], SimpleNamespace(args=SimpleNamespace(device=torch.device("cpu")))
    with recorded_steps(6) as steps:
        for tokens in (1, 2, 4, 8, 16, 32):
            now[0] = next(clock)
            CARTrainer.training_step(trainer, None, {"positions": range(tokens)})
    assert steps[-1] == (500, 32) and tokens_per_second(steps) == 24 / 200
