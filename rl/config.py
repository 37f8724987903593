"""Settings of stage two: `DCPOConfig` speaks TRL's language (`num_generations`, `beta`, `epsilon`, …), and a strict
parser reads it from YAML and overrides."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import TrainingArguments
from trl import GRPOConfig, TrlParser

from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from dcar.storage import write_text
from rl.objective import FORCED_ROWS, LOSS_TYPES, SCALES
from rl.rollout import DECODING

T = TypeVar("T")

# Settings of GRPOConfig that mean the same here. All others of its own (not of TrainingArguments) must stay at their
# defaults: a setting that is ignored would be a lie.
GRPO_SETTINGS = {
    "num_generations", "num_generations_eval", "max_completion_length", "temperature", "top_p", "top_k", "beta",
    "num_iterations", "epsilon", "epsilon_high", "delta", "reward_weights", "scale_rewards", "loss_type",
    "shuffle_dataset",
}

UNUSED = [f for f in dataclasses.fields(GRPOConfig)
          if f.name not in GRPO_SETTINGS | {g.name for g in dataclasses.fields(TrainingArguments)}]
# filled in by GRPOConfig and TrainingArguments from other settings
DERIVED = {f.name for f in UNUSED} | {"accelerator_config", "fsdp_config"}


def setting(default: Any, text: str) -> Any:
    metadata = {"help": text.replace("%", "%%")}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DCPOConfig(GRPOConfig):
    """Settings of DCPO. As in TRL, `per_device_train_batch_size` counts rollouts: prompts x num_generations."""

    output_dir: str = setting("runs/dcpo", "Where everything is written.")

    # --- defaults that differ from TRL's ---
    per_device_train_batch_size: int = setting(32, "Rollouts of a process per step, whole groups of num_generations.")
    learning_rate: float = setting(1e-4, "Learning rate of Adam.")
    lr_scheduler_type: str = setting("constant", "Schedule of the learning rate.")
    num_train_epochs: float = setting(3, "Passes over the prompts; KL weight and reference follow them.")
    num_generations: int = setting(8, "Rollouts of a prompt: a group.")
    num_generations_eval: int | None = setting(1, "Unused by evaluation, which speaks every prompt once.")
    max_completion_length: int = setting(1500, "Most speech tokens of a rollout.")
    beta: float = setting(0.04, "Largest KL weight; it grows linearly from 0 in the first epoch.")
    loss_type: str = setting("grpo", f"How decisions are averaged: {', '.join(LOSS_TYPES)}.")
    bf16: bool = setting(False, "bfloat16 autocast of the update; off, the policy is tiny.")
    gradient_checkpointing: bool = setting(False, "Recompute activations; off, the policy is tiny.")
    per_device_eval_batch_size: int = setting(32, "Utterances spoken at once in evaluation.")
    logging_steps: float = setting(1, "Steps between two lines of the log.")
    logging_nan_inf_filter: bool = setting(False, "Hide losses that are not finite; off.")
    eval_strategy: str = setting("epoch", "When the dev prompts are spoken.")
    save_strategy: str = setting("epoch", "When a checkpoint is written.")
    load_best_model_at_end: bool = setting(True, "Keep and export the best checkpoint instead of the last.")
    metric_for_best_model: str | None = setting("eval_wer", "What the best checkpoint has: eval_wer, eval_reward, …")
    greater_is_better: bool | None = setting(None, "Direction of that metric; found by its name.")
    save_total_limit: int | None = setting(2, "Checkpoints kept (the best one besides).")
    remove_unused_columns: bool = setting(False, "Unused: batches are prompts.")

    # --- what is trained on what ---
    base: str = setting("", "Directory of the frozen decoder (stage one); starter = the shipped one.")
    data: str = setting("", "Folder written by `dcar prepare`.")
    train_split: str = setting("train", "Split of the training prompts.")
    eval_split: str = setting("dev", "Split of the evaluation prompts; 'none' for no evaluation.")
    max_train_prompts: int | None = setting(None, "Use the first so many prompts of the shuffled split.")
    max_eval_prompts: int | None = setting(100, "Use the first so many evaluation prompts of the shuffled split.")
    min_seconds: float = setting(0.0, "Leave out shorter recordings (the paper: 6).")
    prompt_tokens: int = setting(50, "Length of the speech prompt (speaker-prompt layout).")
    vocoder: str = setting("starter", "Vocoder directory, or 'starter' for the one that ships with the project.")
    recognizer: str = setting("starter", "Reward recogniser, by a name that dcar.recognition.load lists.")
    resume: str = setting("auto", "auto (go on from the last complete checkpoint), never, or a checkpoint directory.")

    # --- policy ---
    policy: str = setting("", "Start from this policy directory (starter = the shipped one), not uniform.")
    policy_width: int | None = setting(256, "Width of the policy's layer; null = the decoder's, the paper's.")
    policy_heads: int = setting(8, "Attention heads of the policy's layer.")
    policy_ffn_size: int | None = setting(None, "Feed-forward size of the policy; null = 4 x width.")
    range_prior: float = setting(0.0, "Logits by which a new policy favours the guidance range; 0 = uniform, the "
                                      "paper's. For runs too short to find the range by themselves.")

    # --- rollouts ---
    chunk_range: list[int] = setting([], "Guidance range, for example [2, 3]; empty = from `guidance`.")
    guidance: str = setting("", "JSON written by `dcar profile`, from which the range is taken.")
    forced_rows: str = setting("policy_ratio", f"What the forced half does: {', '.join(FORCED_ROWS)}.")
    forced_weight: float = setting(1.0, "Weight of forced rollouts in the loss.")
    common_random_numbers: bool = setting(False, "Members of a group share the draws of tokens (not of actions).")
    min_tokens: int = setting(1, "No end of speech before so many tokens.")
    max_tokens_per_text_unit: float = setting(16.0, "Length limit of a rollout per phoneme.")
    repetition_window: int = setting(0, "Repetition-aware sampling over so many tokens (CosyVoice: 10); 0 = off.")
    repetition_share: float = setting(0.1, "Share of the window at which a token counts as repeated.")
    repetition_mask: bool = setting(False, "A repeated token cannot be drawn again.")
    reward_microbatches: int = setting(2, "Parts of a step; one is scored while the next is rolled out.")
    overlap: bool = setting(True, "Score in a worker thread while the next part is rolled out.")
    hidden_dtype: str = setting("float32", "Storage of the rollouts' hidden states: float32 or float16.")
    decoding: str = setting("auto", "What speaks the rollouts: engine, loop (the reference), or auto, the engine where "
                                    "it serves the base; the same rollouts either way. "
                                    "loop also takes the base as it is in evaluations.")

    # --- reward ---
    reward_funcs: list[str] = setting(["wer", "range_penalty", "speed_bonus"],
                                      "Rewards that are added (with reward_weights): wer, cer, "
                                      "log_likelihood, range_penalty, speed_bonus.")
    alpha: float = setting(0.1, "Weight of the out-of-range penalty.")
    penalty: str = setting("distance", "distance, indicator or none.")
    penalty_normalizer: str = setting("tokens", "Penalties are divided by the rollout's tokens or decisions.")
    wer_cap: float = setting(1.0, "A rollout's WER (or CER) counts at most this much.")
    speed_bonus: float = setting(0.0, "Weight of 1 - decisions / tokens; 0 as in the paper.")
    likelihood_scale: float = setting(0.1, "Weight of one nat per character in the log_likelihood reward.")
    reward_attempts: int = setting(3, "How often the recogniser is asked when it fails, with longer and longer breaks.")
    reward_timeout: float = setting(600.0, "Seconds after which a batch that the recogniser has not answered failed.")
    max_failed_rewards: float = setting(0.2, "Stop when a larger share of a step's rewards could not be computed.")
    reference_policy: str = setting("epoch", "KL against the policy at the start of the epoch, or of the run (init).")

    def __post_init__(self):
        self.scale_rewards = {True: "group", False: "none", "True": "group", "False": "none"}.get(
            self.scale_rewards, self.scale_rewards)
        for name, allowed in (
            ("forced_rows", FORCED_ROWS), ("loss_type", LOSS_TYPES), ("scale_rewards", SCALES),
            ("penalty", ("distance", "indicator", "none")), ("penalty_normalizer", ("tokens", "decisions")),
            ("reference_policy", ("epoch", "init")), ("hidden_dtype", ("float32", "float16")),
            ("decoding", DECODING),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}; not '{getattr(self, name)}'")
        for f in UNUSED:
            if getattr(self, f.name) != f.default:
                raise ConfigError(f"{f.name} is a setting of TRL's GRPO that DCPO has no use for; remove it")
        if self.num_generations < 2:
            raise ConfigError("num_generations must be at least 2: advantages compare the members of a group")
        if self.per_device_train_batch_size % self.num_generations:
            raise ConfigError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} counts rollouts; it must be a "
                f"multiple of num_generations {self.num_generations}: a group never spans two steps or processes")
        if self.reward_attempts < 1 or not self.reward_timeout > 0:
            raise ConfigError("reward_attempts must be at least 1, reward_timeout (seconds) positive")
        if self.num_iterations < 1 or self.reward_microbatches < 1 or self.prompt_tokens < 1:
            raise ConfigError("num_iterations, reward_microbatches and prompt_tokens must be at least 1")
        if self.eval_split == "none":
            self.eval_strategy, self.load_best_model_at_end = "no", False
        self.chunk_range = sorted(set(self.chunk_range))
        if self.chunk_range and self.chunk_range[0] < 1:
            raise ConfigError(f"chunk_range {self.chunk_range}: chunk sizes start at 1")
        if self.greater_is_better is None:
            self.greater_is_better = "reward" in (self.metric_for_best_model or "")
        try:
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one process per step."""
        return self.per_device_train_batch_size // self.num_generations

    @property
    def window(self) -> int:
        """Micro-batches made with the same rollout policy: accumulation x inner iterations."""
        return self.gradient_accumulation_steps * self.num_iterations

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(self.temperature, self.top_k or 0, self.top_p, self.min_tokens,
                              self.max_completion_length, self.max_tokens_per_text_unit, self.repetition_window,
                              self.repetition_share, self.repetition_mask)


