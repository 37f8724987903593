"""Settings that all trainings share, named as in `transformers.TrainingArguments`.

A training whose defaults differ repeats the field with its default alone (`max_steps: int = 2000`);
help text and bounds are those declared here.
"""

from dataclasses import dataclass

from dcar.config.schema import check, seed_setting, setting
from dcar.errors import ConfigError


@dataclass
class TrainingSettings:
    """Settings of every training."""

    out: str = setting("runs/model", "Folder to write.", place="folder")
    per_device_train_batch_size: int = setting(
        16, "Number of training examples per process and batch.", minimum=1
    )
    max_steps: int = setting(1000, "Number of updates of the weights.", minimum=1)
    learning_rate: float = setting(
        1e-3,
        "Peak learning rate. AdamW: linear warm-up, then a cosine decay to a fiftieth.",
        above=0,
    )
    weight_decay: float = setting(0.01, "Weight decay of AdamW.", minimum=0)
    bf16: bool = setting(False, "Use of bfloat16 autocast.")
    seed: int = seed_setting(
        0, "Random seed for initialisation, data order and random changes of training data."
    )
    logging_steps: int = setting(25, "Steps between lines of the log.", minimum=1)
    eval_steps: int = setting(250, "Steps between evaluations on the dev data.", minimum=1)

    def __post_init__(self) -> None:
        check(self)


def check_trackers(report_to: str | list[str] | None) -> None:
    """Raise ConfigError for a tracker that transformers does not know."""
    names = [report_to] if isinstance(report_to, str) else report_to or []
    if set(names) <= {"none", "all"}:
        return
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    if unknown := set(names) - {"none", "all", *INTEGRATION_TO_CALLBACK}:
        raise ConfigError(
            f"report_to: unknown {', '.join(sorted(unknown))}; choose from "
            f"{', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
        )


@dataclass
class TrainerSettings(TrainingSettings):
    """Settings of the trainings that use `transformers.Trainer`."""

    gradient_accumulation_steps: int = setting(
        1, "Batches whose gradients are added up for one update.", minimum=1
    )
    warmup_steps: int = setting(100, "Steps during which the learning rate rises.", minimum=0)
    max_grad_norm: float = setting(
        1.0,
        "Norm to which gradients are clipped; 0 = no clipping. scaled_adam clips by itself.",
        minimum=0,
    )
    save_steps: int = setting(250, "Steps between checkpoints.", minimum=1)
    dataloader_num_workers: int = setting(
        0, "Processes that load data; 0 = the training process loads it.", minimum=0
    )
    report_to: list[str] = setting(
        [], "Trackers of transformers that receive the log: tensorboard, wandb, trackio, …"
    )
    resume_from_checkpoint: str = setting(
        "auto",
        "Checkpoint to resume from, bit for bit: auto = the newest complete one in out, never, or "
        "a folder.",
    )
    ddp_timeout: int = setting(
        1800, "Seconds that processes wait for each other before they give up.", minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trackers(self.report_to)
