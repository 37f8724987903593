"""DCPO end to end in the toy world: rollouts, updates, learning, resuming, processes, bad input."""

import importlib
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from launched import two_processes
from tiny_decoders import tiny_decoder
from tiny_training import log_of
from toy_training import (
    EVERY_STEP,
    TOY,
    Deaf,
    random_policy,
    toy_config,
    toy_parts,
    toy_trainer,
    typed,
)
from toy_world import ToyCTC, ToyRecognizer, ToyVocoder, faster
from transformers import TrainerCallback
from trl import TrlParser

from dcar.config import load_config
from dcar.decoding import FixedChunk, RandomChunk, decode
from dcar.errors import CheckpointError, ConfigError, RewardError, StoppedError, TrainingError
from dcar.text.wer import corpus_wer, word_errors
from dcar.train.checkpoints import latest_checkpoint
from heads.policy import ChunkPolicy, HiddenPolicy, HiddenPolicyConfig
from rl.config import DCPOConfig, save_settings
from rl.data import PromptBatches
from rl.policies import guidance_range, make_policy
from rl.rollout import forced_sizes
from rl.train import main, run
from rl.trainer import DCPOTrainer

QUANTITIES = set(  # logged by every step
    "loss reward reward_std wer frac_reward_zero_std out_of_range action_histogram/1 entropy kl beta "
    "clip_fraction ratio_max reward_forced reward_sampled tokens_per_pass seconds_rollout "
    "seconds_vocoder seconds_recognizer seconds_update failed_rewards truncated duration_ratio grad_norm "
    "rewards/wer/mean rewards/range_penalty/mean".split()
)


def checksum_of(folder: Path) -> str:
    return ChunkPolicy.from_pretrained(folder).checksum()


def test_a_run_begins_with_a_policy_that_is_given(tmp_path):
    """With its weights, the guidance of this run, and for its own decoder only."""
    base = tiny_decoder()
    checksum = base.checksum()
    policy = HiddenPolicy(
        HiddenPolicyConfig(
            base.config.hidden_size,
            4,
            width=16,
            num_attention_heads=2,
            base_checksum=checksum,
            chunk_range=(1, 2),
        )
    )
    torch.nn.init.normal_(policy.output.weight)
    policy.save_pretrained(tmp_path / "policy")
    settings = dict(
        TOY, output_dir=str(tmp_path / "out"), policy=str(tmp_path / "policy"), chunk_range=[2, 3]
    )
    begun = make_policy(DCPOConfig(**settings), base, checksum)
    assert begun.training and begun.config == replace(policy.config, chunk_range=(2, 3))
    assert all(
        torch.equal(a, b) for a, b in zip(begun.parameters(), policy.parameters(), strict=True)
    )
    with pytest.raises(CheckpointError, match="policy .*dcar train-policy"):
        make_policy(DCPOConfig(**settings), base, tiny_decoder(seed=1).checksum())
    for name, value in (("range_prior", 1.0), ("chunk_scorer", "starter")):
        with pytest.raises(ConfigError, match=name):
            make_policy(DCPOConfig(**settings, **{name: value}), base, checksum)


# --- rollouts -------------------------------------------------------------------------------------


def test_forced_half_walks_round_the_range():
    assert forced_sizes(0, 8, [2, 3], "policy_ratio") == [2, 3, 2, 3, 0, 0, 0, 0]
    # odd splits even out over prompts
    assert forced_sizes(1, 6, [2, 3], "policy_ratio") == [3, 2, 3, 0, 0, 0]
    assert forced_sizes(1, 6, [2, 3], "none") == [0] * 6


# --- a recogniser that hears ----------------------------------------------------------------------


