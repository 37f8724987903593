"""Sharded training: two gloo processes against one, saving whole tensors, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny_backbones import row, tiny_backbone
from tiny_decoders import tiny_decoder
from tiny_training import tiny_config

from dcar.errors import ConfigError
from dcar.model.load import load_decoder
from dcar.train.car import run

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["car", "backbone"])
def test_two_sharded_processes_train_as_one(kind, tmp_path):
    """FSDP 2 by layer with recomputation; the gathered checkpoint is that of one process with the mean gradient."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                           str(ROOT / "tests" / "fsdp_process.py"), kind, str(tmp_path)], env=environment,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("refused: scaled_adam") == 2
    model = (tiny_decoder(dropout=0.0) if kind == "car" else tiny_backbone()).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        for i in range(2):
            (model(**row(i)).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = load_decoder(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(sharded[name], value, atol=1e-4), name
    moved = [k for k, v in sharded.items() if not torch.equal(v, before[k])]
    assert len(moved) > 0.8 * len(before)


@pytest.mark.parametrize(("variable", "changes", "message"), [
    ("FSDP", dict(optimizer="scaled_adam"), "would show it pieces of tensors: set optimizer=adamw"),
    ("DEEPSPEED", dict(optimizer="scaled_adam"), "would show it pieces of tensors: set optimizer=adamw"),
    ("FSDP", {}, "FSDP was asked for, but Accelerate does not shard"),
])
def test_what_cannot_be_sharded_is_refused(variable, changes, message, data, tmp_path, monkeypatch):
    """ScaledAdam; and CPUs: Accelerate shards on accelerators alone and would train data-parallel without a word."""
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
        assert raw["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT" and config.fsdp_config
    else:
        assert raw["deepspeed_config"]["zero_stage"] == int(name[-1]) and config.deepspeed_config
