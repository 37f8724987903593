"""The cost estimate against what is really allocated, computed and waited for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_backbones import tiny_backbone
from tiny_data import write_prepared

from dcar.config.recipes import shipped
from dcar.errors import ConfigError
from dcar.model.backbones.lora import LoraSettings, add_lora, set_trainable
from dcar.model.car import CARConfig, CARDecoder
from dcar.optim import ScaledAdam
from dcar.text.phonemes import TEXT_VOCAB_SIZE
from launch import cost
from launch.estimate import estimate, job_of, main, processes_of, split_arguments

RECIPES = Path(__file__).parents[2] / "launch" / "recipes"


def small(**changes) -> CARDecoder:
    torch.manual_seed(0)
    settings = dict(text_vocab_size=64, speech_vocab_size=100, hidden_size=64, num_layers=3, num_attention_heads=4,
                    ffn_size=256, num_prediction_heads=4, head_blocks=2, bos=True, dropout=0.0)
    return CARDecoder(CARConfig(**{**settings, **changes}))


def inputs(rows: int = 3, text: int = 20, speech: int = 60, prompt: int = 11) -> dict[str, torch.Tensor]:
    return {"text_ids": torch.zeros(rows, text, dtype=torch.long), "text_lengths": torch.full((rows,), text),
            "speech_ids": torch.randint(0, 12, (rows, speech)), "speech_lengths": torch.full((rows,), speech),
            "prompt_lengths": torch.full((rows,), prompt)}


def size_of(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def lora_model():
    decoder = add_lora(tiny_backbone(), LoraSettings(rank=4))
    set_trainable(decoder, "lora")
    return decoder


def shared_heads(**changes) -> CARDecoder:
    return small(heads="shared", head_width=96, **changes)


def frozen_trunk() -> CARDecoder:
    decoder = shared_heads()
    decoder.freeze_trunk()
    return decoder


def frozen_model():
    decoder = tiny_backbone()
    set_trainable(decoder, "heads")
    return decoder


@pytest.mark.parametrize("make", [small, tiny_backbone, lora_model, frozen_model, shared_heads, frozen_trunk])
@pytest.mark.parametrize("optimizer", ["adamw", "scaled_adam"])
def test_bytes_of_parameters_gradients_and_optimiser_are_exact(make, optimizer):
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    built = torch.optim.AdamW(trained, fused=True) if optimizer == "adamw" else ScaledAdam(trained)
    model(**inputs(speech=12, prompt=3)).loss.backward()
    for parameter in trained:  # text ids that a batch does not have, and dead branches, still have their state
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    built.step()
    state = [t for s in built.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    expected = cost.training_bytes(model, optimizer)
    assert expected["parameters"] == size_of(model.parameters())
    assert cost.count(model, trained=True) == sum(p.numel() for p in trained)
    assert expected["gradients"] == size_of(p.grad for p in trained)
    assert expected["optimizer"] == size_of(state)
    assert cost.count(model) == sum(p.numel() for p in model.parameters())


def test_bytes_of_the_cache_are_exact():
    for model in (small(), tiny_backbone()):
        data = inputs()
        cache, _ = model.prefill(*[data[k] for k in ("text_ids", "text_lengths", "speech_ids", "speech_lengths")], 90)
        assert cost.kv_bytes(model.config, 3, cache.kv.shape[2]) == size_of([cache.kv])


def saved_bytes(model, data) -> int:
    """What autograd keeps for the backward pass: every storage once, parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []  # so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model.train()(**data).loss
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("make", [small, lambda: small(dropout=0.1), lambda: small(num_prediction_heads=1),
                                  lambda: small(hidden_size=128, num_layers=6, head_blocks=4),
                                  lambda: tiny_backbone(head_blocks=2), frozen_model, shared_heads, frozen_trunk])
def test_activations_are_what_the_backward_pass_keeps(make):
    """Within a quarter, from 0.1 to 20 MB; the mask and index tensors are not in the formula."""
    model = make()
    rows, text, speech, prompt = 4, 30, 90, 11
    measured = saved_bytes(model, inputs(rows, text, speech, prompt))
    tokens = cost.Tokens(rows, text + cost.template(model.config), speech, speech - prompt + 1)
    assert cost.activation_bytes(model, tokens) == pytest.approx(measured, rel=0.25)