class StrictParser(TrlParser):
    """TRL's parser, whose complaints are ConfigErrors."""

    def error(self, message: str):  # type: ignore[override]
        raise ConfigError(message)


def parse(schema: type[T], arguments: Sequence[str]) -> T:
    """Build a config from `[--config FILE.yaml] [key=value | --key=value | --key value …]`; the last word counts.

    ConfigError for an unreadable file, an unknown key (naming the nearest one), or a wrong type.
    """
    parser = StrictParser([schema])  # type: ignore[list-item]
    known = [f.name for f in dataclasses.fields(schema) if f.init]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    rest = list(arguments)
    if "-h" in rest or "--help" in rest:
        parser.print_help()
        raise SystemExit(0)
    while rest:
        argument = rest.pop(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            if not argument.startswith("--") or not rest:
                raise ConfigError(f"'{argument}': write options as key=value, or --config FILE.yaml")
            text = rest.pop(0)
        if key == "config":
            values.update(read_yaml(Path(text)))
        else:
            values[key] = yaml.safe_load(text)
    command: list[str] = []
    empty: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            raise ConfigError(f"unknown setting '{key}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        if value is None or value == [] or value == "":
            empty[key] = value
        elif isinstance(value, list):
            command += [f"--{key}", *map(str, value)]
        else:
            command.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    parser.set_defaults_with_config(**empty)
    return parser.parse_args_into_dataclasses(args=command)[0]


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror}); recipes are in launch/recipes/") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({error})") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of settings, one `key: value` a line")
    return loaded


def save_settings(config: DCPOConfig, path: Path) -> None:
    """Write every setting that is not at its default, so that `--config` of the file repeats the run."""
    changed = {}
    for f in dataclasses.fields(config):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        value = getattr(config, f.name)
        if f.init and value != default and f.name not in DERIVED:
            changed[f.name] = getattr(value, "value", value)  # an enumeration by its value
    plain = json.loads(json.dumps({**changed, "output_dir": config.output_dir}, default=str))
    write_text(path, yaml.safe_dump(plain, sort_keys=True))
