"""The command for GPU rows, rehearsed on the CPU: parts run in this process, and their figures
come into the table."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml

from dcar.errors import ConfigError
from dcar.train.car import CARTrainer
from launch import gpu_hours, gpu_rows, paper
from launch.gpu_hours import hours
from launch.gpu_models import in_place_of
from launch.gpu_parts import Bench, Found, clocked, prepare_found, recognisers_found
from launch.gpu_rows import PARTS, RowsConfig, main, parts, shown


def test_rehearsal_fills_the_table(tmp_path, capsys):
    """Both precisions differ in their settings only, and `compiled` and `no-graphs` say nothing
    on a CPU."""
    out = tmp_path / "rows"
    some = (
        "methods rounds stage-one rollouts prepare vocoder hours peers stage-two growth "
        "steps-float32"
    ).split()
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
        "CAR-1, ms per step",
        "greedy FAR, hf static, tokens per second",
        "FAR after 400 tokens, ms per step",
        "sd@draft, ms per round; tokens per second at batch 1, 32",
        "round_over_far_step",
        "decision_over_pass",
        "dcar_speedup_over_mean_chunk",
        "floor_share_far",
        "sd_over_hf_assisted",
        "stage one, plain, batches of 1,000 tokens, speech tokens per second",
        "rollouts with rewards, per second",
        "rollouts of 12 tokens, 2 rows, per second: tokens only",
        "vocoder, training steps per second",
        "HuBERT-Large and k-means, seconds of audio per second",
        "stage one, CAR; FAR takes no longer, hours",
    ):
        assert name in what, name
    assert "vocoder" in next(row[2] for row in rows if row[1] == "stage two, seconds per step")
    measured = {row[1]: row[2] for row in rows if row[0] == "| hours"}
    # no recognisers were timed
    assert float(measured["prepare, hours"]) > 0 and "nemo" in measured["profile, hours"]
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
            "rounds": ([], lambda arguments, out: Found([("this", "3", "")])),
        },
    )
    asked = ["device=cpu", f"out={tmp_path}", "parts=[steps,peers,rounds]"]
    assert main(asked) == 1
    said = capsys.readouterr().out
    assert "steps: RuntimeError: the device is gone" in said and "peers: SystemExit: 2" in said
    assert "| steps |" in said and "| rounds | this | 3 |" in said
    log = (tmp_path / "steps.log").read_text()
    assert log.startswith("so far so good") and "Traceback" in log
    monkeypatch.setattr(gpu_rows.time, "monotonic", iter((0.0, 9e9, 9e9)).__next__)
    assert main(asked) == 1
    assert (
        "time" in capsys.readouterr().out and "| this | 3 |" in (tmp_path / "rows.md").read_text()
    )


def raise_exit():
    raise SystemExit(2)


def test_every_part_has_a_place_in_the_order():
    assert set(parts(RowsConfig(device="cpu"))) == set(PARTS)
    assert shown(0.5) == "0.50" and shown({"a": 1.0, "b": {"1": 0.1, "2": 0.3}}) == "a 1.00, b 0.20"


def test_settings_are_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cpu"):
        RowsConfig()
    with pytest.raises(ConfigError, match="parts"):
        RowsConfig(device="cpu", parts=["everything"])


def test_recognisers_of_random_weights_transcribe():
    """NeMo, Whisper and CTC are built from their configurations alone, and each gives a rate."""
    pytest.importorskip("nemo")
    found = recognisers_found(Bench("cpu"))
    assert set(found.rates) == {"nemo", "whisper", "ctc"} and all(
        rate > 0 for rate in found.rates.values()
    )


def test_recognisers_without_nemo(monkeypatch):
    monkeypatch.setattr("launch.gpu_parts.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("launch.gpu_parts.RECOGNISERS", {"nemo": ("NeMo", None)})
    assert recognisers_found(Bench("cpu")) == Found(
        [("NeMo, seconds of audio per second", "not measured", "NeMo is not installed")]
    )


def test_preparation_without_resemblyzer(monkeypatch):
    monkeypatch.setattr(
        "launch.gpu_parts.importlib.util.find_spec", lambda name: None if "resem" in name else True
    )
    found = prepare_found(Bench("cpu"))
    assert list(found.rates) == ["tokens"] and found.rates["tokens"] > 0
    assert found.rows[1][1:] == ("not measured", "Resemblyzer is not installed")
    spent = {stage: needed for stage, needed, _ in hours(found.rates)}
    assert spent["prepare"] == "not measured: voices" and float(spent["tokenizer"]) > 0


def test_from_pretrained_is_replaced_and_restored():
    class Model:
        @classmethod
        def from_pretrained(cls, source):
            return "from a file"

    with in_place_of({Model: "made here"}):
        assert Model.from_pretrained("x", dtype=None) == "made here"
    assert Model.from_pretrained("x") == "from a file"


def test_training_is_timed_from_batch_to_batch(monkeypatch):
    """Of six steps, the fourth and the fifth: tokens of their batches, and the time until the
    sixth begins."""
    clock = iter(range(0, 600, 100))
    monkeypatch.setattr("launch.gpu_parts.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(
        CARTrainer, "training_step", lambda self, model, inputs: now.__setitem__(0, now[0] + 7)
    )
    now, trainer = [0], SimpleNamespace(args=SimpleNamespace(device=torch.device("cpu")))
    with clocked(6) as found:
        for tokens in (1, 2, 4, 8, 16, 32):
            now[0] = next(clock)
            CARTrainer.training_step(trainer, None, {"positions": range(tokens)})
    assert found == {"seconds": 200, "tokens": 24}


def test_hours_are_work_over_rates():
    """Rates of one an hour's work each: every stage takes as many hours as it has such portions."""
    rates = {
        "tokens": 585.0,
        "voices": 1170.0,
        "stage_one": 65_000.0,
        "vocoder_steps": 100.0,
        "rollouts": 10.0,
        "vocoder": 60.0,
        "nemo": 120.0,
        "whisper": 30.0,
    }
    found = {stage: spent for stage, spent, _ in hours(rates)}
    assert found["tokenizer"] == f"{73 / 585:.2f}"
    assert found["prepare"] == f"{1 + 0.5:.2f}"
    assert found["stage one, CAR; FAR takes no longer"] == f"{20 * 585 * 50 / 65_000:.2f}"
    assert found["vocoder"] == f"{2e3 / 3600:.2f}"
    each = 1 / 10 + 6 / 60 + 6 / 120
    assert found["profile"] == f"{3500 * each / 3600:.2f}"
    assert found["DCPO, range [2, 3]"] == f"{980 * 3 * 8 * each / 3600:.2f}"
    assert found["DCPO, range [2, 3, 4]"] == f"{980 * 3 * 12 * each / 3600:.2f}"
    assert (
        found["comparison, without its timing"] == f"{6000 * (1 / 10 + 6 / 60 + 6 / 30) / 3600:.2f}"
    )
    *stages, (last, total, _) = hours(rates)
    assert last == "all" and float(total) == pytest.approx(
        sum(float(h) for _, h, _ in stages), abs=0.05
    )


