"""The speed benchmark runs, forces equal work, and ends with one JSON object."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny_decoder

from dcar.decoding import ChunkMethod, FixedChunk, decode
from dcar.errors import ConfigError
from eval.speed import Load, SpeedConfig, interleaved, main, measure_car, read_sizes, spread, steps


def test_last_line_is_one_json(capsys):
    assert main(["--quick", "sizes=[tiny]", "repeats=1", "group=2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("machine:")
    assert next(i for i, line in enumerate(out) if "floor" in line) < next(
        i for i, line in enumerate(out) if line.startswith("CAR-1"))
    ratios = json.loads(out[-1])["ratios"]
    assert set(ratios["car_k_over_k_times_car_1"]["tiny"]) == {str(k) for k in range(2, 8)}
    assert set(ratios["policy_share_of_step"]["tiny"]) == {"bottleneck", "full"}
    assert ratios["rollouts_over_sequential"]["tiny"] > 0
    assert ratios["batch8_over_batch1"]["tiny"] > 0


def test_every_run_speaks_the_same_number_of_tokens():
    model, load = tiny_decoder(), Load(5, 3, 11)
    for k in (1, 2, 4):
        (result,) = decode(model, load.prompts(model, 1), ChunkMethod(FixedChunk(k)), load.sampling())
        assert len(result.tokens) == 11
        assert result.target_passes == steps(11, k)
    got = measure_car(model, load, [1, 2], 1)
    assert got[2]["ms_per_step"].median > 0


def test_what_a_step_reads():
    model = tiny_decoder(heads=4)
    sizes = read_sizes(model)
    embeddings = model.text_embedding.weight.numel() + model.speech_embedding.weight.numel()
    assert sizes["far"] + 3 * sizes["head"] + embeddings == sum(p.numel() for p in model.parameters())


def test_runs_are_interleaved_and_the_first_round_is_dropped():
    calls: list[str] = []
    seconds = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, torch.device("cpu"))
    assert "".join(calls) == "abbaab"
    assert {k: len(v) for k, v in seconds.items()} == {"a": 2, "b": 2}
    assert str(spread([1.0, 3.0, 2.0])).strip() == "2.000 (1.000–3.000)"


@pytest.mark.parametrize("bad", [{"sizes": ["huge"]}, {"repeats": 0}, {"threads": 0}])
def test_bad_settings_are_refused(bad, capsys):
    with pytest.raises(ConfigError):
        SpeedConfig(**bad)
    assert main(["repeat=3"]) == 1
    assert "did you mean 'repeats'" in capsys.readouterr().err
