"""Settings of stage two: `DCPOConfig` uses the names of TRL's settings (`num_generations`,
`beta`, `epsilon`, …). A strict parser reads it from YAML and overrides."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import TrainingArguments
from trl import GRPOConfig

from dcar.config import check, setting
from dcar.config.commands import DecoderSettings, SpeechSettings
from dcar.config.load import plain
from dcar.config.read import dump_yaml
from dcar.config.resume import TAKE_EFFECT, settings_stamp
from dcar.config.schema import BOOLEANS, seed_setting, settings_of
from dcar.config.training import check_trackers
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from dcar.storage import write_text
from rl.objective import LOSS_TYPES, SCALES

ACTING = frozenset(
    (
        # GRPOConfig
        "num_generations max_completion_length temperature top_p top_k beta num_iterations "
        "epsilon reward_weights scale_rewards loss_type "
        # TrainingArguments: optimiser
        "optim optim_args optim_target_modules learning_rate lr_scheduler_type "
        "lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon "
        "max_grad_norm "
        # batches and length of the run
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
        "num_train_epochs max_steps seed full_determinism "
        # evaluation, log, checkpoints
        "output_dir eval_strategy eval_steps eval_delay eval_on_start logging_strategy "
        "logging_steps logging_first_step logging_nan_inf_filter log_level log_level_replica "
        "log_on_each_node disable_tqdm report_to run_name project trackio_space_id "
        "trackio_bucket_id trackio_static_space_id skip_memory_metrics save_strategy "
        "save_steps save_total_limit save_on_each_node load_best_model_at_end "
        "metric_for_best_model greater_is_better resume_from_checkpoint "
        "restore_callback_states_from_checkpoint "
        # devices and processes
        "use_cpu bf16 fp16 tf32 torch_empty_cache_steps debug ddp_backend "
        "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph "
        "ddp_timeout "
    ).split()
)
"""Settings of GRPOConfig and TrainingArguments that act in DCPO. All others are refused unless they
are at their defaults: the trainer loads its own batches, evaluates by decoding, and trains a small
policy that needs no sharding."""

METRICS = tuple(
    f"eval_{name}{mode}"
    for name in ("wer", "reward", "tokens_per_pass")
    for mode in ("", "_sampled")
)


@dataclass
class DCPOConfig(SpeechSettings, DecoderSettings, GRPOConfig):
    """Settings of DCPO. As in TRL, `per_device_train_batch_size` counts rollouts: prompts x
    num_generations."""

    REFUSED: ClassVar[frozenset[str]] = frozenset(
        f.name for f in dataclasses.fields(GRPOConfig) if f.name not in ACTING
    )

    output_dir: str = setting("runs/dcpo", "Folder to write.", name="out", place="folder")

    # --- defaults that differ from TRL's, and bounds that TRL does not check ---
    per_device_train_batch_size: int = setting(
        32, "Rollouts per step and process; a multiple of num_generations.", minimum=1
    )
    gradient_accumulation_steps: int = setting(
        1, "Micro-batches whose gradients are added up for one update.", minimum=1
    )
    optim: str = setting(
        TrainingArguments.optim,
        "An optimiser of transformers, such as adamw_torch or adafactor; or natural: the natural "
        "policy gradient, whose every update moves the distribution of chunk sizes by "
        "learning_rate² / 2 nats, for policies with few weights.",
    )
    learning_rate: float = setting(
        1e-4, "Learning rate, or step length of the natural gradient.", above=0
    )
    weight_decay: float = setting(
        0.0, "Decoupled weight decay of matrices; not with optim=natural.", minimum=0
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
    max_completion_length: int = setting(
        1500, "Largest number of speech tokens in a rollout.", minimum=1, name="max_tokens"
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
        "Rewards whose standard deviation divides the advantages; batch: all of an update. With "
        "credit=decision, a group that varies more than the update is divided by its own.",
        choices=SCALES,
    )
    loss_type: str = setting(
        "grpo", "Way in which the loss is averaged over decisions.", choices=LOSS_TYPES
    )
    eval_steps: float | None = setting(
        None, "Steps between evaluations, with eval_strategy=steps.", above=0
    )
    save_steps: float = setting(
        500, "Steps between checkpoints, with save_strategy=steps.", above=0
    )
    metric_for_best_model: str | None = setting(
        "eval_wer",
        "Metric by which the best checkpoint is chosen, of greedy or of sampled decisions.",
        choices=METRICS,
    )
    seed: int = seed_setting(
        42, "Random seed for the policy's initialisation, data order and rollouts."
    )
    resume_from_checkpoint: str | None = setting(
        "auto", "auto (resume from the last complete checkpoint), never, or a checkpoint directory."
    )

    # --- refused settings whose defaults in TRL do not fit ---
    num_generations_eval: int | None = 1  # evaluations decode every prompt once
    gradient_checkpointing: bool | None = None  # type: ignore[assignment]  # TRL warns of False

    # --- defaults alone ---
    bf16: bool = False  # the policy is small
    logging_steps: float = 1
    eval_strategy: str = "epoch"
    save_total_limit: int | None = 2
    lr_scheduler_type: str = "constant"
    per_device_eval_batch_size: int = 32
    save_strategy: str = "epoch"
    load_best_model_at_end: bool = True
    ddp_find_unused_parameters: bool | None = False
    logging_nan_inf_filter: bool = False

    # --- decoder, data and models ---
    decoder: str = ""
    recognizer: str = "starter"
    data: str = setting("", "Folder written by `dcar prepare`.", place="folder")
    limit: int = setting(0, "Training prompts, taken from the shuffled split; 0 = all.", minimum=0)
    eval_limit: int = setting(
        100, "Evaluation prompts, taken from the shuffled split; 0 = all.", minimum=0
    )
    min_seconds: float = setting(
        0.0, "Shortest recording used, in seconds (the paper: 6).", minimum=0
    )
    prompt_tokens: int = setting(
        50, "Length of the speech prompt in tokens (speaker-prompt layout).", minimum=1
    )
    token_recognizer: str = setting(
        "starter",
        "Token recogniser of the reward token_likelihood: a folder written by `dcar "
        "train-recognizer`; starter = the shipped one.",
    )

    # --- policy ---
    policy: str = setting(
        "",
        "Policy directory to start from instead of a new policy; starter-t1.0 and starter-t0.4 "
        "ship.",
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
    points_per_percent: float = setting(
        0.0,
        "Exchange rate of the reward for speed: points of word error (0.01 of the reward each) "
        "that one per cent of the time is worth; 0 = none. Needs scale_rewards=batch or none.",
        minimum=0,
    )
    pass_cost: list[float] = setting(
        [],
        "Time of a pass with its decision, and of a token in the pass and in the vocoder, in ms, "
        "for points_per_percent; empty = measured on this machine when the run starts.",
        minimum=0,
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
        schema: Any = type(self)
        for name, s in settings_of(schema).items():
            if name in self.REFUSED and as_parsed(getattr(self, name)) != as_parsed(s.default):
                raise ConfigError(f"{name} has no effect in DCPO; remove it")
        for name in ("eval_strategy", "save_strategy"):
            if str(getattr(self, name)).lower() == "false":
                setattr(self, name, "no")
        check(self)
        if self.optim == "natural" and self.weight_decay:
            raise ConfigError("weight_decay has no effect with optim=natural; remove it")
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
        if self.points_per_percent and self.scale_rewards == "group":
            raise ConfigError(
                "points_per_percent is one exchange rate for all groups, but scale_rewards=group "
                "scales each by itself: set scale_rewards=batch"
            )
        if self.pass_cost and (len(self.pass_cost) != 2 or not self.pass_cost[0] > 0):
            raise ConfigError(
                f"pass_cost={self.pass_cost}: give two times in ms, that of a pass (above 0) and "
                "that of a token, or none"
            )
        if self.eval_strategy == "no":
            self.load_best_model_at_end = False  # no metric to choose it by
        check_trackers(self.report_to)
        self.chunk_range = sorted(set(self.chunk_range))
        self.policy_sizes = sorted(set(self.policy_sizes))
        if self.greater_is_better is None:
            self.greater_is_better = not self.judges_by_wer
        optim = self.optim
        if optim == "natural":  # unknown to transformers
            self.optim = type(self).optim
        try:
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if optim == "natural":
            self.optim = optim

    @property
    def judges_by_wer(self) -> bool:
        """True if the best checkpoint is the one with the fewest word errors."""
        return (self.metric_for_best_model or "").startswith("eval_wer")

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


def as_parsed(value: Any) -> Any:
    """Return a value with its words for true and false replaced, as TrlParser may have done."""
    return BOOLEANS.get(str(value).lower(), value)


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
        if value != s.default and s.path[-1] not in DCPOConfig.REFUSED:
            changed[key] = plain(value)
    write_text(path, dump_yaml(changed, sort_keys=True))


def resumed_settings(config: DCPOConfig) -> dict[str, Any]:
    """Return the settings that checkpoints record, for `dcar.config.resume.changed_settings`:
    those of DCPO and those of transformers that change an update."""
    updates = {"lr_scheduler_kwargs", "fp16"}
    names = {
        key
        for key, s in settings_of(DCPOConfig).items()
        if s.path[-1] not in DCPOConfig.REFUSED
        and (
            s.meaning.declared or key in updates | TAKE_EFFECT or key.startswith(("optim", "adam_"))
        )
    }
    return {key: value for key, value in settings_stamp(config).items() if key in names}