@pytest.mark.parametrize("rewards", [["wer"], ["cer"], ["log_likelihood", "range_penalty"]])
def test_a_recogniser_that_does_not_hear_the_recordings_is_refused(tmp_path, rewards):
    def start(**changes):
        return toy_trainer(
            tmp_path, toy_parts(120, 3, recognizer=Deaf()), reward_funcs=rewards, **changes
        )

    with pytest.raises(RewardError) as refused:
        start()
    for way_out in (
        " toy ",
        "max_reward_wer=0.5",
        "recognizer=moonshine",
        "[wer,range_penalty]",
        "nemo:<path>",
        "python -m launch.starter.train_recognizer",
        "reward_funcs=[token_likelihood]",
    ):
        assert way_out in str(refused.value)
    trainer = start(max_reward_wer=1)
    assert trainer.recognizer.heard <= 120
    silent = toy_trainer(
        tmp_path / "b", toy_parts(4, 3, recognizer=Deaf(), reward_funcs=["range_penalty", faster])
    )
    assert silent.recognizer.heard == 0


# --- batches --------------------------------------------------------------------------------------


def test_prompt_batches_cover_every_epoch_and_repeat_windows():
    ranks = [PromptBatches(22, 3, 2, 2, seed=4, rank=r, processes=2) for r in range(2)]
    for epoch in (0, 1):
        for r in ranks:
            r.set_epoch(epoch)
        first, second = ([address for (address,) in r] for r in ranks)
        # two windows of two, each twice
        assert len(first) == len(second) == len(ranks[0]) == 2 * 2 * 2
        assert [a[:2] for a in first] == [(epoch, position) for position in range(8)]
        windows = [a[2] for a in first]
        assert windows == [windows[0]] * 4 + [windows[4]] * 4 and windows[0] != windows[4]
        seen = [i for _, _, window in (*first, *second) for batch in window for i in batch]
        assert set(seen) == set(range(22))
    alone = PromptBatches(22, 6, 2, 2, seed=4)
    alone.set_epoch(1)
    assert [window for ((_, _, window),) in alone] == [
        [one + two for one, two in zip(x[2], y[2], strict=True)]
        for x, y in zip(first, second, strict=True)
    ]
    with pytest.raises(ConfigError, match="22 .*24 .*per_device_train_batch_size"):
        PromptBatches(22, 6, 2, 2, seed=4, processes=2)


