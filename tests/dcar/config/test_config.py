"""The strict schema of entry points."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dcar.config import load_config, save_config
from dcar.errors import ConfigError
from dcar.prepare.run import PrepareConfig
from dcar.train.car import TrainConfig


@dataclass
class Inner:
    width: int = 4


@dataclass
class Outer:
    """A schema."""

    name: str
    rate: float = 0.5
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    inner: Inner = field(default_factory=Inner)
    limit: int | None = None


def test_yaml_then_overrides_then_back(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: a\ninner: {width: 8}\nrate: 0.25\n")
    config = load_config(Outer, ["--config", str(recipe), "sizes=[3]", "inner.width=16"])
    assert config == Outer("a", 0.25, [3], Inner(16), None)
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(Outer, [f"--config={tmp_path}/resolved.yaml"]) == config


@pytest.mark.parametrize("arguments, message", [
    (["nam=b", "name=a"], "unknown setting 'nam'; did you mean 'name'?"),
    (["name=a", "inner.widht=3"], "did you mean 'inner.width'?"),
    (["name=a", "rate=fast"], "rate|Float|float"),
    (["rate=1"], "name is not set: give name=…"),
    (["name=a", "--config", "missing.yaml"], "no such file"),
    (["name"], "write options as key=value"),
])
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?") if "|" not in message else message):
        load_config(Outer, arguments)


def test_broken_yaml_names_the_file(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: [a\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(Outer, ["--config", str(recipe)])
    recipe.write_text("- a\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(Outer, ["--config", str(recipe)])


def test_help_lists_the_keys(capsys):
    with pytest.raises(SystemExit):
        load_config(Outer, ["--help"])
    assert "inner.width=4" in capsys.readouterr().out


def test_real_schemas_load_and_refuse_impossible_values():
    assert load_config(PrepareConfig, ["out=x", "speeds=[0.9,1.0]"]).speeds == (0.9, 1.0)
    assert load_config(TrainConfig, ["model.num_prediction_heads=1"]).head_weights == [1.0]
    declining = load_config(TrainConfig, ["head_weight_decay=0.5", "model.num_prediction_heads=3"])
    assert declining.head_weights == [1, 0.5, 0.25]
    with pytest.raises(ConfigError, match="optimizer must be"):
        load_config(TrainConfig, ["optimizer=sgd"])
    with pytest.raises(ConfigError):
        load_config(PrepareConfig, ["out=x", "speeds=[0.9,0.9]"])
