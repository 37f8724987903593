"""The quickstart's commands fit their schemas and each other; every recipe fits its schema."""

import dataclasses
import re
from pathlib import Path

import pytest
from test_docs import config_of

from dcar.cli import RECIPES as COMMAND_OF
from dcar.cli import kind_of, resolve
from dcar.config import load_config
from dcar.config.recipes import shipped
from dcar.methods import read_methods
from dcar.methods.entries import named_folder
from dcar.model.car import CARDecoder
from dcar.prepare.prepared import prepared_info
from dcar.sources.shipped import ASSETS
from dcar.train.car import data_identity
from dcar.train.checkpoints import config_differences
from launch import quickstart
from launch.quickstart import QuickstartConfig, pipeline
from rl.config import DCPOConfig

ROOT = Path(__file__).parents[2]
NAMES = [f"{r.name}{v and ':'}{v}" for r in shipped() for v in ("", *r.variants)]


def schema(recipe: str) -> type:
    """What a recipe's command takes its settings from."""
    _, module, _ = resolve(COMMAND_OF[kind_of(recipe)].split())
    return config_of(module)


def settings(schema: type, *arguments: str):
    return load_config(schema, [*arguments, *(["use_cpu=true"] if schema is DCPOConfig else [])])


def read(recipe: str, *overrides: str):
    return settings(schema(recipe), "--config", recipe, *overrides)


@pytest.mark.parametrize("recipe", NAMES)
def test_recipes_fit_their_schema(recipe):
    assert isinstance(read(recipe), schema(recipe))


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize(("processes", "start"), [(1, "scratch"), (2, "recordings")])
def test_the_pipeline_s_commands_are_valid_and_feed_each_other(
    tmp_path, monkeypatch, processes, start, paper
):
    def shipped(name: str) -> Path:
        (folder := tmp_path / "assets" / name).mkdir(parents=True, exist_ok=True)
        return folder

    monkeypatch.setattr(quickstart, "shipped", shipped)
    out = tmp_path / "q"
    groups = pipeline(
        QuickstartConfig(str(out), start, paper, train_steps=7, seed=3, processes=processes)
    )
    scratch = start == "scratch"
    assert [[job.name for job in group] for group in groups] == [
        ["texts"],
        ["car", "far"],
        ["dcpo"],
        ["policy", "verifiers"],
        *([["profile"], ["dcpo_paper"], ["policy_paper"]] if paper else []),
        ["compare"],
    ]
    outputs: list[Path] = []
    for group in groups:
        for job in group:
            _, module, arguments = resolve(job.arguments)
            config = settings(config_of(module), *arguments)
            if job.command[1] == "train":
                assert config.max_steps == 7
                assert config.data == str(shipped("prepared"))
                kind = "decoder" if job.name == "car" else "far"
                assert config.init_from == ("" if scratch else str(shipped(f"{kind}-undistilled")))
            if job.name == "compare":
                assert (config.seeds, config.prompt_seeds) == ([6, 7], [3])
                specs = [s for s in read_methods(config.methods) if s.method == "dcar"]
                named = [s.settings.get("policy", "") for s in specs]
                assert named == [named_folder(policy)[0] for policy in config.policies]
                assert all("num_candidates" not in s.settings for s in specs)
                assert len(config.policies) == len(config.training_logs) == 1 + paper
            elif job.name not in ("verifiers", "policy", "policy_paper"):
                assert config.seed == 3, job.name
            if job.name == "dcpo":
                assert (config.chunk_scorer, config.num_candidates) == ("", 1)
                assert config.data == str(out / "texts")
            read = re.findall(f"{out}/(\\w+)", " ".join(w for w in arguments if "out=" not in w))
            declared = [
                path.relative_to(out).parts[0] for path in job.inputs if out in path.parents
            ]
            logs = {"dcpo", "dcpo_paper"} if paper else {"dcpo"}
            assert set(read) == set(declared) | (logs if job.name == "compare" else set())
            for path in job.inputs:  # is there, or an earlier job writes it
                assert path.exists() or any(o == path or path in o.parents for o in outputs), path
        outputs += [job.output for job in group]
    assert out / "report.html" in outputs
    assert [j.processes for group in groups for j in group if j.processes > 1] == (
        [2] * (2 + 2 * paper) if processes == 2 else []
    )


def test_stage_one_goes_on_from_the_shipped_decoders_as_they_are():
    """The recipes describe the shipped decoders exactly, or `init_from` would refuse them."""
    info = prepared_info(ASSETS / "starter_prepared")
    for name, recipe in (
        ("decoder", "car_starter:shared"),
        ("far", "car_starter:far"),
        ("decoder", "finetune_starter"),
        ("far", "finetune_far_starter"),
    ):
        if not (ASSETS / name).exists():
            pytest.skip(f"no {name} is shipped yet")
        wanted = dataclasses.replace(read(recipe).model, **data_identity(info))
        assert config_differences(CARDecoder.load_config(ASSETS / name), wanted) == ""