ONE_UPDATE = dict(max_steps=1, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dapo"},
        {"scale_rewards": "batch"},
        {"points_per_percent": 1.0, "pass_cost": [1.0, 0.2], "scale_rewards": "batch"},
    ],
    ids=str,
)
def test_an_update_does_not_depend_on_how_its_rollouts_are_divided(tmp_path, changes):
    """Normalisers, the std of the batch and the mean size are those of the whole update; the second
    one, on the same rollouts, has all of them too."""
    policies = []
    for size, accumulation in ((32, 1), (8, 4)):
        trainer = toy_trainer(
            tmp_path / str(size),
            toy_parts(model=random_policy(std=0.2)),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=1.0,
            **{**ONE_UPDATE, "max_steps": 2, "num_iterations": 2, **changes},
        )
        before = trainer.policy.output.weight.clone()
        trainer.train()
        policies.append(trainer.policy)
    for a, b in zip(*(p.parameters() for p in policies), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert (policies[0].output.weight - before).abs().max() > 1e-2


def test_in_bfloat16_the_policies_before_are_read_in_bfloat16_too(tmp_path):
    """Otherwise ratio and KL of the first update differ from 1 and 0 by rounding."""
    settings = dict(ONE_UPDATE, bf16=True, num_iterations=2)
    toy_trainer(tmp_path, toy_parts(model=random_policy()), **settings).train()
    (line,) = log_of(tmp_path, "loss")
    assert line["ratio_max"] == 1 and line["kl"] == 0


# --- learning -------------------------------------------------------------------------------------


def test_dcpo_learns_a_schedule_that_beats_random_chunks(tmp_path):
    """WER far below random-in-range, at more tokens per pass than the perfect CAR-1 by a margin."""
    trainer = toy_trainer(
        tmp_path,
        toy_parts(480, 120, reward_funcs=["wer", faster]),
        num_train_epochs=1,
        per_device_train_batch_size=128,
        num_generations=8,
        forced_rows="none",
    )
    trainer.train()
    metrics = trainer.evaluate()
    items = trainer.eval_dataset.items

    def fixed(rule):
        results = decode(trainer.base, items, rule, trainer.args.sampling, seed=2, batch_size=200)
        heard = ToyRecognizer().transcribe([np.asarray(r.tokens, np.float32) for r in results], 50)
        passes = sum(r.passes for r in results)
        errors = corpus_wer(list(map(word_errors, [i.text for i in items], heard)))
        return errors.wer, sum(len(r.tokens) for r in results) / passes

    (car1_wer, car1_speed), (random_wer, _) = fixed(FixedChunk(1)), fixed(RandomChunk([1, 2]))
    assert car1_wer == 0 and random_wer > 0.2
    assert metrics["eval_wer"] < random_wer / 4
    assert metrics["eval_tokens_per_pass"] > 1.15 * car1_speed
    log = log_of(tmp_path, "loss")
    assert (
        np.mean([line["reward"] for line in log[-5:]])
        > np.mean([line["reward"] for line in log[:5]]) + 0.2
    )
    assert all(p.grad is None for p in trainer.base.parameters())


@pytest.mark.parametrize("switch", ["policy_ratio", "none"])
def test_trainer_does_with_the_forced_half_what_it_is_told(tmp_path, switch):
    """In the first step the ratio is 1, so the advantages of whole groups cancel, forced
    rollouts among them."""
    trainer = toy_trainer(tmp_path, forced_rows=switch, num_train_epochs=1)
    trainer.state.num_train_epochs = 1
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = float(trainer.compute_loss(trainer.model, inputs).detach())
    batch = trainer._rollouts(inputs).batch
    assert (
        batch.forced.tolist()
        == ([False] * 4 if switch == "none" else [True, True, False, False]) * 4
    )
    assert loss == pytest.approx(0, abs=1e-5)


# --- what a run leaves behind ---------------------------------------------------------------------


def test_run_logs_everything_and_writes_the_policy(tmp_path):
    config = load_config(
        DCPOConfig,
        [f"out={tmp_path}", *typed(TOY), "num_iterations=2"],
    )
    directory = run(config, **toy_parts(12, 5))
    lines = log_of(tmp_path)
    updates = [line for line in lines if "loss" in line]
    assert len(updates) == 2 * 3 * 2  # epochs x windows x inner updates
    assert (
        set(updates[0]) >= {*QUANTITIES, "action_histogram/4"}
        and "action_histogram/5" not in updates[0]
    )
    # the second update on the same rollouts
    assert "reward" not in updates[1] and "kl" in updates[1]
    assert updates[0]["ratio_max"] == pytest.approx(1) and updates[1]["ratio_max"] > 1.001
    assert [line["beta"] for line in updates] == [0.0] * 6 + [config.beta] * 6
    assert updates[0]["kl"] == pytest.approx(0, abs=1e-6) and updates[5]["kl"] > 0
    # the reference moves with the epoch, not with every window of two updates
    assert updates[2]["kl"] > 1e-6 and updates[6]["kl"] == pytest.approx(0, abs=1e-6)
    evaluations = [line for line in lines if "eval_wer" in line]
    assert len(evaluations) == 3 and {
        "eval_tokens_per_pass",
        "eval_wer_sampled",
        "eval_action_histogram/2",
    } <= set(evaluations[0])
    source = json.loads((tmp_path / "provenance.json").read_text())
    assert source["processes"] == 1 and source["metrics"]["wer_gt"] == 0
    best = min(evaluations[:2], key=lambda line: line["eval_wer"])
    # the best checkpoint is what is exported
    assert source["metrics"]["eval_wer"] == best["eval_wer"]
    policy = ChunkPolicy.from_pretrained(directory)
    assert (
        policy.config.chunk_range == (1, 2)
        and "guidance range of the training: [1, 2]" in (directory / "README.md").read_text()
    )
    assert policy.checksum() == checksum_of(tmp_path / source["best_checkpoint"])
    assert (
        load_config(DCPOConfig, ["--config", str(tmp_path / "config.yaml")]).to_dict()
        == config.to_dict()
    )


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


RESUMED = dict(
    num_iterations=2,
    gradient_accumulation_steps=2,
    per_device_train_batch_size=8,
    save_strategy="steps",
    save_steps=1,
    eval_strategy="no",
    load_best_model_at_end=False,
    beta=1.0,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> DCPOTrainer:
    """A run that never stopped."""
    trainer = toy_trainer(tmp_path_factory.mktemp("whole"), toy_parts(12), **RESUMED)
    trainer.train()
    return trainer


# inside a window (1, 3, 7), at the end of an epoch (6)
@pytest.mark.parametrize("stop", [1, 3, 6, 7])
def test_resumed_run_equals_one_that_never_stopped(tmp_path, whole, stop):
    """Bit for bit, with two inner updates, two accumulated micro-batches, and a KL to the
    epoch's reference."""
    first = toy_trainer(tmp_path, toy_parts(12, callbacks=[StopAt(stop)]), **RESUMED)
    first.train()
    assert first.state.global_step == stop and first.policy.checksum() != whole.policy.checksum()
    (tmp_path / f"checkpoint-{stop + 9}").mkdir()  # killed while a checkpoint was written
    second = toy_trainer(tmp_path, toy_parts(12), **RESUMED)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 12 and second.policy.checksum() == whole.policy.checksum()

    def figures(trainer):
        return [
            {k: v for k, v in line.items() if not k.startswith(("seconds", "train_"))}
            for line in trainer.state.log_history
            if "loss" in line
        ]

    assert figures(second) == figures(whole)  # rollouts that are made again are not logged again
    assert [line["step"] for line in log_of(tmp_path, "loss")] == list(range(1, 13))


@pytest.mark.parametrize(
    "changed",
    [{"per_device_train_batch_size": 16}, {"gradient_accumulation_steps": 1}],
    ids=str,
)
def test_another_number_of_steps_an_epoch_is_refused(tmp_path, changed):
    """Half of an epoch would be left out, or come twice, and the KL weight would jump."""
    settings = {**RESUMED, "num_train_epochs": 2}
    toy_trainer(tmp_path, toy_parts(12, callbacks=[StopAt(2)]), **settings).train()
    other = toy_trainer(tmp_path, toy_parts(12), **{**settings, **changed})
    with pytest.raises(CheckpointError, match=r"checkpoint-2: 6 steps an epoch then, (4|12) now"):
        other.train(resume_from_checkpoint=True)
    same = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    toy_trainer(tmp_path, toy_parts(12), **{**settings, **same}).train(resume_from_checkpoint=True)


def test_checkpoint_of_another_policy_is_refused(tmp_path, six):
    with pytest.raises(CheckpointError, match="checkpoint-6: .*width=32"):
        toy_trainer(tmp_path, policy_width=16).train(
            resume_from_checkpoint=str(six / "checkpoint-6")
        )
    with pytest.raises(CheckpointError, match="empty: "):
        toy_trainer(tmp_path / "empty").train(resume_from_checkpoint=True)


# --- failures -------------------------------------------------------------------------------------


def test_failed_rewards_are_counted_and_stop_the_run_past_a_threshold(tmp_path):
    def breaks(tokens):
        return len(tokens) > 0 and tokens[-1] % 3 != 2 and len(tokens) % 4 == 0

    trainer = toy_trainer(
        tmp_path / "a",
        {"vocoder": ToyVocoder(breaks)},
        max_failed_rewards=1.0,
        num_train_epochs=1,
        eval_strategy="no",
        load_best_model_at_end=False,
    )
    trainer.train()
    shares = [line["failed_rewards"] for line in log_of(tmp_path / "a", "loss")]
    assert max(shares) > 0
    assert all(p.isfinite().all() for p in trainer.policy.parameters())
    with pytest.raises(
        RewardError, match="max_failed_rewards .*RuntimeError: the toy vocoder broke"
    ):
        toy_trainer(tmp_path / "b", {"vocoder": ToyVocoder(lambda tokens: True)}).train()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (["num_generation=4"], "'num_generation'.*'num_generations'"),
        (["num_generations=2.5"], "num_generations .*2.5"),
        (["epsilon_high=0.3"], "epsilon_high .*DCPO"),
        (["metric_for_best_model=eval_rewards"], "metric_for_best_model .*eval_reward, "),
        (["report_to=[wandbb]"], "report_to: unknown wandbb; .*wandb"),
        (["num_generations=5"], "per_device_train_batch_size .*num_generations 5"),
        (["use_vllm=true"], "use_vllm .*DCPO"),
        (["forced_rows=sometimes"], "forced_rows .*policy_ratio"),
        (["loss_type=cispo"], "loss_type .*grpo"),
        (["chunk_range=[0,2]"], r"chunk_range .*\[0, 2\]"),
        (["speed"], "'speed'"),
        (["--config", "missing.yaml"], "missing.yaml: "),
    ],
)
def test_wrong_settings(tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config(DCPOConfig, [f"out={tmp_path}", "use_cpu=true", *setting])


async def waits(completions, **columns):
    return [0.0] * len(completions)


class Waits:
    async def __call__(self, completions, **columns):
        return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions: [0.0] * len(completions), r"lambda.* has no \*\*columns"),
        (waits, "waits is async"),
        (partial(waits, scale=2), "waits is async"),
        (Waits(), "Waits is async"),
    ],
    ids=["no columns", "async", "partial", "async class"],
)
def test_a_reward_that_cannot_be_called_is_refused_before_anything_is_loaded(
    tmp_path, reward, message
):
    with pytest.raises(ConfigError, match=message):
        DCPOTrainer(None, reward, DCPOConfig(str(tmp_path), use_cpu=True), decoder="no such folder")


