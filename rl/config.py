"""Settings of stage two: `DCPOConfig` uses the names of TRL's settings (`num_generations`,
`beta`, `epsilon`, …). A strict parser reads it from YAML and overrides."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import TrainingArguments
from trl import GRPOConfig

from dcar.config import check, setting
from dcar.config.load import plain
from dcar.config.read import dump_yaml
from dcar.config.resume import settings_stamp
from dcar.config.schema import seed_setting, settings_of
from dcar.errors import ConfigError
from dcar.model.precision import dtype_setting
from dcar.sampling import SamplingConfig
from dcar.storage import write_text
from rl.objective import LOSS_TYPES, SCALES

# Settings of GRPOConfig that have the same meaning here. Its other settings (those not of
# TrainingArguments) must stay at their defaults, because they would have no effect.
GRPO_SETTINGS = {
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "beta",
    "num_iterations",
    "epsilon",
    "reward_weights",
    "scale_rewards",
    "loss_type",
}
NOT_OURS = {
    f.name: f.default
    for f in dataclasses.fields(GRPOConfig)
    if f.name not in GRPO_SETTINGS | {g.name for g in dataclasses.fields(TrainingArguments)}
}
NOT_OURS["num_generations_eval"] = 1  # evaluations decode every prompt once
# filled in by GRPOConfig and TrainingArguments from other settings
DERIVED = set(NOT_OURS) | {"accelerator_config", "fsdp_config"}


@dataclass
class DCPOConfig(GRPOConfig):
    """Settings of DCPO. As in TRL, `per_device_train_batch_size` counts rollouts: prompts x
    num_generations."""

    UNUSED: ClassVar[frozenset[str]] = frozenset(NOT_OURS)  # not listed by --help

    output_dir: str = setting("runs/dcpo", "Folder to write.", name="out", place="folder")

    # --- defaults that differ from TRL's, and bounds that TRL does not check ---
    per_device_train_batch_size: int = setting(
        32, "Rollouts per step and process; a multiple of num_generations.", minimum=1
    )
    gradient_accumulation_steps: int = setting(
        1, "Micro-batches whose gradients are added up for one update.", minimum=1
    )
    optimizer: str = setting(
        "adam",
        "adam, or natural: the natural policy gradient, whose every update moves the distribution "
        "of chunk sizes by learning_rate² / 2 nats; for policies with few weights.",
        choices=("adam", "natural"),
    )
    learning_rate: float = setting(
        1e-4, "Learning rate of Adam, or step length of the natural gradient.", above=0
    )
    weight_decay: float = setting(
        0.0, "Decoupled weight decay (AdamW); without effect on optimizer=natural.", minimum=0
    )
    max_grad_norm: float = setting(
        1.0, "Norm to which gradients are clipped; 0 = no clipping.", minimum=0
    )
    lr_scheduler_type: str = setting("constant", "Schedule of the learning rate.")
    warmup_steps: float = setting(
        0,
        "Steps in which the learning rate rises; a value below 1 is a share of all steps.",
        minimum=0,
    )
    num_train_epochs: float = setting(
        3,
        "Passes over the prompts. The KL weight grows and the reference policy is replaced per "
        "epoch.",
        above=0,
    )
    max_steps: int = setting(
        -1, "Number of updates; overrides num_train_epochs. -1 = use num_train_epochs.", minimum=-1
    )
    num_generations: int = setting(8, "Rollouts of each prompt, which form a group.", minimum=2)
    num_generations_eval: int | None = setting(
        1, "Unused: evaluations decode every prompt once.", minimum=1
    )
    max_completion_length: int = setting(
        1500, "Largest number of speech tokens in a rollout.", minimum=1
    )
    temperature: float = setting(
        1.0, "Sampling temperature of tokens; below 1, likely tokens become likelier.", minimum=0
    )
    top_k: int = setting(0, "Number of the likeliest tokens to draw from; 0 = all.", minimum=0)
    top_p: float = setting(
        1.0,
        "Total probability of the likeliest tokens that can be drawn; 1 = all.",
        above=0,
        maximum=1,
    )
    beta: float = setting(
        0.04, "KL weight of the last epoch; it grows linearly from 0 in the first epoch.", minimum=0
    )
    epsilon: float = setting(
        0.2, "Distance below and above 1 at which probability ratios are clipped.", minimum=0
    )
    num_iterations: int = setting(1, "Updates on the same rollouts.", minimum=1)
    scale_rewards: str = setting(
        "group",
        f"Rewards whose standard deviation divides the advantages: {', '.join(SCALES)}.",
    )
    loss_type: str = setting(
        "grpo", "Way in which the loss is averaged over decisions.", choices=LOSS_TYPES
    )
    bf16: bool = setting(
        False, "bfloat16 autocast during updates; off by default because the policy is small."
    )
    gradient_checkpointing: bool | None = setting(  # type: ignore[assignment]  # TRL warns of False
        None, "Recompute activations in the backward pass; null = off, because the policy is small."
    )
    per_device_eval_batch_size: int = setting(
        32, "Utterances decoded together during evaluation.", minimum=1
    )
    logging_steps: float = setting(1, "Steps between two lines of the log.", above=0)
    logging_nan_inf_filter: bool = setting(
        False, "Hide losses that are not finite; off by default."
    )
    eval_strategy: str = setting(
        "epoch", "Schedule of evaluations on the dev split: epoch, steps, or no."
    )
    eval_steps: float | None = setting(
        None, "Steps between evaluations, with eval_strategy=steps.", above=0
    )
    save_strategy: str = setting("epoch", "Schedule of checkpoints: epoch, steps, or no.")
    save_steps: float = setting(
        500, "Steps between checkpoints, with save_strategy=steps.", above=0
    )
    load_best_model_at_end: bool = setting(
        True, "Keep and export the best checkpoint instead of the last one."
    )
    metric_for_best_model: str | None = setting(
        "eval_wer", "Metric by which the best checkpoint is chosen: eval_wer, eval_reward, …"
    )
    greater_is_better: bool | None = setting(
        None, "True if a larger metric is better; null = inferred from the metric's name."
    )
    save_total_limit: int | None = setting(
        2, "Number of checkpoints kept, in addition to the best one.", minimum=1
    )
    remove_unused_columns: bool = setting(False, "Unused: batches consist of prompts.")
    dataloader_num_workers: int = setting(0, "Processes that load prompts.", minimum=0)
    seed: int = seed_setting(
        42, "Random seed for the policy's initialisation, data order and rollouts."
    )
    resume_from_checkpoint: str | None = setting(
        "auto", "auto (resume from the last complete checkpoint), never, or a checkpoint directory."
    )

    # --- decoder, data and models ---
    decoder: str = setting(
        "", "Directory of the frozen decoder (stage one); starter = the shipped decoder."
    )
    dtype: str = dtype_setting()
    data: str = setting("", "Folder written by `dcar prepare`.", place="folder")
    max_train_prompts: int | None = setting(
        None, "Number of training prompts, taken from the shuffled split; null = all.", minimum=1
    )
    max_eval_prompts: int | None = setting(
        100, "Number of evaluation prompts, taken from the shuffled split; null = all.", minimum=1
    )
    min_seconds: float = setting(
        0.0, "Shortest recording used, in seconds (the paper: 6).", minimum=0
    )
    prompt_tokens: int = setting(
        50, "Length of the speech prompt in tokens (speaker-prompt layout).", minimum=1
    )
    vocoder: str = setting("starter", "Vocoder directory; starter = the shipped vocoder.")
    recognizer: str = setting(
        "starter", "Recogniser of the rewards; one of the names listed in dcar.recognition.load."
    )
    token_recognizer: str = setting(
        "starter",
        "Token recogniser of the reward token_likelihood: a folder written by `dcar "
        "train-recognizer`; starter = the shipped one.",
    )

    # --- policy ---
    policy: str = setting(
        "", "Policy directory to start from instead of a new policy; starter = the shipped policy."
    )
    policy_reads: str = setting(
        "hidden",
        "Input of a new policy: hidden (the decoder's hidden states, before the draw; the "
        "paper's), or candidates (the tokens that the heads drew).",
        choices=("hidden", "candidates"),
    )
    policy_sizes: list[int] = setting(
        [], "Chunk sizes that a new policy chooses among; empty = all.", minimum=1
    )
    chunk_scorer: str = setting(
        "",
        "Folder written by `dcar train-chunk-scorer`: a new policy includes this chunk scorer, "
        "which scores how well the tokens of a candidate fit together; starter = the shipped one, "
        "empty = none.",
    )
    policy_width: int | None = setting(
        256, "Width of the policy's layer; null = the decoder's width (the paper's).", minimum=1
    )
    policy_heads: int = setting(8, "Attention heads of the policy's layer.", minimum=1)
    range_prior: float = setting(
        0.0,
        "Logits by which a new policy favours the guidance range; 0 = uniform (the paper's). For "
        "runs that are too short to find the range by themselves.",
    )

    # --- rollouts ---
    chunk_range: list[int] = setting(
        [], "Guidance range, for example [2, 3]; empty = the range in `guidance`.", minimum=1
    )
    guidance: str = setting(
        "", "JSON file written by `dcar profile` that contains the guidance range.", place="file"
    )
    forced_rows: str = setting(
        "policy_ratio",
        "policy_ratio: half of the rollouts are forced to sizes of the guidance range (the "
        "paper's); none: all are sampled.",
        choices=("policy_ratio", "none"),
    )
    num_candidates: int = setting(
        1,
        "Candidates drawn side by side at every decision. The policy chooses candidate and size "
        "together; more than 1 needs a chunk scorer.",
        minimum=1,
    )
    common_random_numbers: bool = setting(
        False,
        "Use the same random numbers for the tokens (not the actions) of all rollouts of a group.",
    )
    max_tokens_per_text_unit: float = setting(
        16.0, "Length limit of a rollout, in tokens per phoneme.", above=0
    )
    repetition_window: int = setting(
        0,
        "Number of tokens covered by repetition-aware sampling (CosyVoice: 10); 0 = off.",
        minimum=0,
    )
    hidden_dtype: str = setting(
        "float32",
        "Data type in which the rollouts' hidden states are stored.",
        choices=("float32", "float16"),
    )

    # --- reward ---
    reward_funcs: list[str] = setting(
        ["wer", "range_penalty"],
        "Rewards, added with reward_weights: wer, cer, log_likelihood, token_likelihood, "
        "range_penalty, or the dotted path of a function such as my_package.rewards.mine.",
    )
    reward_weights: list[float] | None = setting(
        None, "Weights of reward_funcs; null = 1 for each."
    )
    alpha: float = setting(0.1, "Weight of the out-of-range penalty.", minimum=0)
    tokens_per_pass: float = setting(
        0.0,
        "Tokens per pass that rollouts should reach: a reward for longer or shorter chunks is "
        "adjusted until they do; 0 = no such reward.",
        minimum=0,
    )
    length_reward_gain: float = setting(
        1.0,
        "Gain of the tokens_per_pass controller: deviations of the advantage per deviation of "
        "chunk size, for each token per pass below the target. About 0.1 with optimizer=natural.",
        above=0,
    )
    credit: str = setting(
        "utterance",
        "Unit that receives an advantage: utterance (the paper's), or decision (each decision "
        "separately, by wer, log_likelihood or token_likelihood).",
        choices=("utterance", "decision"),
    )
    credit_window: int = setting(
        25,
        "Tokens of the recording after a decision for which it is responsible, with "
        "credit=decision.",
        minimum=1,
    )
    reward_timeout: float = setting(
        600.0,
        "Seconds after which a batch that the recogniser has not answered counts as failed.",
        above=0,
    )
    max_reward_wer: float = setting(
        0.5,
        "Largest word error rate of the recogniser on resynthesised recordings; one with more "
        "errors is refused.",
        minimum=0,
    )
    max_failed_rewards: float = setting(
        0.2,
        "Largest share of a step's rewards that may fail; the run stops above it.",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self):
        # TRL also takes true and false
        self.scale_rewards = {"true": "group", "false": "none"}.get(
            str(self.scale_rewards).lower(), self.scale_rewards
        )
        if self.scale_rewards not in SCALES:
            raise ConfigError(
                f"scale_rewards must be one of {', '.join(SCALES)}, not '{self.scale_rewards}'"
            )
        for name in ("eval_strategy", "save_strategy"):
            if str(getattr(self, name)).lower() == "false":
                setattr(self, name, "no")
        check(self)
        for name, default in NOT_OURS.items():
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name} is a setting of TRL's GRPO that has no effect in DCPO; remove it"
                )
        if self.max_steps == 0:
            raise ConfigError(
                "max_steps=0 trains nothing: set at least 1, or -1 to use num_train_epochs"
            )
        if self.per_device_train_batch_size % self.num_generations:
            raise ConfigError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} counts rollouts "
                f"and must be a multiple of num_generations {self.num_generations}, because a "
                "group never spans two steps or processes"
            )
        if self.eval_strategy == "no":
            self.load_best_model_at_end = False  # no metric to choose it by
        self.chunk_range = sorted(set(self.chunk_range))
        self.policy_sizes = sorted(set(self.policy_sizes))
        if self.greater_is_better is None:
            self.greater_is_better = "reward" in (self.metric_for_best_model or "")
        try:
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def prompts_per_step(self) -> int:
        """Number of prompts per step and process."""
        return self.per_device_train_batch_size // self.num_generations

    @property
    def window(self) -> int:
        """Number of micro-batches made with the same rollout policy: accumulation x inner
        iterations."""
        return self.gradient_accumulation_steps * self.num_iterations

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(
            self.temperature,
            self.top_k or 0,
            self.top_p,
            max_tokens=self.max_completion_length,
            max_tokens_per_text_unit=self.max_tokens_per_text_unit,
            repetition_window=self.repetition_window,
        )


def required(args: DCPOConfig, name: str) -> str:
    """Return a setting that is needed because the object that it loads was not given. Raises
    ConfigError if it is empty."""
    if not (value := getattr(args, name)):
        raise ConfigError(f"{name} is not set: give {name}=… (see the recipes in launch/recipes/)")
    return value


def save_settings(config: DCPOConfig, path: Path) -> None:
    """Write every setting that is not at its default, so that `--config` with the file repeats
    the run."""
    changed = {"out": config.output_dir}
    for key, s in settings_of(DCPOConfig).items():
        value = getattr(config, s.path[-1])
        if value != s.default and s.path[-1] not in DERIVED:
            changed[key] = plain(value)
    write_text(path, dump_yaml(changed, sort_keys=True))


def resumed_settings(config: DCPOConfig) -> dict[str, Any]:
    """Return the settings that checkpoints record, for `dcar.config.resume.changed_settings`:
    those of DCPO and those of transformers' optimisers."""
    names = {
        key
        for key, s in settings_of(DCPOConfig).items()
        if s.path[-1] in DCPOConfig.__annotations__ or key.startswith(("optim", "adam_"))
    }
    return {key: value for key, value in settings_stamp(config).items() if key in names}
