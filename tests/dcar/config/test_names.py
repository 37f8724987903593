"""One vocabulary: decoder, out, sampling. Names of old are understood, with a note; what earlier runs saved loads."""

import logging
from pkgutil import resolve_name

import pytest
import yaml
from trl import TrlParser

from dcar.config import load_config, save_config
from dcar.config.schema import old_names, settings_of
from dcar.sampling import SamplingConfig
from dcar.train.car import TrainConfig
from eval.compare.run import CompareConfig
from rl.config import DCPOConfig, save_settings

OLD = [
    ("dcar.train.car:TrainConfig", "out_dir", "out", "x"),
    ("dcar.train.draft:TrainDraftConfig", "out_dir", "out", "x"),
    ("dcar.train.draft:TrainDraftConfig", "target", "decoder", "x"),
    ("dcar.prepare.settings:PrepareConfig", "out_dir", "out", "x"),
    ("dcar.tokens.fit:FitTokenizerConfig", "output", "out", "x"),
    ("dcar.recognition.train:TrainRecognizerConfig", "output", "out", "x.nemo"),
    ("rl.profile:ProfileConfig", "base", "decoder", "x"),
    ("rl.export:ExportConfig", "base", "decoder", "x"),
    ("rl.config:DCPOConfig", "base", "decoder", "x"),
    ("rl.config:DCPOConfig", "output_dir", "out", "x"),
    ("rl.config:DCPOConfig", "draws", "num_candidates", "4"),
    ("rl.config:DCPOConfig", "policy_coherence", "chunk_scorer", "x"),
    ("rl.config:DCPOConfig", "price_gain", "length_reward_gain", "0.5"),
    ("rl.config:DCPOConfig", "resume", "resume_from_checkpoint", "never"),
    ("rl.export:ExportConfig", "draws", "num_candidates", "4"),
    ("dcar.speak.speak:SpeakConfig", "draws", "num_candidates", "4"),
    ("eval.speed.run:SpeedConfig", "draws", "num_candidates", "4"),
    ("eval.compare.run:CompareConfig", "top_p", "sampling.top_p", "0.5"),
    ("eval.compare.run:CompareConfig", "repetition_mask", "sampling.repetition_mask", "true"),
    ("dcar.speak.speak:SpeakConfig", "output", "out", "x"),
    ("dcar.speak.speak:SpeakConfig", "top-k", "sampling.top_k", "3"),
    ("launch.quickstart:QuickstartConfig", "out_dir", "out", "x"),
]
NEEDED = {"PrepareConfig": ["out=y"], "FitTokenizerConfig": ["out=y"], "SpeakConfig": ["hello"],
          "TrainRecognizerConfig": ["train_manifest=a", "dev_manifest=b", "out=y.nemo", "init_from=a"],
          "DCPOConfig": ["use_cpu=true"], "ProfileConfig": ["decoder=d", "data=d"], "ExportConfig": ["run=r"]}


def value_of(config, key: str):
    for name in settings_of(type(config))[key].path:
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(("name", "old", "new", "text"), OLD)
def test_an_old_name_means_the_new_one_and_is_noted_once(name, old, new, text, caplog, tmp_path):
    schema = resolve_name(name)
    needed = [argument for argument in NEEDED.get(schema.__name__, []) if not argument.startswith(f"{new}=")]
    today = load_config(schema, [*needed, f"{new}={text}"])
    assert not caplog.records
    before = load_config(schema, [*needed, f"--{old}", text])
    assert value_of(before, new) == value_of(today, new)
    old = old.replace("-", "_")
    notes = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert notes == [f"note: {old} is called {new} now (the command line)"]
    recipe = tmp_path / "old.yaml"
    recipe.write_text(f"{old}: {text}\n")
    assert value_of(load_config(schema, [*needed, "--config", str(recipe)]), new) == value_of(today, new)
    assert f"note: {old} is called {new} now ({recipe}:1)" in caplog.text


def test_the_later_of_both_names_counts():
    assert load_config(TrainConfig, ["out=a", "out_dir=b"]).out == "b"
    assert load_config(TrainConfig, ["out_dir=b", "out=a"]).out == "a"


def test_what_an_earlier_run_of_stage_one_saved_loads(tmp_path):
    """config.yaml of version 0.1: every setting, in the order of its time."""
    saved = {"data": "d", "out_dir": "runs/old", "model": {"hidden_size": 64, "num_attention_heads": 2, "bos": True},
             "prompt_tokens": 25, "max_steps": 7, "learning_rate": 0.002, "resume": False, "backbone": {
                 "path": "", "train": "lora", "lora": {"rank": 4, "targets": ["q_proj"]}, "dtype": "float32"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    config = load_config(TrainConfig, ["--config", str(tmp_path / "config.yaml")])
    assert (config.out, config.model.hidden_size, config.backbone.lora.rank) == ("runs/old", 64, 4)
    save_config(config, tmp_path / "again.yaml")
    assert "out_dir" not in (tmp_path / "again.yaml").read_text()
    assert load_config(TrainConfig, [f"--config={tmp_path}/again.yaml"]) == config


def test_what_an_earlier_comparison_saved_loads(tmp_path, caplog):
    saved = {"decoder": "runs/car", "far_decoder": None, "methods": ["far"], "temperature": 0.8, "top_k": 10,
             "max_tokens_per_text_unit": 10.0, "repetition_mask": False, "out": "runs/all"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    config = load_config(CompareConfig, ["--config", str(tmp_path / "config.yaml")])
    assert config.sampling == SamplingConfig(0.8, 10, max_tokens_per_text_unit=10)
    save_config(config, tmp_path / "again.yaml")
    caplog.clear()
    assert load_config(CompareConfig, [f"--config={tmp_path}/again.yaml"]) == config and not caplog.records


def test_dcpo_reads_as_trl_does_and_saves_todays_names(tmp_path):
    """TrlParser still takes the dataclass, by the names of its fields, and reads the same."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"output_dir: {tmp_path}\nnum_generations: 4\nlearning_rate: 1.0e-3\nchunk_range: [2, 3]\n"
                      "scale_rewards: batch\nuse_cpu: true\n")
    ours = load_config(DCPOConfig, ["--config", str(recipe), "--beta", "0.1"])
    (trl,) = TrlParser([DCPOConfig]).parse_args_and_config(["--config", str(recipe), "--beta", "0.1"])
    assert ours.to_dict() == trl.to_dict()
    save_settings(ours, tmp_path / "config.yaml")
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["out"] == str(tmp_path) and "output_dir" not in saved and saved["chunk_range"] == [2, 3]


def test_no_name_of_old_is_a_name_of_today():
    for name in {entry[0] for entry in OLD}:
        schema = resolve_name(name)
        assert not set(old_names(schema)) & set(settings_of(schema))