def test_the_best_checkpoint_has_the_largest_metric_but_of_word_errors(tmp_path):
    for name, greater in (("eval_wer_sampled", False), ("eval_tokens_per_pass", True)):
        config = DCPOConfig(str(tmp_path), use_cpu=True, metric_for_best_model=name)
        assert config.greater_is_better is greater


def test_what_yaml_takes_for_false_stays_a_word(tmp_path):
    given = [f"out={tmp_path}", "chunk_range=[3,2,4]", "use_cpu=true", "eval_strategy=no"]
    config = load_config(DCPOConfig, given)
    assert config.eval_strategy == "no" and config.chunk_range == [2, 3, 4]
    save_settings(config, tmp_path / "again.yaml")
    again = load_config(DCPOConfig, ["--config", str(tmp_path / "again.yaml")])
    assert again.to_dict() == config.to_dict()


def test_a_recipe_reads_as_trl_reads_it_and_is_saved_with_the_keys_of_this_project(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "num_generations: 4\nlearning_rate: 1.0e-3\nchunk_range: [2, 3]\nscale_rewards: batch\n"
        "use_cpu: true\n"
    )
    ours = load_config(DCPOConfig, ["--config", str(recipe), "--beta", "0.1", f"out={tmp_path}"])
    (trl,) = TrlParser([DCPOConfig]).parse_args_and_config(
        ["--config", str(recipe), "--beta", "0.1", "--output_dir", str(tmp_path)]
    )
    assert ours.to_dict() == trl.to_dict()
    save_settings(ours, tmp_path / "config.yaml")
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (
        saved["out"] == str(tmp_path)
        and "output_dir" not in saved
        and saved["chunk_range"] == [2, 3]
    )


