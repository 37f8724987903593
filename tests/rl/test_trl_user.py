"""What a user of TRL finds: arguments of `GRPOTrainer`, reward functions of one's own, trackers
of transformers."""

import dataclasses
import inspect

import numpy as np
import pytest
import toy_world
from tiny_training import log_of
from toy_training import Listener
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from dcar.errors import ConfigError, DataError
from dcar.model.load import load_decoder
from rl.config import DCPOConfig
from rl.data import load_dataset
from rl.trainer import DCPOTrainer

SMALL = dict(
    use_cpu=True,
    disable_tqdm=True,
    seed=1,
    per_device_train_batch_size=8,
    num_generations=4,
    max_steps=2,
    chunk_range=[2, 3],
    policy_width=16,
    policy_heads=2,
    max_completion_length=20,
    prompt_tokens=5,
    eval_strategy="no",
    save_strategy="no",
    learning_rate=0.01,
)


def trainer_of(files, rewards, **more) -> DCPOTrainer:
    args = DCPOConfig(
        str(files / "run"),
        decoder=str(files / "base"),
        data=str(files / "data"),
        vocoder=str(files / "vocoder"),
        **{**SMALL, **more},
    )
    return DCPOTrainer(reward_funcs=rewards, args=args, recognizer=Listener())


def test_a_reward_of_ones_own_trains(files):
    """A function, one by its dotted path and a built-in one side by side, with a column of the
    data set."""
    seen = []

    def loud(completions, audio, emotion, transcripts, trainer_state, **columns):
        seen.append((emotion, transcripts, columns["sample_rate"], trainer_state.global_step))
        return [None if wave is None else float(len(wave) % 7) for wave in audio]

    decoder = load_decoder(str(files / "base"))
    dataset = load_dataset(str(files / "data"), decoder, prompt_tokens=5)
    dataset = dataset.add_column("emotion", ["calm"] * len(dataset))
    args = DCPOConfig(str(files / "run"), reward_weights=[1.0, 0.5, 2.0], **SMALL)
    parts = dict(
        decoder=decoder, vocoder=trainer_of(files, "range_penalty").vocoder, recognizer=Listener()
    )
    trainer = DCPOTrainer(
        reward_funcs=[loud, "toy_world.faster", "range_penalty"],
        args=args,
        train_dataset=dataset,
        **parts,
    )
    before, frozen = trainer.policy.checksum(), decoder.checksum()
    trainer.train()
    assert trainer.policy.checksum() != before and decoder.checksum() == frozen
    first = log_of(files / "run", "loss")[0]
    parts_of_reward = [
        first[f"rewards/{name}/mean"] for name in ("loud", "faster", "range_penalty")
    ]
    assert (
        first["reward"] == pytest.approx(np.dot(parts_of_reward, [1.0, 0.5, 2.0]))
        and first["failed_rewards"] == 0
    )
    assert {s for *_, s in seen} == {0, 1} and all(
        e == "calm" for emotions, *_ in seen for e in emotions
    )
    assert {t for _, heard, *_ in seen for t in heard} <= {"a red house", "a red mouse"}
    assert args.reward_funcs == ["wer", "range_penalty"]  # the caller's stay
    named = trainer.args.reward_funcs
    assert named[1:] == ["toy_world.faster", "range_penalty"] and named[0].endswith("loud")
    trainer.save_model(str(files / "policy"))
    args = DCPOConfig(str(files / "more"), **SMALL)
    again = DCPOTrainer(str(files / "policy"), toy_world.faster, args, dataset, **parts)
    assert again.policy.checksum() == trainer.policy.checksum()
    with pytest.raises(DataError, match="column text"):
        DCPOTrainer(None, toy_world.faster, args, dataset.remove_columns("text"), **parts)
    with pytest.raises(ConfigError, match="^data "):
        args = DCPOConfig(
            str(files / "x"), **{**SMALL, "eval_strategy": "epoch", "save_strategy": "epoch"}
        )
        DCPOTrainer(None, toy_world.faster, args, dataset, **parts)


def test_the_data_set_gives_the_prompts_of_the_command(files):
    trainer = trainer_of(files, "range_penalty")
    dataset = load_dataset(str(files / "data"), trainer.base, prompt_tokens=5, seed=1)
    other = DCPOTrainer(
        None,
        "range_penalty",
        trainer.args,
        dataset,
        decoder=trainer.base,
        vocoder=trainer.vocoder,
        recognizer=Listener(),
    )
    for a, b in zip(trainer.train_dataset.items, other.train_dataset.items, strict=True):
        ours, theirs = dict(vars(a)), dict(vars(b))
        assert (
            np.array_equal(ours.pop("speaker_embedding"), theirs.pop("speaker_embedding"))
            and ours == theirs
        )


def test_names_are_those_of_trl():
    ours, theirs = (
        list(inspect.signature(t.__init__).parameters) for t in (DCPOTrainer, GRPOTrainer)
    )
    shared = ["self", "model", "reward_funcs", "args", "train_dataset", "eval_dataset"]
    assert ours[:6] == theirs[:6] == shared and "callbacks" in ours
    grpo, own, base = (
        {f.name for f in dataclasses.fields(t)} for t in (GRPOConfig, DCPOConfig, TrainingArguments)
    )
    settings = own - base - DCPOConfig.REFUSED
    assert len(settings) <= 46 and settings & grpo >= {
        "num_generations",
        "beta",
        "epsilon",
        "loss_type",
    }


def test_optimisers_are_those_of_transformers(files):
    trainer = trainer_of(files, "range_penalty", optim="adafactor")
    trainer.train()
    assert type(trainer.optimizer.optimizer).__name__ == "Adafactor"
    with pytest.raises(ConfigError, match="weight_decay"):
        DCPOConfig(str(files / "run"), optim="natural", weight_decay=0.1)
    with pytest.raises(ConfigError, match="sgdd"):
        DCPOConfig(str(files / "run"), optim="sgdd")
