"""Sharded training: what is refused, and the files that launch it; test_sharded.py trains by
them."""

from pathlib import Path

import pytest
import yaml
from tiny_training import tiny_config

from dcar.errors import ConfigError
from dcar.train.car import run

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("variable", "changes", "message"),
    [
        ("FSDP", dict(optim="scaled_adam"), "scaled_adam .*optim=adamw_torch_fused"),
        ("DEEPSPEED", dict(optim="scaled_adam"), "scaled_adam .*optim=adamw_torch_fused"),
        ("FSDP", {}, "FSDP .*ACCELERATE_USE_CPU"),
    ],
)
def test_what_cannot_be_sharded_is_refused(variable, changes, message, data, tmp_path, monkeypatch):
    """ScaledAdam; and CPUs: Accelerate shards on accelerators alone and would train
    data-parallel without a word."""
    monkeypatch.setenv(f"ACCELERATE_USE_{variable}", "true")
    with pytest.raises(ConfigError, match=message):
        run(tiny_config(data, tmp_path, **changes))


@pytest.mark.parametrize("name", ["fsdp", "fsdp_8b", "deepspeed_zero2", "deepspeed_zero3"])
def test_launch_files_are_what_accelerate_reads(name):
    from accelerate.commands.config.config_args import ClusterConfig

    path = ROOT / "launch" / "accelerate" / f"{name}.yaml"
    config = ClusterConfig.from_yaml_file(str(path))
    raw = yaml.safe_load(path.read_text())
    if name.startswith("fsdp"):
        import transformers.models.llama.modeling_llama as llama

        import heads.layers

        layer = raw["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"]
        assert hasattr(llama if name == "fsdp_8b" else heads.layers, layer)
        assert (
            raw["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT" and config.fsdp_config
        )
    else:
        assert raw["deepspeed_config"]["zero_stage"] == int(name[-1]) and config.deepspeed_config