def test_wrong_combinations_name_the_way_out(tmp_path):
    for changes, message in [
        ({"chunk_range": []}, "chunk_range .*`guidance`"),
        ({"chunk_range": [2, 9]}, "chunk_range .*9"),
        ({"reward_weights": [1.0]}, "1 reward_weights .*2"),
        ({"reward_funcs": ["mos"]}, "reward_funcs: .*'mos'"),
        ({"policy_heads": 5}, "policy_width, policy_heads"),
        (
            {"reward_funcs": ["log_likelihood"]},
            r"log_likelihood: .*reward_funcs=\[wer,range_penalty\]",
        ),
        ({"range_prior": 2.0, "chunk_range": [], "forced_rows": "none"}, "range_prior"),
        ({"range_prior": 2.0, "policy": "some"}, "range_prior"),
    ]:
        with pytest.raises(ConfigError, match=message):
            toy_trainer(tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"policy_sizes=\[2, 3\] .*all sizes"):
        toy_trainer(tmp_path, {"model": random_policy()}, policy_sizes=[2, 3])
    with pytest.raises(ConfigError, match="^decoder "):
        main([f"out={tmp_path}", "use_cpu=true"])


def test_guidance_profile_gives_the_range_and_must_fit_the_decoder(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"range": [3, 2], "base_checksum": ""}))
    settings = {"chunk_range": [], "guidance": str(profile)}
    assert toy_trainer(tmp_path, **settings).args.chunk_range == [2, 3]
    with pytest.raises(CheckpointError, match="profile.json .*`dcar profile`"):
        guidance_range(toy_config(tmp_path, **settings), "another")


