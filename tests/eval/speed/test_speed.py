"""The speed benchmark runs, forces equal work, and ends with one JSON object."""

import json

import pytest
import torch
from tiny_decoders import tiny_decoder

from dcar.decoding import Engine, FixedChunk, decode
from dcar.errors import CheckpointError, ConfigError, EngineError
from dcar.model.draft import build_draft
from dcar.sampling import SamplingConfig
from eval.methods.kinds import KINDS
from eval.methods.spec import MethodSpec
from eval.speed.measure import Load, interleaved, print_card
from eval.speed.run import SpeedConfig, executed, load_all, main, random_policies


@pytest.fixture
def measured(capsys):
    """Measures a tiny model by the clock of the processor: the lines that are printed, and the
    object of the last."""

    def run(*settings: str) -> tuple[list[str], dict]:
        main(["sizes=[tiny]", "clock=cpu", *settings])
        out = capsys.readouterr().out.splitlines()
        return out, json.loads(out[-1])

    return run


def test_last_line_is_one_json(measured):
    out, result = measured("--quick", "repeats=1")
    assert out[0].startswith("machine:")
    assert next(i for i, line in enumerate(out) if "floor" in line) < next(
        i for i, line in enumerate(out) if line.startswith("CAR-1")
    )
    ratios = result["ratios"]
    assert set(ratios["car_k_over_k_times_car_1"]["tiny"]) == {str(k) for k in range(2, 8)}
    shares = ratios["decision_over_pass"]["tiny"]
    assert set(shares) == {"bottleneck", "full"} and set(shares["full"]) == {
        str(k) for k in range(1, 8)
    }
    for name in (
        "batch8_over_batch1",
        "batch32_over_batch1",
        "floor_share_far",
        "dcar_speedup_over_mean_chunk",
        "dcar_over_own_bound",
        "far_over_hf_generate",
        "sd_over_hf_assisted",
        "growth_over_kv_model",
    ):
        assert ratios[name]["tiny"] > 0, name
    card = result["models"]["tiny"]
    assert card["peers_same_tokens"]["sd"] and card["peers_same_tokens"]["hf assisted"]
    assert 0 < result["seconds"]["cpu"]
    assert not any("other tokens" in line and "hf dynamic" in line for line in out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decision_among_draws_is_measured_against_a_fixed_chunk(measured, dtype):
    asked = "--quick parts=[steps] num_candidates=3 heads=shared num_prediction_heads=12".split()
    out, result = measured(
        *asked, f"dtype={dtype}", "policy_reads=candidates", "repeats=5", "chunks=[1,10]"
    )
    card = result["models"]["tiny"]
    decided, plain = card["ms_per_decided_step"]["after the draw"], card["ms_per_step"]
    share = result["ratios"]["decision_over_pass"]["tiny"]["after the draw"]
    assert (
        share == {k: pytest.approx(decided[k] / plain[k] - 1) for k in ("1", "10")}
        and share["10"] > -0.5
    )
    (row,) = (line for line in out if line.startswith("CAR-10"))
    assert f"{decided['10']:.3f}" in row
    (policy,) = random_policies(tiny_decoder().bfloat16(), reads="candidates").values()
    assert policy.chunk_scorer.inner.weight.dtype == torch.float32  # as it is spoken with
    with pytest.raises(ConfigError, match="num_candidates=3"):
        measured(*asked, "repeats=1", "chunks=[1]")


def test_methods_are_timed_at_two_batches(measured):
    """All families, and what a round of each costs against a step of FAR in the same engine."""
    result = measured("--quick", "repeats=1", "tokens=12", "parts=[methods]")[1]
    methods, ratios = (
        result["models"]["tiny"]["methods"],
        result["ratios"]["round_over_far_step"]["tiny"],
    )
    left_out = {"far", "dcar", "dcar-shuffled", "best-of", "pcg-mel"}
    assert {MethodSpec.parse(name).method for name in methods} == set(KINDS) - left_out
    assert all(of[batch] > 0 for of in methods.values() for batch in ("1", "32"))
    assert methods["car-1"]["tokens_per_pass"] == 1 < methods["car-7"]["tokens_per_pass"]
    assert {
        name: of["ms_per_round"] / methods["car-1"]["ms_per_round"] for name, of in methods.items()
    } == ratios


def test_the_whole_step_can_be_compiled(monkeypatch, measured):
    """Both settings reach the engine."""
    monkeypatch.setattr(torch, "compile", lambda step, fullgraph: compiled.append(step) or step)
    compiled: list = []
    measured("--quick", "repeats=1", "tokens=12", "parts=[growth]", "compile=true", "graphs=false")
    assert compiled
    with pytest.raises(EngineError, match="'cpu'.*graphs=false"):
        Engine(tiny_decoder(), FixedChunk(1), SamplingConfig(), graphs=True)


def test_rounds_after_the_end_count_where_the_host_looks_seldom():
    """On a GPU an engine executes whole blocks of rounds, so the time of a round is that of all
    of them."""
    engine = Engine(tiny_decoder(), FixedChunk(1), SamplingConfig())
    assert [executed(engine, n) for n in (1, 9)] == [1, 9]
    engine.exact = False
    assert [executed(engine, n) for n in (1, 8, 9)] == [8, 8, 16]


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
    from eval.methods.registry import Models, make_methods
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


def test_half_precision_halves_the_card(capsys):
    cards = {}
    for dtype in ("float32", "bfloat16"):
        models = load_all(SpeedConfig(dtype=dtype, sizes=["tiny"]), "tiny")
        assert all(
            p.dtype == getattr(torch, dtype)
            for m in (models.decoder, models.draft, *models.policies.values())
            for p in m.parameters()
        )
        cards[dtype] = print_card("tiny", models.decoder, models.policies, torch.device("cpu"))
        assert f"heads, {dtype}" in capsys.readouterr().out
    for name in ("weight_bytes", "kv_bytes_per_token"):
        assert cards["float32"][name] == 2 * cards["bfloat16"][name]


def test_sixteen_shared_heads_are_measured_beside_their_bound(measured):
    """The bytes that they read do not grow with k, so neither does the bound of k × CAR-1."""
    out, result = measured(
        "dtype=bfloat16",
        "num_prediction_heads=16",
        "heads=shared",
        "chunks=[1,7,16]",
        "parts=[steps]",
        "tokens=33",
        "repeats=1",
    )
    kept, bound = (
        result["ratios"][name]["tiny"] for name in ("car_k_over_k_times_car_1", "car_k_bound")
    )
    assert set(kept) == set(bound) == {"7", "16"}
    card = result["models"]["tiny"]
    for k in (7, 16):
        read = card["read_far"] + card["read_heads"] + (k - 1) * card["read_head"]
        assert bound[str(k)] == pytest.approx(card["read_far"] / read)
    assert f"all 16 heads add {(read - card['read_far']) / 1e6:.2f} (" in "\n".join(out)
    assert 0.9 * bound["7"] < bound["16"] < bound["7"] < 1
    assert set(card["ms_per_step"]) == {"1", "7", "16"}


def test_policy_and_draft_survive_rounding(tmp_path):
    """Both are bound to the checksum of the stored weights, which rounding changes."""
    model = tiny_decoder(seed=0)
    model.save_pretrained(tmp_path / "car")
    build_draft(model).save_pretrained(tmp_path / "draft")
    policy = random_policies(model)["bottleneck"]
    policy.config.base_checksum = model.checksum()
    policy.save_pretrained(tmp_path / "policy")
    models = load_all(
        SpeedConfig(
            decoder=str(tmp_path / "car"),
            policy=str(tmp_path / "policy"),
            draft=str(tmp_path / "draft"),
            dtype="bfloat16",
        ),
        "starter",
    )
    assert list(models.policies) == ["trained"] and models.draft.norm.weight.dtype == torch.bfloat16
    tiny_decoder(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="policy .*dcar train-policy"):
        load_all(
            SpeedConfig(decoder=str(tmp_path / "other"), policy=str(tmp_path / "policy")), "starter"
        )


def test_runs_are_interleaved_and_the_first_round_is_dropped():
    calls: list[str] = []
    seconds = interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, torch.device("cpu")
    )
    assert "".join(calls) == "abbaab"
    assert {k: len(v) for k, v in seconds.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    "bad",
    [
        {"sizes": ["huge"]},
        {"repeats": 0},
        {"threads": 0},
        {"tokens": -1},
        {"parts": ["all"]},
        {"clock": "sun"},
        {"clock": "cpu", "device": "cuda"},
        {"dtype": "float8"},
        {"policy": "runs/policy"},
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        SpeedConfig(**bad)
    with pytest.raises(ConfigError, match="'repeat'.*'repeats'"):
        main(["repeat=3"])
