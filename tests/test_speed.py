"""The speed benchmark runs, forces equal work, and ends with one JSON object."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny_decoder

from dcar.decoding import ChunkMethod, FixedChunk, decode
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from eval.speed import RATIOS, Load, SpeedConfig, interleaved, main, measure_car, read_sizes, spread, steps


def test_last_line_is_one_json(capsys, tmp_path):
    assert main(["--quick", "sizes=[tiny]", "repeats=1", "group=2", "clock=cpu", f"plot={tmp_path / 'speed.png'}"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("machine:")
    assert next(i for i, line in enumerate(out) if "floor" in line) < next(
        i for i, line in enumerate(out) if line.startswith("CAR-1"))
    ratios = json.loads(out[-1])["ratios"]
    assert set(ratios["car_k_over_k_times_car_1"]["tiny"]) == {str(k) for k in range(2, 8)}
    assert set(ratios["policy_share_of_step"]["tiny"]) == {"bottleneck", "full"}
    for name in ("rollouts_over_sequential", "batch8_over_batch1", "batch32_over_batch1", "floor_share_far",
                 "dcar_speedup_over_mean_chunk", "far_over_hf_generate", "static_over_loop", "growth_over_kv_model"):
        assert ratios[name]["tiny"] > 0, name
    if ratios["sd_over_hf_assisted"]["tiny"] is None:
        assert json.loads(out[-1])["models"]["tiny"]["sd_over_hf_assisted"]
    assert set(ratios) == set(RATIOS)
    assert (tmp_path / "speed.png").stat().st_size > 1000
    assert not any("other tokens" in line and "hf dynamic" in line for line in out)


def test_every_run_speaks_the_same_number_of_tokens():
    model, load = tiny_decoder(), Load(5, 3, 11)
    for k in (1, 2, 4):
        (result,) = decode(model, load.prompts(model, 1), ChunkMethod(FixedChunk(k)), load.sampling())
        assert len(result.tokens) == 11
        assert result.target_passes == steps(11, k)
    got = measure_car(model, load, [1, 2], 1)
    assert got[2]["ms_per_step"].median > 0


def test_hugging_face_speaks_the_same_tokens():
    """The peer of the benchmark is the same model: greedy tokens agree with the loop, for every cache and a draft."""
    from eval.hf_peer import CausalLMPeer, generate, shallow

    for bos in (True, False):
        model, load = tiny_decoder(bos=bos), Load(5, 3, 12)
        prompt = load.prompts(model, 1)[0]
        greedy = SamplingConfig(temperature=0, min_tokens=30, max_tokens=12, max_tokens_per_text_unit=12)
        expected = decode(model, [prompt], ChunkMethod(FixedChunk(1)), greedy)[0].tokens
        peer, draft = CausalLMPeer(model), CausalLMPeer(shallow(model, 1))
        assert generate(peer, prompt, 12) == expected
        assert generate(peer, prompt, 12, static=True) == expected
        assert generate(peer, prompt, 12, assistant=draft) == expected
        assert len(draft.decoder.layers) == 1 and len(model.layers) == 2


def test_engine_needs_fewer_operators_than_the_loop():
    from dcar.decoding.static import engine_for
    from eval.speed_engine import measure_launches

    model, load = tiny_decoder(), Load(5, 3, 12)
    engine = engine_for(model, load.prompts(model, 1), load.sampling(), batch=1)
    counted = measure_launches(model, engine, load, 1)
    assert 20 < counted["static"] < counted["loop"]


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


@pytest.mark.parametrize("bad", [{"sizes": ["huge"]}, {"repeats": 0}, {"threads": 0}, {"clock": "sun"},
                                 {"clock": "cpu", "device": "cuda"}])
def test_bad_settings_are_refused(bad, capsys):
    with pytest.raises(ConfigError):
        SpeedConfig(**bad)
    assert main(["repeat=3"]) == 1
    assert "did you mean 'repeats'" in capsys.readouterr().err