@pytest.mark.parametrize("content", [None, b"{}", b"[]", b'{"range": ["a"]}', b"{", b"caf\xe9"])
def test_what_is_no_guidance_profile_is_refused(tmp_path, content):
    profile = tmp_path / "profile.json"
    if content is not None:
        profile.write_bytes(content)
    with pytest.raises(ConfigError, match=f"guidance {profile}: .*`dcar profile`"):
        guidance_range(toy_config(tmp_path, chunk_range=[], guidance=str(profile)), "")


def test_range_prior_is_where_a_new_policy_starts(tmp_path):
    trainer = toy_trainer(tmp_path, chunk_range=[2, 3], range_prior=1.5)
    probability = trainer.policy(torch.randn(1, 5, trainer.policy.config.hidden_size)).softmax(-1)[
        0
    ]
    expected = torch.tensor([0, 1.5, 1.5, 0]).softmax(-1)
    assert torch.allclose(probability, expected.expand(5, 4))
    free = toy_trainer(tmp_path / "free", chunk_range=[2, 3])
    assert not free.policy.output.bias.any()


# --- the entry point, with files and processes ----------------------------------------------------


def test_two_processes_learn_what_one_learns(tmp_path):
    """Twice half the rollouts of a step: the same prompts, draws and mean, so the same policy up
    to rounding. Conjugate gradients make so much of it that on some processors the second step
    draws otherwise, so theirs is the first: its weights differ by up to 2 %, and by 300 % if every
    process takes the curvature of its own rollouts."""
    optimizers = {
        "adam": (
            {
                "gradient_accumulation_steps": 2,
                "loss_type": "dapo",
                "scale_rewards": "batch",
                "points_per_percent": 0.5,
                "pass_cost": [1.0, 0.2],
            },
            1e-4,
            1e-4,
        ),
        "natural": (
            {
                "optim": "natural",
                "learning_rate": 0.1,
                "max_steps": 1,
                "credit": "decision",
                "reward_funcs": ["log_likelihood", "range_penalty"],
            },
            0.1,
            2e-3,
        ),
    }
    runs = []
    for name, (optimizer, _, _) in optimizers.items():
        settings = {**TOY, "num_train_epochs": 1, "num_iterations": 2, **optimizer}
        runs.append([*typed(settings), f"out={tmp_path / name}"])
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom rl.train import main\nfrom toy_training import toy_parts\n"
        "from toy_world import ToyCTC\nmain(sys.argv[1:], **toy_parts(recognizer=ToyCTC()))\n"
    )
    for arguments, (name, (_, of_weights, of_logs)) in zip(runs, optimizers.items(), strict=True):
        # A process joins one group only: at the same port, a second one can meet what is left of
        # the first, and wait for ever.
        two_processes(
            program, *arguments[:-1], f"{arguments[-1]}_two", "per_device_train_batch_size=8"
        )
        main(arguments, **toy_parts(recognizer=ToyCTC()))
        folders = [tmp_path / f"{name}_two", tmp_path / name]
        two, one = (json.loads((folder / "provenance.json").read_text()) for folder in folders)
        assert (two["processes"], one["processes"]) == (2, 1) and two["steps"] == one["steps"]
        first, second = (
            ChunkPolicy.from_pretrained(folder / "policy").state_dict() for folder in folders
        )
        for weight, value in first.items():
            most = of_weights * float(value.norm())
            assert float((value - second[weight]).norm()) <= most, (name, weight)
        for a, b in zip(*map(log_of, folders), strict=True):
            for key in "wer reward eval_wer kl entropy tokens_per_pass failed_rewards".split():
                # a policy that differs by 2 % may draw other sizes
                if key in a and (name, key) != ("natural", "eval_wer"):
                    assert a[key] == pytest.approx(b[key], abs=of_logs), (name, key)