def test_hours_name_the_rates_that_are_missing():
    found = {stage: spent for stage, spent, _ in hours({"tokens": 585.0})}
    assert found["prepare"] == "not measured: voices" and found["tokenizer"] == "0.12"
    assert found["DCPO, range [2, 3]"] == "not measured: rollouts, vocoder, nemo"
    assert found["all that is measured"] == "0.12"


def test_hours_are_those_of_the_recipes():
    def recipe(name):
        return yaml.safe_load((gpu_rows.RECIPES / f"{name}.yaml").read_text())

    dcpo, profile = recipe("dcpo_paper"), recipe("profile_paper")
    assert dcpo["max_train_prompts"] * dcpo["num_train_epochs"] == gpu_hours.ROLLOUTS
    assert (dcpo["num_generations"], dcpo["variants"]["2-3-4"]["num_generations"]) == (8, 12)
    assert (
        profile["utterances"] * recipe("car_paper")["model"]["num_prediction_heads"]
        == gpu_hours.PROFILED
    )
    assert recipe("vocoder_paper")["max_steps"] == gpu_hours.VOCODER_STEPS

    assert paper.PACKED_HOURS == gpu_hours.VOCODER_HOURS
    assert recipe("tokenizer_hubert")["sample_hours"] * 3600 == gpu_hours.SAMPLED
