"""The speed benchmark runs, forces equal work, and ends with one JSON object."""

import json

import pytest
import torch
from tiny_decoders import tiny_decoder

from dcar.decoding import Engine, FixedChunk, PolicyChunk, decode
from dcar.errors import CheckpointError, ConfigError, EngineError
from dcar.methods import MethodSpec
from dcar.methods.find import every_method
from dcar.model.draft import build_draft
from dcar.sampling import SamplingConfig
from eval.speed.measure import Load, SpeedRow, interleaved, measure_costs
from eval.speed.models import random_draft, random_policies
from eval.speed.run import SpeedConfig, executed, load_all, main


@pytest.fixture
def measured(capsys):
    """Measures a tiny model: the lines that are printed, and the rows of the last one by what they
    measure."""

    def run(*settings: str) -> tuple[list[str], dict[str, SpeedRow]]:
        main(["sizes=[tiny]", "--quick", "repeats=1", *settings])
        lines = capsys.readouterr().out.splitlines()
        rows = [SpeedRow(**row) for row in json.loads(lines[-1])["rows"]["tiny"]]
        return lines, {row.what: row for row in rows}

    return run


def test_the_last_line_is_one_json(measured):
    lines, rows = measured()
    assert "device cpu" in lines[0]
    assert next(i for i, line in enumerate(lines) if "floor" in line) < next(
        i for i, line in enumerate(lines) if line.startswith("  CAR-1,")
    )
    assert all(row.values for row in rows.values())
    steps = {f"CAR-{k}, ms per step" for k in range(1, 8)}
    assert steps <= set(rows)
    assert all(len(rows[step].values) == 3 for step in steps)  # plain, and with two policies
    for name in (
        "batch 32 over batch 1",
        "floor of bytes over a FAR step",
        "speed-up of DCAR (full policy) over its tokens per step",
        "engine over Hugging Face generate",
        "sd over assisted generation",
        "growth over that of bytes",
    ):
        assert rows[name].values[""] > 0 and "aim" in rows[name].compare, name
    for peer in ("sd", "hf dynamic", "hf static", "hf assisted"):
        assert not rows[f"greedy FAR, {peer}, tokens per second"].compare


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decision_among_draws_is_measured_against_a_fixed_chunk(measured, dtype):
    asked = ["parts=[steps]", "num_candidates=3", "heads=shared", f"dtype={dtype}"]
    _lines, rows = measured(*asked, "repeats=5", "chunks=[1,10]")
    assert {what for what in rows if "ms per step" in what} == {
        *("CAR-1, ms per step", "CAR-10, ms per step", "floor of bytes, ms per step")
    }
    values = rows["CAR-10, ms per step"].values
    assert set(values) == {"", "if a policy (after the draw) decides"}
    shares = [
        rows[f"CAR-{k}, ms per step"].values["if a policy (after the draw) decides"]
        / rows[f"CAR-{k}, ms per step"].values[""]
        - 1
        for k in (1, 10)
    ]
    assert rows["a decision over a pass"].values["after the draw"] == pytest.approx(sum(shares) / 2)
    (policy,) = random_policies(tiny_decoder().bfloat16(), after_draw=True).values()
    assert policy.chunk_scorer.inner.weight.dtype == torch.float32  # as it is spoken with
    with pytest.raises(ConfigError, match="num_candidates=3"):
        measured("parts=[steps]", "num_candidates=3", "chunks=[1]")


def test_methods_are_timed_at_two_batches(measured):
    """All families, and what a round of each costs against a step of FAR in the same engine."""
    rows = measured("tokens=12", "parts=[methods]")[1]
    methods = {w.removesuffix(", ms per round"): r for w, r in rows.items() if "per round" in w}
    left_out = {"far", "dcar", "dcar-shuffled", "best-of", "pcg-mel"}
    assert {MethodSpec.parse(name).method for name in methods} == set(every_method()) - left_out
    rates = [[rate for label, rate in row.values.items() if label] for row in methods.values()]
    assert all(len(rate) == 2 and min(rate) > 0 for rate in rates)
    assert methods["car-1"].compare == "1.00 tokens per pass" != methods["car-7"].compare
    assert rows["a round over a FAR step"].values == {
        name: row.values[""] / methods["car-1"].values[""] for name, row in methods.items()
    }


def test_graphs_and_compilation_can_be_switched_off(monkeypatch, measured):
    given: list = []
    monkeypatch.setattr(
        "eval.speed.run.Engine",
        lambda *args, **settings: given.append(settings) or Engine(*args, **settings),
    )
    measured("tokens=12", "parts=[growth]", "compile=false", "graphs=false")
    assert given[0] == {"graphs": False, "compile": False}
    with pytest.raises(EngineError, match="'cpu'.*graphs=false"):
        Engine(tiny_decoder(), FixedChunk(1), SamplingConfig(), graphs=True)


def test_the_round_that_a_gpu_runs_in_vain_counts():
    engine = Engine(tiny_decoder(), FixedChunk(1), SamplingConfig())
    assert [executed(engine, n) for n in (1, 9)] == [1, 9]
    engine.eager = False
    assert [executed(engine, n) for n in (1, 8, 9)] == [2, 9, 10]