def test_recomputation_saves_what_the_formula_says():
    model = small(num_layers=8)
    data, tokens = inputs(4, 30, 90), cost.Tokens(4, 30, 90, 80)
    plain = saved_bytes(model, data)
    model.gradient_checkpointing_enable()
    kept = saved_bytes(model, data)
    one_layer = cost.activation_bytes(small(num_layers=2), tokens) - cost.activation_bytes(small(num_layers=1), tokens)
    assert cost.activation_bytes(model, tokens, recompute=True) == pytest.approx(kept + one_layer, rel=0.25)
    assert kept < 0.5 * plain


def test_operations_are_those_that_torch_counts():
    """torch's own counter, forward and backward; with the plain kernel of attention, the one that it can count."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    for model in (small(), small(num_prediction_heads=1), tiny_backbone(), lora_model(), shared_heads()):
        data = inputs(4, 30, 90, 11)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model.train()(**data).loss.backward()
        tokens = cost.Tokens(4, 30 + cost.template(model.config), 90, 80)
        assert cost.training_flops(model, tokens) == pytest.approx(counter.get_total_flops(), rel=0.15)


# --- recipes ------------------------------------------------------------------------------------------------------


ESTIMATED = [f"{r.name}{v and ':'}{v}" for r in shipped() for v in ("", *r.variants)
             if r.name.startswith(("car_", "dcpo_", "compare_"))
             and "backbone" not in (RECIPES / f"{r.name}.yaml").read_text()]  # for these see test_a_backbone_recipe


@pytest.mark.parametrize("recipe", ESTIMATED)
def test_every_recipe_of_training_and_comparison_has_an_estimate(recipe):
    result = estimate([f"--config={recipe}", "utterances=900", "seconds=6"])
    assert result["job"] == ("train" if recipe.startswith("car") else recipe.split("_")[0])
    assert result["gpu_hours"] > 0 and result["bytes_total"] == sum(result["bytes"].values()) > 0


def test_a_method_of_its_own_sampling_costs_what_the_method_costs():
    of = [f"--config={RECIPES / 'compare_starter.yaml'}", "utterances=10", "seconds=5"]
    named, plain = (estimate([*of, f"methods={methods}"]) for methods in ("[car-5@t0.4,far@t0]", "[car-5,far]"))
    assert named["seconds"] == plain["seconds"]


def test_the_papers_decoder_has_the_papers_size():
    """About 151 M in layers, 38 M in heads."""
    result = estimate([f"--config={RECIPES / 'car_paper.yaml'}", "device=rtx4090", "processes=8", "seconds=6",
                       "model.speech_vocab_size=2048"])
    assert 190e6 < result["parameters"] < 200e6 and result["trained"] == result["parameters"]
    assert result["bytes"]["optimizer"] == pytest.approx(8 * result["parameters"], rel=1e-4)
    assert result["fits"]
    more = estimate([f"--config={RECIPES / 'car_paper.yaml'}", "device=rtx4090", "batch_size=64", "seconds=12",
                     "model.speech_vocab_size=2048"])
    assert not more["fits"] and more["seconds_per_step"] > 30 * result["seconds_per_step"]


def test_a_backbone_recipe(tmp_path):
    tiny_backbone(text_prefix=(), text_suffix=()).save_pretrained(tmp_path / "lm")
    write_prepared(tmp_path / "data", train=4, dev=2)
    line = [f"backbone.path={tmp_path / 'lm'}", f"data={tmp_path / 'data'}", "max_steps=10", "device=cpu"]
    lora, joint = (estimate([*line, f"backbone.train={mode}"]) for mode in ("lora", "joint"))
    assert lora["trained"] < joint["trained"] == joint["parameters"]
    assert lora["bytes"]["optimizer"] < joint["bytes"]["optimizer"]
    sharded = estimate([*line, "backbone.train=joint", "processes=4", "sharded=true"])
    assert sharded["bytes"]["optimizer"] * 4 == joint["bytes"]["optimizer"]
    assert sharded["bytes"]["activations"] == joint["bytes"]["activations"]


def test_the_corpus_says_how_much_there_is(tmp_path):
    write_prepared(tmp_path, train=8, dev=2)
    info = json.loads((tmp_path / "prepared.json").read_text())
    info["counts"]["train"] = {"utterances": 400, "seconds": 1200.0}
    (tmp_path / "prepared.json").write_text(json.dumps(info))
    line = [f"--config={RECIPES / 'dcpo_tiny.yaml'}", f"data={tmp_path}", "num_train_epochs=2"]
    few, many = estimate(line), estimate([*line, "max_train_prompts=400"])
    assert few["steps"] == 4 * 2 and many["steps"] == 200 * 2
    assert estimate([*line, "max_train_prompts=400", "processes=2"])["steps"] == 100 * 2


def test_codes_and_rate_are_those_of_the_data(tmp_path):
    write_prepared(tmp_path, train=8, dev=2)
    info = json.loads((tmp_path / "prepared.json").read_text())
    info["tokenizer"] |= {"vocab_size": 1024, "rate_hz": 25.0}
    (tmp_path / "prepared.json").write_text(json.dumps(info))
    line = [f"--config={RECIPES / 'car_paper.yaml'}", "seconds=6"]
    named = estimate([*line, "codes=1024"])
    ours, paper = estimate([*line, f"data={tmp_path}"]), estimate(line)
    model, text = RECIPES / "car_paper.yaml", TEXT_VOCAB_SIZE
    assert "text_vocab_size: 512" in model.read_text()
    assert named["parameters"] - ours["parameters"] == (512 - text) * 1024
    # an embedding of 1024 for every code that is not there, and a row in each of 7 heads
    assert paper["parameters"] - named["parameters"] == 1024 * (1024 + 7 * 1024)
    assert "1024 speech codes" in ours["assumptions"] and any("2048 speech codes, as recipe" in a
                                                              for a in paper["assumptions"])
    assert ours["audio_hours"] == paper["audio_hours"] and ours["flops_per_step"] < paper["flops_per_step"]
    untrained = [f"--config={RECIPES / 'dcpo_paper.yaml'}", "utterances=980", "decoder=nowhere"]
    assert estimate([*untrained, f"data={tmp_path}"])["parameters"] < estimate(untrained)["parameters"]


def test_the_launch_line_of_a_recipe_says_how_many_processes(tmp_path):
    eight, one = (estimate([f"--config={RECIPES / 'car_paper.yaml'}", "seconds=6", *more])
                  for more in ([], ["processes=1"]))
    assert (eight["processes"], one["processes"]) == (8, 1)
    assert eight["hours"] == one["hours"] and eight["gpu_hours"] == 8 * one["gpu_hours"]
    assert eight["audio_hours"] == 8 * one["audio_hours"]
    assert "multi_gpu.yaml" in eight["assumptions"][0] and one["assumptions"][0] == "1 process: given"
    assert processes_of(RECIPES / "car_starter.yaml")[0] == 1 and processes_of("")[0] == 1
    line = "#   accelerate launch --config_file launch/accelerate/multi_gpu.yaml --num_processes 4 -m dcar.train\n"
    (tmp_path / "mine.yaml").write_text(line)
    assert processes_of(tmp_path / "mine.yaml")[0] == 4
    assert processes_of("car_llasa_8b:heads")[1].startswith("launch/accelerate/multi_gpu.yaml")
    assert processes_of("car_llasa_8b")[1].startswith("launch/accelerate/fsdp_8b.yaml")


def test_the_command_prints_a_table_with_what_was_assumed_and_json(capsys):
    main([f"--config={RECIPES / 'dcpo_paper.yaml'}", "utterances=980", "device=a100"])
    assumed = capsys.readouterr().out.partition("assumed:")[2]
    for words in ("1 process", "utilisation 0.35 of a peak of 312 TFLOP/s", "speech codes", "6 s an utterance: assumed",
                  "50 speech tokens", "2.5 tokens a pass", "50 s of speech a second", "paper's size"):
        assert words in assumed
    line = [f"--config={RECIPES / 'car_tiny.yaml'}", "device=cpu", "seconds=5"]
    main(line)
    assert "parameters" in (text := capsys.readouterr().out) and "device-hours for 20 steps" in text
    main([*line, "json=true"])
    assert json.loads(capsys.readouterr().out)["steps"] == 20


def test_wrong_questions_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="device must be one of"):
        split_arguments(["device=tpu", "max_steps=1"])
    with pytest.raises(ConfigError, match="processes must be a whole number ≥ 0"):
        split_arguments(["processes=-1", "max_steps=1"])
    with pytest.raises(ConfigError, match="give a recipe"):
        estimate([])
    with pytest.raises(ConfigError, match="no such file|cannot read"):
        estimate(["--config", str(tmp_path / "nothing.yaml")])
    (tmp_path / "odd.yaml").write_text("colour: red\n")
    with pytest.raises(ConfigError, match="give job=train"):
        job_of(tmp_path / "odd.yaml", [])
    with pytest.raises(ConfigError, match="unknown setting 'max_stepz'"):
        estimate(["max_stepz=1", "model.bos=true"])
    with pytest.raises(ConfigError, match="give utterances"):
        estimate([f"--config={RECIPES / 'dcpo_tiny.yaml'}", "data=nowhere", "max_train_prompts=null"])