# --- what a run of days meets ---------------------------------------------------------------------


def trained(out: Path, parts: dict | None = None, **changes) -> Path:
    """The folder of the policy after a run that saves and evaluates at every step, six steps
    unless told otherwise."""
    return run(toy_config(out, **{**EVERY_STEP, **changes}), **toy_parts(12, 5, **(parts or {})))


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Path:
    """Where a run of six steps has left everything."""
    return trained(tmp_path_factory.mktemp("six")).parent


@pytest.mark.parametrize(
    "changes", [{"max_steps": 4}, {"max_steps": 4, "load_best_model_at_end": False}, {}], ids=str
)
def test_a_finished_run_repeated_trains_no_step(tmp_path, changes):
    """Three updates an epoch: four of them end within one, which Trainer would go on with."""
    directory = trained(tmp_path, **changes)
    steps = changes.get("max_steps", 6)
    checksum, log = checksum_of(directory), log_of(tmp_path)
    trained(tmp_path, **changes)
    source = json.loads((tmp_path / "provenance.json").read_text())
    assert source["steps"] == steps and latest_checkpoint(tmp_path).name == f"checkpoint-{steps}"
    assert checksum_of(directory) == checksum
    *before, evaluation = log_of(tmp_path)  # the policy that is exported is evaluated again
    assert before == log and {**evaluation, "eval_seconds": 0} == {**log[-1], "eval_seconds": 0}