def test_every_run_speaks_the_same_number_of_tokens():
    model, load = tiny_decoder(), Load(5, 3, 11)
    for k in (1, 2, 4):
        (result,) = decode(model, load.prompts(model, 1), FixedChunk(k), load.sampling())
        assert len(result.tokens) == 11
        assert result.passes == -(-11 // k)


def test_hugging_face_speaks_the_same_tokens():
    """The peer of the benchmark is the same model: greedy tokens agree with ours, for every
    cache and a draft."""
    from eval.speed.hf_peer import CausalLMPeer, generate

    for bos in (True, False):
        model, load = tiny_decoder(bos=bos), Load(5, 3, 12)
        prompt = load.prompts(model, 1)[0]
        greedy = SamplingConfig(
            temperature=0, min_tokens=30, max_tokens=12, max_tokens_per_text_unit=12
        )
        expected = decode(model, [prompt], FixedChunk(1), greedy)[0].tokens
        peer, draft = CausalLMPeer(model), CausalLMPeer(build_draft(model).eval())
        assert generate(peer, prompt, 12) == expected
        assert generate(peer, prompt, 12, static=True) == expected
        assert generate(peer, prompt, 12, assistant=draft) == expected


def test_both_sides_of_speculation_draft_alike():
    """`sd` and assisted generation get the same draft model and length: the target reads as
    often in both."""
    from dcar.methods import Models, make_methods
    from eval.speed.hf_peer import CausalLMPeer, generate

    model = tiny_decoder(num_layers=4)
    with torch.no_grad():
        for layer in model.layers[1:3]:  # those that the draft leaves out say little
            layer.out.weight.mul_(0.5)
            layer.down.weight.mul_(0.5)
    draft, load = build_draft(model).eval(), Load(5, 3, 40)
    prompt = load.prompts(model, 1)[0]
    greedy = SamplingConfig(
        temperature=0, min_tokens=99, max_tokens=40, max_tokens_per_text_unit=40
    )
    (entry,) = make_methods(["sd@draft"], Models(model, draft=draft))
    ours = decode(model, [prompt], entry.method, greedy)[0]
    assert 0 < sum(ours.accepted) < sum(ours.proposed)  # or the draft length could not show
    peer, passes = CausalLMPeer(model), []
    peer.register_forward_hook(lambda *_: passes.append(1))
    assert generate(peer, prompt, 40, assistant=CausalLMPeer(draft), draft_length=3) == ours.tokens
    # there the prompt is read together with the first draft
    assert abs(len(passes) - (ours.passes - 1)) <= 2
    few = len(passes)
    generate(peer, prompt, 40, assistant=CausalLMPeer(draft), draft_length=1)
    assert len(passes) - few > few


def test_half_precision_halves_what_is_read():
    costs = {}
    for dtype in ("float32", "bfloat16"):
        models = load_all(SpeedConfig(dtype=dtype, sizes=["tiny"]), "tiny")
        assert all(
            p.dtype == getattr(torch, dtype)
            for m in (models.decoder, random_draft(models.decoder), *models.policies.values())
            for p in m.parameters()
        )
        costs[dtype] = measure_costs(models.decoder)
    assert costs["float32"].parameter_bytes == 2 * costs["bfloat16"].parameter_bytes
    assert costs["float32"].position_bytes == 2 * costs["bfloat16"].position_bytes


def test_a_policy_survives_rounding(tmp_path):
    """It is bound to the checksum of the stored weights, which rounding changes."""
    model = tiny_decoder(seed=0)
    model.save_pretrained(tmp_path / "car")
    policy = random_policies(model)["bottleneck"]
    policy.config.base_checksum = model.checksum()
    policy.save_pretrained(tmp_path / "policy")
    models = load_all(
        SpeedConfig(
            decoder=str(tmp_path / "car"), policy=str(tmp_path / "policy"), dtype="bfloat16"
        ),
        "starter",
    )
    assert list(models.policies) == ["trained"]
    assert models.decoder.norm.weight.dtype == torch.bfloat16
    tiny_decoder(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="policy .*dcar train-policy"):
        load_all(
            SpeedConfig(decoder=str(tmp_path / "other"), policy=str(tmp_path / "policy")), "starter"
        )


@pytest.mark.parametrize("kind", ["independent", "shared"])
def test_what_a_step_reads(kind):
    """All parameters but the embeddings, of which it reads rows; the floor is their time."""
    model = tiny_decoder(4, kind=kind)
    costs = measure_costs(model)
    embeddings = model.text_embedding.weight.numel() + model.speech_embedding.weight.numel()
    assert costs.parameters(4) + embeddings == sum(p.numel() for p in model.parameters())
    assert costs.far == costs.parameters(1) < costs.parameters(2) < costs.parameters(2.5)
    read = costs.parameters(4) * costs.parameter_bytes
    assert costs.floor_ms(4) == pytest.approx(1e3 * read / costs.bytes_per_second)


def test_random_policies_choose_among_all_sizes():
    load, model = Load(6, 4, 60), tiny_decoder()
    for policy in random_policies(model).values():
        (result,) = decode(
            model, load.prompts(model), PolicyChunk(policy, "sample"), load.sampling()
        )
        assert set(result.sizes[1:]) == {1, 2, 3, 4}


def test_runs_are_interleaved_and_the_first_round_is_dropped():
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    timings = interleaved(runs, 2, "cpu")
    assert "".join(calls) == "abbaab"
    assert {name: timing.result for name, timing in timings.items()} == {"a": 5, "b": 6}


def test_a_policy_without_its_checkpoint_is_refused():
    with pytest.raises(ConfigError, match="decoder="):
        SpeedConfig(policy="runs/policy")
