"""Settings of stage two: `DCPOConfig` speaks TRL's language (`num_generations`, `beta`,
`epsilon`, …), and a strict parser reads it from YAML and overrides."""

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
from heads.policy import READS
from rl.objective import FORCED_ROWS, LOSS_TYPES, SCALES

# Settings of GRPOConfig that mean the same here. All others of its own (not of TrainingArguments)
# must stay at their defaults: a setting that is ignored would be a lie.
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
NOT_OURS["num_generations_eval"] = 1  # evaluations speak every prompt once
# filled in by GRPOConfig and TrainingArguments from other settings
DERIVED = set(NOT_OURS) | {"accelerator_config", "fsdp_config"}


@dataclass
class DCPOConfig(GRPOConfig):
    """Settings of DCPO. As in TRL, `per_device_train_batch_size` counts rollouts: prompts x
    num_generations."""

    UNUSED: ClassVar[frozenset[str]] = frozenset(NOT_OURS)  # not listed by --help

    output_dir: str = setting("runs/dcpo", "Folder to write.", name="out", place="folder")

    # --- defaults that differ from TRL's, or bounds that TRL leaves to chance ---
    per_device_train_batch_size: int = setting(
        32, "Rollouts of a process per step, whole groups of num_generations.", minimum=1
    )
    gradient_accumulation_steps: int = setting(1, "Steps whose gradients are added up.", minimum=1)
    optimizer: str = setting(
        "adam",
        "adam, or natural: the natural policy gradient, whose every update moves the "
        "distribution of chunk sizes by learning_rate² / 2 nats. For policies of few "
        "weights.",
        choices=("adam", "natural"),
    )
    learning_rate: float = setting(
        1e-4, "Learning rate of Adam; length of a step of the natural gradient.", above=0
    )
    weight_decay: float = setting(0.0, "Of Adam.", minimum=0)
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm; 0 = not.", minimum=0)
    lr_scheduler_type: str = setting("constant", "Schedule of the learning rate.")
    warmup_steps: float = setting(
        0, "Steps in which the learning rate rises (below 1: their share).", minimum=0
    )
    num_train_epochs: float = setting(
        3, "Passes over the prompts; KL weight and reference follow them.", above=0
    )
    max_steps: int = setting(
        -1, "Updates of the policy in place of num_train_epochs; -1 = as those say.", minimum=-1
    )
    num_generations: int = setting(8, "Rollouts of a prompt: a group.", minimum=2)
    num_generations_eval: int | None = setting(
        1, "Unused: evaluations speak every prompt once.", minimum=1
    )
    max_completion_length: int = setting(1500, "Most speech tokens of a rollout.", minimum=1)
    temperature: float = setting(
        1.0, "Of sampling; below 1 the likely tokens become likelier.", minimum=0
    )
    top_k: int = setting(0, "Draw among so many tokens, the likeliest; 0 = all.", minimum=0)
    top_p: float = setting(
        1.0,
        "Draw among the fewest tokens that have this probability together; 1 = all.",
        above=0,
        maximum=1,
    )
    beta: float = setting(
        0.04, "Largest KL weight; it grows linearly from 0 in the first epoch.", minimum=0
    )
    epsilon: float = setting(
        0.2, "Ratios of probabilities are clipped this far below and above 1.", minimum=0
    )
    num_iterations: int = setting(1, "Updates with the same rollouts.", minimum=1)
    scale_rewards: str = setting(
        "group", f"What advantages are divided by the deviation of: {', '.join(SCALES)}."
    )
    loss_type: str = setting("grpo", "How decisions are averaged.", choices=LOSS_TYPES)
    bf16: bool = setting(False, "bfloat16 autocast of the update; off, the policy is tiny.")
    gradient_checkpointing: bool | None = setting(  # type: ignore[assignment]  # False would be warned of
        None, "Recompute activations; null = not, the policy is tiny."
    )
    per_device_eval_batch_size: int = setting(
        32, "Utterances spoken at once in evaluation.", minimum=1
    )
    logging_steps: float = setting(1, "Steps between two lines of the log.", above=0)
    logging_nan_inf_filter: bool = setting(False, "Hide losses that are not finite; off.")
    eval_strategy: str = setting("epoch", "When the split dev is spoken: epoch, steps, or no.")
    eval_steps: float | None = setting(
        None, "Steps between evaluations, with eval_strategy=steps.", above=0
    )
    save_strategy: str = setting("epoch", "When a checkpoint is written.")
    save_steps: float = setting(
        500, "Steps between checkpoints, with save_strategy=steps.", above=0
    )
    load_best_model_at_end: bool = setting(
        True, "Keep and export the best checkpoint instead of the last."
    )
    metric_for_best_model: str | None = setting(
        "eval_wer", "What the best checkpoint has: eval_wer, eval_reward, …"
    )
    greater_is_better: bool | None = setting(None, "Direction of that metric; found by its name.")
    save_total_limit: int | None = setting(2, "Checkpoints kept (the best one besides).", minimum=1)
    remove_unused_columns: bool = setting(False, "Unused: batches are prompts.")
    dataloader_num_workers: int = setting(0, "Processes that load prompts.", minimum=0)
    seed: int = seed_setting(42, "Of policy, order and rollouts.")
    resume_from_checkpoint: str | None = setting(
        "auto", "auto (go on from the last complete checkpoint), never, or a checkpoint directory."
    )

    # --- what is trained on what ---
    decoder: str = setting(
        "", "Directory of the frozen decoder (stage one); starter = the shipped one."
    )
    dtype: str = dtype_setting()
    data: str = setting("", "Folder written by `dcar prepare`.", place="folder")
    max_train_prompts: int | None = setting(
        None, "Use the first so many prompts of the shuffled split.", minimum=1
    )
    max_eval_prompts: int | None = setting(
        100, "Use the first so many evaluation prompts of the shuffled split.", minimum=1
    )
    min_seconds: float = setting(0.0, "Leave out shorter recordings (the paper: 6).", minimum=0)
    prompt_tokens: int = setting(
        50, "Length of the speech prompt (speaker-prompt layout).", minimum=1
    )
    vocoder: str = setting(
        "starter", "Vocoder directory, or 'starter' for the one that ships with the project."
    )
    recognizer: str = setting(
        "starter", "Reward recogniser, by a name that dcar.recognition.load lists."
    )
    token_recognizer: str = setting(
        "starter",
        "What reads the tokens for the reward token_likelihood: a folder of "
        "`dcar train-recognizer`, or 'starter' for the shipped one.",
    )

    # --- policy ---
    policy: str = setting(
        "", "Start from this policy directory (starter = the shipped one), not from a new policy."
    )
    policy_reads: str = setting(
        "hidden",
        "What it decides from: hidden states (the paper's, before the draw), "
        "or candidates (what the heads drew).",
        choices=READS,
    )
    policy_sizes: list[int] = setting(
        [], "Chunk sizes that it chooses among; empty = all.", minimum=1
    )
    chunk_scorer: str = setting(
        "",
        "A folder of `dcar train-chunk-scorer` that a new policy takes along, so that it "
        "sees how well candidates go together; starter = the shipped one, empty = it "
        "does not.",
    )
    policy_width: int | None = setting(
        256, "Width of the policy's layer; null = the decoder's, the paper's.", minimum=1
    )
    policy_heads: int = setting(8, "Attention heads of the policy's layer.", minimum=1)
    range_prior: float = setting(
        0.0,
        "Logits by which a new policy favours the guidance range; 0 = uniform, the "
        "paper's. For runs too short to find the range by themselves.",
    )

    # --- rollouts ---
    chunk_range: list[int] = setting(
        [], "Guidance range, for example [2, 3]; empty = from `guidance`.", minimum=1
    )
    guidance: str = setting(
        "", "JSON written by `dcar profile`, from which the range is taken.", place="file"
    )
    forced_rows: str = setting(
        "policy_ratio",
        "policy_ratio: half of the rollouts keep to the guidance range (the "
        "paper's); none: all are sampled.",
        choices=FORCED_ROWS,
    )
    num_candidates: int = setting(
        1,
        "Chunks drawn side by side at every decision; the policy, which needs a chunk "
        "scorer, chooses candidate and size together.",
        minimum=1,
    )
    common_random_numbers: bool = setting(
        False, "Members of a group share the draws of tokens (not of actions)."
    )
    max_tokens_per_text_unit: float = setting(
        16.0, "Length limit of a rollout per phoneme.", above=0
    )
    repetition_window: int = setting(
        0, "Repetition-aware sampling over so many tokens (CosyVoice: 10); 0 = off.", minimum=0
    )
    hidden_dtype: str = setting(
        "float32", "Storage of the rollouts' hidden states.", choices=("float32", "float16")
    )

    # --- reward ---
    reward_funcs: list[str] = setting(
        ["wer", "range_penalty"],
        "Rewards, added with reward_weights: wer, cer, log_likelihood, token_likelihood, "
        "range_penalty, or the dotted path of a function, my_package.rewards.mine.",
    )
    reward_weights: list[float] | None = setting(None, "Weights of reward_funcs; null = 1 each.")
    alpha: float = setting(0.1, "Weight of the out-of-range penalty.", minimum=0)
    tokens_per_pass: float = setting(
        0.0,
        "Pay for longer or shorter chunks, so much that rollouts keep so many "
        "tokens a pass; 0 = pay nothing.",
        minimum=0,
    )
    length_reward_gain: float = setting(
        1.0,
        "What an update pays for each token by which the last chunks were "
        "too short, in deviations of the advantage per deviation of sizes. About 0.1 with "
        "optimizer=natural.",
        above=0,
    )
    credit: str = setting(
        "utterance",
        "What an advantage belongs to: the utterance (the paper's), or every decision "
        "by itself (by wer, log_likelihood or token_likelihood).",
        choices=("utterance", "decision"),
    )
    credit_window: int = setting(
        25, "Tokens of the recording that a decision answers for, with credit=decision.", minimum=1
    )
    reward_timeout: float = setting(
        600.0, "Seconds after which a batch that the recogniser has not answered failed.", above=0
    )
    max_reward_wer: float = setting(
        0.5, "Refuse a recogniser of more word errors on resynthesised recordings.", minimum=0
    )
    max_failed_rewards: float = setting(
        0.2,
        "Stop when a larger share of a step's rewards could not be computed.",
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
                f"scale_rewards must be one of {', '.join(SCALES)}; not '{self.scale_rewards}'"
            )
        for name in ("eval_strategy", "save_strategy"):
            if str(getattr(self, name)).lower() == "false":
                setattr(self, name, "no")
        check(self)
        for name, default in NOT_OURS.items():
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name} is a setting of TRL's GRPO that DCPO has no use for; remove it"
                )
        if self.max_steps == 0:
            raise ConfigError(
                "max_steps 0 trains nothing: give at least 1, or -1 for num_train_epochs"
            )
        if self.per_device_train_batch_size % self.num_generations:
            raise ConfigError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} counts rollouts; "
                "it must be a "
                f"multiple of num_generations {self.num_generations}: a group never spans two "
                "steps or processes"
            )
        if self.eval_strategy == "no":
            self.load_best_model_at_end = False  # there is nothing to choose it by
        self.chunk_range, self.policy_sizes = (
            sorted(set(self.chunk_range)),
            sorted(set(self.policy_sizes)),
        )
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
        return SamplingConfig(
            self.temperature,
            self.top_k or 0,
            self.top_p,
            max_tokens=self.max_completion_length,
            max_tokens_per_text_unit=self.max_tokens_per_text_unit,
            repetition_window=self.repetition_window,
        )


def required(args: DCPOConfig, name: str) -> str:
    """A setting that has to be given where what it loads is not. ConfigError where it is empty."""
    if not (value := getattr(args, name)):
        raise ConfigError(f"{name} is not set: give {name}=… (recipes are in launch/recipes/)")
    return value


def save_settings(config: DCPOConfig, path: Path) -> None:
    """Write every setting that is not at its default, so that `--config` of the file repeats the
    run."""
    changed = {"out": config.output_dir}
    for key, s in settings_of(DCPOConfig).items():
        value = getattr(config, s.path[-1])
        if value != s.default and s.path[-1] not in DERIVED:
            changed[key] = plain(value)
    write_text(path, dump_yaml(changed, sort_keys=True))


def resumed_settings(config: DCPOConfig) -> dict[str, Any]:
    """The settings that checkpoints record, for `dcar.config.resume.changed_settings`: those of
    DCPO, and those of transformers' optimisers."""
    names = {
        key
        for key, s in settings_of(DCPOConfig).items()
        if s.path[-1] in DCPOConfig.__annotations__ or key.startswith(("optim", "adam_"))
    }
    return {key: value for key, value in settings_stamp(config).items() if key in names}