def test_a_policy_that_is_not_finite_speaks_no_rollouts_and_is_not_exported(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.config.check", lambda config: None)  # such settings are refused by now
    with pytest.raises(TrainingError, match="step 1: .*weights .*input_norm.weight"):
        trained(tmp_path, learning_rate=float("inf"), save_steps=2)
    assert latest_checkpoint(tmp_path) is None and not (tmp_path / "policy").exists()


class Poison(TrainerCallback):
    """Breaks a gradient of the policy at a step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            dict(model.named_parameters())["output.weight"].grad[0, 0] = float("nan")


def test_a_broken_update_names_step_tensor_and_prompts(tmp_path):
    with pytest.raises(TrainingError, match="step 2: .*gradient .*output.weight.* 4 prompts"):
        trained(tmp_path, {"callbacks": [Poison()]})
    assert not (tmp_path / "policy").exists()


def test_dcpo_goes_on_from_the_next_older_checkpoint(tmp_path, six, caplog):
    shutil.copytree(six, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-6" / "dcpo.safetensors").write_bytes(b"cut")
    (tmp_path / "checkpoint-5" / "rng_state.pth").unlink()
    directory = trained(tmp_path)
    assert "checkpoint-6 is passed over: dcpo.safetensors " in caplog.text
    assert "checkpoint-5 is passed over: rng_state.pth " in caplog.text
    assert checksum_of(directory) == checksum_of(six / "policy")
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
    with pytest.raises(
        CheckpointError, match="resume_from_checkpoint: .*checkpoint-3 .*optimizer.pt"
    ):
        trained(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_changed_settings_are_those_of_a_resumed_run_or_refused(tmp_path, six):
    shutil.copytree(six, tmp_path, dirs_exist_ok=True)
    saved = (tmp_path / "config.yaml").read_text()
    for changes, why in (
        ({"optim": "natural", "learning_rate": 0.1}, "optim='adamw_torch_fused' .here 'natural'"),
        ({"max_steps": 4}, "checkpoint-6: .*max_steps to 6"),
        ({"epsilon": 0.1}, "epsilon=0.2 .here 0.1."),
        ({"reward_funcs": ["wer"]}, r"reward_funcs=\['wer', 'range_penalty'\]"),
        ({"adam_beta1": 0.5}, "adam_b"),
        ({"learning_rate": 1e-4}, "learning_rate=0.003 .here 0.0001.*max_steps"),
    ):
        with pytest.raises(CheckpointError, match=why):
            trained(tmp_path, **changes)
    assert (tmp_path / "config.yaml").read_text() == saved
    trained(tmp_path, max_steps=7, learning_rate=2e-4)
    assert log_of(tmp_path, "loss")[-1]["learning_rate"] == 2e-4
    assert json.loads((tmp_path / "provenance.json").read_text())["resumed"] == [
        {"step": 6, "changed": {"max_steps": [-1, 7], "learning_rate": [3e-3, 2e-4]}}
    ]
    assert "learning_rate: 0.0002" in (tmp_path / "config.yaml").read_text()


def test_an_edited_reward_is_another_run(tmp_path, monkeypatch):
    """Half of a policy trained by one reward and half by another would be neither's."""
    monkeypatch.syspath_prepend(tmp_path)
    text = "def mine(completions, **columns):\n    return [{} * len(c) for c in completions]\n"
    for factor, name in ((1, "first"), (2, "edited")):
        (tmp_path / "own_reward.py").write_text(text.format(factor))
        sys.modules.pop("own_reward", None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        if name == "first":
            trained(tmp_path / "run", max_steps=1, reward_funcs=["own_reward.mine"])
    with pytest.raises(CheckpointError, match=r"reward_funcs=\['own_reward.mine@\w{8}'\] .here"):
        trained(tmp_path / "run", max_steps=2, reward_funcs=["own_reward.mine"])


class Fails(ToyRecognizer):
    """At some of its calls it does something else first."""

    def __init__(self, at: range, what):
        self.calls, self.at, self.what = 0, at, what

    def transcribe(self, waves, sample_rate):
        self.calls += 1
        if self.calls in self.at:
            self.what()
        return super().transcribe(waves, sample_rate)


def test_a_signal_in_a_dcpo_step_saves_and_leaves(tmp_path, six):
    stopped = tmp_path / "stopped"
    # in the rollouts of some step
    signals = Fails(range(6, 7), lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError, match="SIGTERM: .*checkpoint-2") as caught:
        trained(stopped, {"recognizer": signals}, save_steps=4)
    assert caught.value.status == 75 and latest_checkpoint(stopped) is not None
    assert trained(stopped, save_steps=4).is_dir()
    assert [line["step"] for line in log_of(stopped, "loss")] == [1, 2, 3, 4, 5, 6]
    assert checksum_of(stopped / "checkpoint-6") == checksum_of(six / "checkpoint-6")


def test_recordings_of_another_vocoder_are_transcribed_anew(tmp_path):
    """The recordings are resynthesised: their errors are also the vocoder's."""
    other = ToyVocoder()
    other.tokenizer = "@another"
    first, second, again = (
        toy_trainer(tmp_path, {"vocoder": vocoder}).ground_truth.fingerprint
        for vocoder in (ToyVocoder(), other, ToyVocoder())
    )
    assert first == again != second
