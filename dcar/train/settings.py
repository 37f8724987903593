"""Settings of the trainings of decoders: what all have, and what stage one has besides.
Comparisons read them too, so nothing slow is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from dcar.config import check, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError
from dcar.model.backbones.lora import MODES, LoraSettings
from dcar.model.car import CARConfig
from dcar.sampling import SamplingConfig


@dataclass
class SpokenSettings:
    """Which step of a training is the best, by the word errors of dev sentences that it speaks."""

    sentences: int = setting(
        0,
        "Dev sentences spoken before the first step and at every evaluation; the step of "
        "fewest word errors is what is written. 0 = none, the last step is written.",
        minimum=0,
    )
    chunk: int = setting(
        5, "Tokens of a pass, as in car-5; at most as many as the decoder has heads.", minimum=1
    )
    recognizer: str = setting("moonshine", "Evaluation ASR; not the model that made the tokens.")
    vocoder: str = setting(
        "", "Folder, or a name that dcar.vocoder.load lists; empty = the shipped one."
    )
    sampling: SamplingConfig = setting(
        lambda: SamplingConfig(temperature=0.4, top_k=10), "How they are drawn."
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass
class RunSettings:
    """Data, optimiser and rhythm of a run."""

    data: str = setting("runs/prepared", "Folder written by `dcar prepare`.", place="folder")
    out: str = setting("runs/car", "Folder to write.", place="folder")
    prompt_tokens: int = setting(
        50, "Speaker prompt in training (bos layout only): one second at 50 Hz.", minimum=1
    )
    batch_size: int = setting(16, "Utterances of a process per step.", minimum=1)
    max_tokens: int = setting(
        0,
        "Speech tokens of a process per step, padding included, in place of batch_size: short "
        "utterances come in larger batches; 0 = batch_size counts.",
        minimum=0,
    )
    gradient_accumulation: int = setting(1, "Batches of a step.", minimum=1)
    max_steps: int = setting(1000, "Updates of the weights.", minimum=1)
    optimizer: str = setting(
        "adamw",
        "adamw (with cosine) or scaled_adam (with Eden, the paper's).",
        choices=("adamw", "scaled_adam"),
    )
    learning_rate: float = setting(1e-3, "Peak; the paper's is 0.01 for scaled_adam.", above=0)
    weight_decay: float = setting(0.01, "Of matrices; adamw only.", minimum=0)
    warmup_steps: int = setting(100, "Steps in which the learning rate rises.", minimum=0)
    max_grad_norm: float = setting(
        1.0, "Gradients are clipped to this norm, 0 = not; ScaledAdam clips by itself.", minimum=0
    )
    input_corruption: float = setting(
        0.0, "Share of input speech tokens replaced at random while training.", minimum=0, below=1
    )
    bf16: bool = setting(False, "bfloat16 autocast.")
    compile: bool = setting(
        False, "torch.compile: minutes at the start, then faster steps; not with FSDP or DeepSpeed."
    )
    seed: int = seed_setting(0, "Of weights, order and corruption.")
    eval_steps: int = setting(250, "Steps between evaluations on the dev split.", minimum=1)
    save_steps: int = setting(250, "Steps between checkpoints.", minimum=1)
    log_steps: int = setting(25, "Steps between lines of the log.", minimum=1)
    workers: int = setting(0, "Processes that load data.", minimum=0)
    report_to: list[str] = setting(
        [], "Trackers of transformers that get the log: tensorboard, wandb, trackio, …"
    )
    resume: bool = setting(True, "Go on from the last checkpoint in out, bit for bit.")
    wait_minutes: float = setting(
        30.0, "How long processes wait for each other before they give up.", above=0
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass
class BackboneTraining:
    """Heads on a pretrained language model instead of a decoder from scratch."""

    path: str = setting(
        "",
        "Decoder written by `dcar convert-backbone`; empty = the decoder that `model` describes.",
    )
    train: str = setting(
        "lora",
        "lora: adapters and heads; heads: the model stays as it is; joint: everything.",
        choices=MODES,
    )
    lora: LoraSettings = setting(LoraSettings, "Adapters, y = W x + (alpha / rank) B A dropout(x).")
    dtype: str = setting(
        "float32", "Storage of a model that is not trained itself.", choices=("float32", "bfloat16")
    )

    def __post_init__(self):
        check(self)
        if self.dtype == "bfloat16" and self.train == "joint":
            raise ConfigError(
                "backbone.dtype=bfloat16 would lose small updates of trained weights: keep "
                "float32 and "
                "set bf16=true, which computes in bfloat16"
            )


@dataclass
class TrainConfig(RunSettings):
    """Settings of stage one."""

    head_weight_decay: float = setting(
        1.0,
        "Lambda of eq. 1: head k counts lambda^(k-1); 1 = uniform, the paper's.",
        above=0,
        maximum=1,
    )
    head_positions: float = setting(
        1.0,
        "Share of positions that the additional heads are trained on; less is faster.",
        above=0,
        maximum=1,
    )
    gradient_checkpointing: bool = setting(
        False, "Recompute activations: less memory, about a third more time."
    )
    init_from: str = setting(
        "", "Start from the weights of this decoder, not from scratch; starter = the shipped one."
    )
    freeze_trunk: bool = setting(
        False,
        "Train the additional heads alone, on the decoder of init_from, which may have "
        "heads of another number or kind: those of `model` are then made anew.",
    )
    codebook_init: bool = setting(
        False, "From scratch: speech embeddings start from the tokenizer's centroids."
    )
    keep_states: bool = setting(
        False,
        "Of a frozen trunk: compute the hidden states of the training split once, each "
        "utterance behind one prompt, and keep them (2 bytes a value).",
    )
    replay: str = setting(
        "",
        "Another prepared corpus, rows of which fill every batch, so that a small one does not "
        "make the decoder forget; starter = the shipped one.",
    )
    replay_share: float = setting(
        0.5, "Share of a batch that is replayed; an epoch is one of `data` alone.", above=0, below=1
    )
    spoken: SpokenSettings = setting(
        SpokenSettings, "The best step by what it says, not by its loss."
    )
    model: CARConfig = setting(
        CARConfig, "Shape of the decoder; vocabulary sizes are taken from the data."
    )
    backbone: BackboneTraining = setting(
        BackboneTraining, "Heads on a pretrained language model instead."
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.backbone.path:
            self.model.check_heads()
        if self.freeze_trunk and (not self.init_from or self.model.num_prediction_heads == 1):
            raise ConfigError(
                "freeze_trunk trains additional heads on a decoder that there is: give "
                "init_from=… and "
                "model.num_prediction_heads of at least 2 (on a language model: "
                "backbone.train=heads)"
            )
        if self.keep_states and (not self.freeze_trunk or self.input_corruption):
            raise ConfigError(
                "keep_states keeps what a trunk that does not change says of its data: set "
                "freeze_trunk=true and input_corruption=0"
            )
        if self.codebook_init and (self.init_from or self.backbone.path):
            raise ConfigError(
                "codebook_init is a start from scratch; init_from and backbone.path name other "
                "weights"
            )
        if self.replay and self.batch_size < 2:
            raise ConfigError("replay fills a part of every batch: batch_size must be 2 or more")
        if self.replay and self.max_tokens:
            raise ConfigError("replay fills a share of batch_size utterances: leave max_tokens out")

    @property
    def head_weights(self) -> list[float]:
        return [self.head_weight_decay**k for k in range(self.model.num_prediction_heads)]
