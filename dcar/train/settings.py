"""Settings that every training of a decoder has: CAR, FAR, heads on language models, draft models."""

from __future__ import annotations

from dataclasses import dataclass

from dcar.config import check, setting
from dcar.config.schema import seed_setting


@dataclass
class RunSettings:
    """Data, optimiser and rhythm of a run."""

    data: str = setting("runs/prepared", "Folder written by `dcar prepare`.", place="folder")
    out: str = setting("runs/car", "Folder to write.", old=("out_dir",), place="folder")
    prompt_tokens: int = setting(50, "Speaker prompt in training (bos layout only): one second at 50 Hz.", minimum=1)
    batch_size: int = setting(16, "Utterances of a process per step.", minimum=1)
    gradient_accumulation: int = setting(1, "Batches of a step.", minimum=1)
    max_steps: int = setting(1000, "Updates of the weights.", minimum=1)
    optimizer: str = setting("adamw", "adamw (with cosine) or scaled_adam (with Eden, the paper's).",
                             choices=("adamw", "scaled_adam"))
    learning_rate: float = setting(1e-3, "Peak; the paper's is 0.01 for scaled_adam.", above=0)
    weight_decay: float = setting(0.01, "Of matrices; adamw only.", minimum=0)
    warmup_steps: int = setting(100, "Steps in which the learning rate rises.", minimum=0)
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm, 0 = not; ScaledAdam clips by itself.",
                                   minimum=0)
    input_corruption: float = setting(0.0, "Share of input speech tokens replaced at random while training.",
                                      minimum=0, below=1)
    own_tokens: float = setting(0.0, "Share of input chunks that the decoder draws itself while training, from the "
                                     "true past; a pass more a step.", minimum=0, below=1)
    bf16: bool = setting(False, "bfloat16 autocast.")
    seed: int = seed_setting(0, "Of weights, order and corruption.")
    eval_steps: int = setting(250, "Steps between evaluations on the dev split.", minimum=1)
    save_steps: int = setting(250, "Steps between checkpoints.", minimum=1)
    log_steps: int = setting(25, "Steps between lines of the log.", minimum=1)
    workers: int = setting(0, "Processes that load data.", minimum=0)
    tensorboard: bool = setting(False, "Also write out/tensorboard.")
    resume: bool = setting(True, "Go on from the last checkpoint in out, bit for bit.")
    wait_minutes: float = setting(30.0, "How long processes wait for each other before they give up.", above=0)

    def __post_init__(self) -> None:
        check(self)
