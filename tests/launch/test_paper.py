"""The paper's recipe: its commands fit their schemas and each other, and a rehearsal from
recordings to the report with tiny models of the real formats."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launched import environment
from test_docs import config_of
from test_quickstart import ROOT, read, settings
from tiny_corpora import write_libritts, write_starter_as_libritts
from tiny_nemo import save_transducer
from tiny_pretrained import save_hubert, save_whisper

from dcar.cli import resolve
from dcar.errors import ConfigError, DataError
from eval.results.types import read_result
from launch import paper
from launch.paper import PaperConfig, of_stages, pipeline
from launch.pipeline import Job

NAMES = (
    "tokenizer prepared testset far car pack vocoder profile dcpo_2_3 policy_2_3 "
    "dcpo_2_3_4 policy_2_3_4 compare"
).split()


def module_of(stage: Job) -> tuple[str, list[str]]:
    """Module of a stage and the arguments of its `main`."""
    if stage.command[0] == "dcar":
        return resolve(stage.arguments)[1:]
    return stage.module, stage.arguments


# --- the commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "testset_b"), [(1, ""), (3, "/lists/testsetB_utt2prompt"), (8, "")]
)
def test_stages_are_valid_commands_and_read_what_earlier_ones_write(processes, testset_b):
    config = PaperConfig(data="/data/Libri TTS", out="/runs/paper", testset_b=testset_b)
    stages = pipeline(config, {}, processes)
    assert [stage.name for stage in stages] == NAMES
    written: list[str] = []
    for stage in stages:
        module, arguments = module_of(stage)
        config = settings(config_of(module), *arguments)
        assert str(stage.output).startswith("/runs/paper/")
        paths = {
            part
            for word in arguments
            for part in word.replace('"', "=").split("=")
            if part.startswith("/runs/paper/") and part != str(stage.output)
        }
        assert all(any(p == w or p.startswith(f"{w}/") for w in written) for p in paths)
        log_of_training = {"/runs/paper/dcpo_2_3/log.jsonl"} if stage.name == "compare" else set()
        assert set(map(str, stage.inputs)) == paths - log_of_training, stage.name
        if module == "dcar.train.car":
            assert config.gradient_accumulation_steps == 1
            assert 0.9 < config.per_device_train_batch_tokens * processes / paper.UPDATE_TOKENS <= 1
        if module == "rl.train":
            assert config.prompts_per_step * stage.processes == paper.GROUPS
        written.append(str(stage.output))
    assert {stage.processes for stage in stages} == {
        1,
        processes,
        min(2 if processes == 3 else 4, processes),
    }


def test_models_and_rollouts_are_those_of_the_recipes():
    config = PaperConfig(data="data", out="out")
    compare, policy = read("compare_paper"), read("dcpo_paper")
    assert config.encoder == read("tokenizer_hubert").encoder
    assert config.reward_recognizer == policy.recognizer == read("profile_paper").recognizer
    assert (config.recognizer, f"utmos:{config.utmos}") == (compare.recognizer, compare.scorers[1])
    stages = {stage.name: stage for stage in pipeline(config, {}, 1)}
    for name, recipe in (("dcpo_2_3", policy), ("dcpo_2_3_4", read("dcpo_paper:2-3-4"))):
        assert (
            f"per_device_train_batch_size={recipe.per_device_train_batch_size}"
            in stages[name].command
        )


def test_settings_of_stages_are_told_from_those_of_the_recipe():
    own, overrides = of_stages(
        ["data=a.b", "car.model.hidden_size=8", "out=car.x", "car.seed=1", "cra.seed=1"]
    )
    assert own == ["data=a.b", "out=car.x"]
    assert overrides == {"car": ["model.hidden_size=8", "seed=1"], "cra": ["seed=1"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("pack.hour=1", "pack.hour: .*pack --help"),
        ("car.max_step=4", "car.max_step: .*dcar train --help"),
        ("device=cuda", "device=cuda"),
        ("cra.max_steps=4", "cra.max_steps"),
    ],
)
def test_what_no_stage_understands_is_refused_before_the_first_one(
    given, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(paper, "run_pipeline", lambda *_: pytest.fail("a stage ran"))
    with pytest.raises(ConfigError, match=message):
        paper.main(["data=data", f"out={tmp_path}", "device=cpu", given])


@pytest.mark.parametrize(
    ("subsets", "given", "message"),
    [
        (["train-clean-100", "dev-clean"], [], "test-clean"),
        (["train-clean-100", "test-clean"], [], "split dev"),
        (["train-clean-100", "dev-clean"], ["testset_b=nothing"], "nothing"),
    ],
)
def test_a_corpus_that_lacks_a_part_is_refused_before_the_first_stage(
    subsets, given, message, tmp_path, monkeypatch
):
    data = write_libritts(tmp_path / "LibriTTS", dict.fromkeys(subsets, 1))
    monkeypatch.setattr(paper, "run_pipeline", lambda *_: pytest.fail("a stage ran"))
    with pytest.raises(DataError, match=message):
        paper.main([f"data={data}", f"out={tmp_path / 'out'}", "device=cpu", *given])


def test_the_script_takes_folders_from_where_it_is_called(tmp_path):
    """With an environment whose Python shows its arguments."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    stamp = subprocess.run(
        [
            "bash",
            "-c",
            "cat pyproject.toml launch/constraints.txt launch/requirements-models.txt | sha256sum | "
            "cut -c1-16",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (venv / ".dcar-installed-all").write_text(stamp)
    (venv / "bin" / "activate").write_text(f"PATH={venv}/bin:$PATH\n")
    (venv / "bin" / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    done = subprocess.run(
        [ROOT / "launch" / "paper.sh", "my data", "out", "device=cpu", "a.b=[1, 2]"],
        cwd=tmp_path,
        env={**os.environ, "DCAR_VENV": str(venv), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "-m",
        "launch.paper",
        f"data={tmp_path}/my data",
        f"out={tmp_path}/out",
        "device=cpu",
        "a.b=[1, 2]",
    ]


# --- a rehearsal ----------------------------------------------------------------------------------

STEPS = (
    "bf16=false logging_steps=1 dataloader_num_workers=0 save_steps=10 eval_steps=40 "
    "max_steps=40 per_device_train_batch_tokens=2000"
).split()
DECODER = (
    "model.hidden_size=32 model.num_layers=1 model.num_attention_heads=2 "
    "model.ffn_size=32 model.head_blocks=1"
).split()
POLICY = (
    "min_seconds=0 limit=4 eval_limit=2 num_train_epochs=1 policy_heads=2 max_tokens=20"
).split()
TINY = {
    "tokenizer": ["vocab_size=32", "max_frames=4000", "sample_hours=0.02"],
    "prepared": ["filter_seconds=[1,20]", "num_proc=1"],
    "testset": ["filter_seconds=[1,20]", "num_proc=1"],
    "far": [*STEPS, *DECODER],
    "car": [*STEPS, *DECODER],
    "vocoder": [
        "bf16=false",
        "max_steps=2",
        "eval_steps=1",
        "per_device_train_batch_size=2",
        "renderer_batch_size=2",
        "model={vocab_size: 32, mel_bands: 40, condition_size: 16, acoustic_size: 16, "
        "acoustic_ffn_size: 16, acoustic_dilations: [1], renderer_size: 16, renderer_ffn_size: 16, "
        "renderer_dilations: [1]}",
    ],
    "profile": ["limit=3", "max_tokens=20"],
    "dcpo_2_3": POLICY,
    "dcpo_2_3_4": POLICY,
    "compare": (
        "limit=2 max_tokens=20 scorers=[] timing_utterances=1 audio_utterances=1 resamples=100"
    ).split(),
}
NOISE = [f"{name}.max_reward_wer=100" for name in ("profile", "dcpo_2_3", "dcpo_2_3_4")]
"""The recogniser and the vocoder are random, so the reward is noise, which profile and DCPO
refuse."""


def command(folder: Path, *more: str) -> list[str]:
    """The recipe as a process, on LibriTTS and models in `folder`."""
    tiny = [f"{name}.{word}" for name, words in TINY.items() for word in words]
    return [
        sys.executable,
        "-m",
        "launch.paper",
        f"data={folder / 'LibriTTS'}",
        f"out={folder / 'out'}",
        "device=cpu",
        f"encoder=hubert:{folder / 'hubert'}",
        f"reward_recognizer=nemo:{folder / 'reward.nemo'}",
        f"recognizer=whisper:{folder / 'whisper'}",
        *tiny,
        *more,
    ]


@pytest.mark.slow
@pytest.mark.needs("nemo")
def test_the_recipe_from_recordings_to_the_report_killed_refused_and_continued(tmp_path):
    """The shipped recordings as LibriTTS, a HuBERT and a Whisper of transformers, a transducer
    of NeMo."""
    write_starter_as_libritts(tmp_path / "LibriTTS", {"train": 24, "dev": 8, "test": 6})
    save_hubert(tmp_path / "hubert")
    save_whisper(tmp_path / "whisper")
    save_transducer(tmp_path / "reward.nemo")
    out, log = tmp_path / "out", tmp_path / "out" / "car" / "log.jsonl"

    def finished() -> list[str]:
        return sorted(p.stem for p in (out / "jobs").glob("*.json") if "finished" in p.read_text())

    def attempt(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command(tmp_path, *more),
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    process = subprocess.Popen(
        command(tmp_path),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) > 4):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 75 and "stopped in job car" in said, said[-3000:]
    assert finished() == ["far", "prepared", "testset", "tokenizer"]

    said = attempt().stdout
    assert "resumed" in log.read_text() and said.count(": finished 20") == 4
    assert "max_reward_wer" in said and "job profile failed with status 1" in said, said[-3000:]
    assert finished() == ["car", "far", "pack", "prepared", "testset", "tokenizer", "vocoder"]

    done = attempt(*NOISE)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count(": finished 20") == 7 and finished() == sorted(NAMES)
    methods = [row.method for row in read_result(out / "compare").first.rows]
    assert {"far", "car-1", "car-7", "dcar@2-3", "dcar@2-3-4"} <= set(methods)
    assert (out / "compare" / "report.html").stat().st_size > 10_000

    done = attempt(*NOISE)
    assert done.returncode == 0 and done.stdout.count(": finished 20") == len(NAMES)

    # any finished stage may be run once more by hand and leaves what is there
    weights = (out / "car" / "model.safetensors").read_bytes()
    record = json.loads((out / "jobs" / "car.json").read_text())
    subprocess.run(
        shlex.split(
            f"{sys.executable} -m dcar.cli {shlex.join(record['command'][1:])} "
            "per_device_train_batch_tokens=2000"
        ),
        env=environment(),
        cwd=ROOT,
        check=True,
    )
    assert (out / "car" / "model.safetensors").read_bytes() == weights
