"""Stage two in the toy world, in seconds."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_decoders import policy_of
from toy_world import FEATURES, ToyDecoder, ToyRecognizer, ToyVocoder, toy_items

from dcar.sampling import SamplingConfig
from heads.policy import ChunkPolicy
from rl.config import DCPOConfig
from rl.rollout import RolloutBatch
from rl.trainer import DCPOTrainer, log_probs_of

TOY = dict(
    use_cpu=True,
    disable_tqdm=True,
    seed=1,
    per_device_train_batch_size=16,
    num_generations=4,
    num_train_epochs=2,
    chunk_range=[1, 2],
    learning_rate=3e-3,
    policy_width=32,
    policy_heads=2,
    max_completion_length=300,
    save_total_limit=None,
)


def typed(settings: dict) -> list[str]:
    """Return settings as they are typed in a terminal."""
    names = {"max_completion_length": "max_tokens"}
    return [f"{names.get(k, k)}={json.dumps(v)}" for k, v in settings.items()]


EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
NEVER = {"save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False}


def rollout_settings(**changes: Any) -> SimpleNamespace:
    """Return the settings of `DCPOConfig` that rollouts use."""
    settings = dict(
        num_generations=4,
        chunk_range=[2, 3],
        forced_rows="policy_ratio",
        common_random_numbers=False,
        num_candidates=1,
        sampling=SamplingConfig(),
    )
    return SimpleNamespace(**{**settings, **changes})


def toy_parts(train: int = 24, dev: int = 9, **changes: Any) -> dict[str, Any]:
    """Return the objects that `rl.train.run` and `DCPOTrainer` would load."""
    return {
        "decoder": ToyDecoder(),
        "vocoder": ToyVocoder(),
        "recognizer": ToyRecognizer(),
        "train_dataset": toy_items(train),
        "eval_dataset": toy_items(dev, 5, "dev"),
        **changes,
    }


def toy_config(out: Path, **changes: Any) -> DCPOConfig:
    return DCPOConfig(output_dir=str(out), **{**TOY, **changes})


def toy_trainer(out: Path, parts: dict[str, Any] | None = None, **changes: Any) -> DCPOTrainer:
    """Return a trainer. parts: replace those of `toy_parts`, or other arguments of the trainer;
    changes: settings. The rollouts of a step are made in one part: the same rollouts in half the
    passes."""
    trainer = DCPOTrainer(args=toy_config(out, **changes), **{**toy_parts(), **(parts or {})})
    trainer.roller.parts = 1
    return trainer


def check_said(policy: ChunkPolicy, batch: RolloutBatch) -> torch.Tensor:
    """Check that the distributions [B, S, A] recomputed from the records are those that the
    actions were drawn from, and return them."""
    probs = log_probs_of(policy, batch)
    for row, record in enumerate(batch.records):
        recorded = record.result.log_probs
        taken = probs[row].gather(-1, batch.actions[row, :, None])[: len(recorded), 0]
        assert taken.tolist() == pytest.approx(recorded, abs=1e-4)
    return probs


def random_policy(
    features: int = FEATURES, seed: int = 0, width: int | None = 16, std: float = 2.0
) -> ChunkPolicy:
    return policy_of(width, seed, features=features, std=std)


class Deaf(ToyRecognizer):
    """Recogniser that returns one word for any wave and counts the waves."""

    heard = 0

    def transcribe(self, waves, sample_rate):
        self.heard += len(waves)
        return ["red"] * len(waves)

    def log_likelihood(self, waves, sample_rate, texts):
        return [-1.0] * len(waves)


class Listener:
    """Recogniser that is wrong about waves of an even number of tokens, so that rewards differ."""

    name = "listener"

    def transcribe(self, waves, sample_rate):
        return ["a red house" if len(w) % 960 else "a red mouse" for w in waves]
