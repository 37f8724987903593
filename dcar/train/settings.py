"""Settings for training decoders: those that all runs share, and those of stage one. Comparisons
read them too, so this module imports nothing slow."""

from dataclasses import dataclass

from dcar.config import check, setting
from dcar.config.commands import DataSettings, SpeechSettings
from dcar.config.training import TrainerSettings
from dcar.errors import ConfigError
from dcar.model.backbones.lora import MODES, LoraSettings
from dcar.model.car import CARConfig
from dcar.sampling import SamplingConfig
from heads.layers import check_width


@dataclass
class SpokenSettings(SpeechSettings):
    """Selection of the best training step by the word errors of generated dev sentences."""

    sentences: int = setting(
        0,
        "Number of dev sentences generated before the first step and at every evaluation; the "
        "weights of the step with the fewest word errors are written. 0 = none, those of the last "
        "step are written.",
        minimum=0,
    )
    chunk: int = setting(
        5, "Tokens per pass, as in car-5; at most the number of the decoder's heads.", minimum=1
    )
    sampling: SamplingConfig = setting(
        lambda: SamplingConfig(temperature=0.4, top_k=10),
        "Sampling of the sentences.",
        bare=True,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass
class TokenModelSettings(DataSettings, TrainerSettings):
    """Settings of a run of stage one, or of another model that is trained as decoders are."""

    out: str = "runs/car"
    prompt_tokens: int = setting(
        50,
        "Length of the speaker prompt in training (bos layout only); 50 = one second at 50 Hz.",
        minimum=1,
    )
    per_device_train_batch_tokens: int = setting(
        0,
        "Speech tokens per process and batch, prompts and padding included, instead of "
        "per_device_train_batch_size: short utterances form larger batches; 0 = use "
        "per_device_train_batch_size.",
        minimum=0,
    )
    optim: str = setting(
        "adamw_torch_fused",
        "Optimiser: AdamW of PyTorch (with a cosine schedule), or the paper's ScaledAdam (with "
        "Eden; its learning rate is 0.01).",
        choices=("adamw_torch_fused", "scaled_adam"),
    )
    input_corruption: float = setting(
        0.0, "Share of input speech tokens replaced at random in training.", minimum=0, below=1
    )
    torch_compile: bool = setting(
        False,
        "Use of torch.compile, which takes minutes at the start and makes steps faster; not with "
        "FSDP or DeepSpeed.",
    )


@dataclass
class BackboneTraining:
    """Training of heads on a pretrained language model instead of a decoder from scratch."""

    path: str = setting(
        "",
        "Decoder written by `dcar convert-backbone`; empty = the decoder that `model` describes.",
    )
    train: str = setting(
        "lora",
        "Parameters to train: lora = adapters and heads, heads = the heads alone, joint = "
        "everything.",
        choices=MODES,
    )
    lora: LoraSettings = setting(
        LoraSettings, "LoRA adapters, y = W x + (lora_alpha / r) B A dropout(x)."
    )
    dtype: str = setting(
        "float32",
        "Data type in which a model that is not trained itself is stored.",
        choices=("float32", "bfloat16"),
    )

    def __post_init__(self):
        check(self)
        if self.dtype == "bfloat16" and self.train == "joint":
            raise ConfigError(
                "backbone.dtype=bfloat16 would lose small updates of trained weights: keep "
                "float32 and set bf16=true, which computes in bfloat16"
            )


@dataclass
class TrainConfig(TokenModelSettings):
    """Settings of stage one."""

    head_weight_decay: float = setting(
        1.0,
        "Lambda of eq. 1: head k has the weight lambda^(k-1); 1 = uniform, as in the paper.",
        above=0,
        maximum=1,
    )
    head_positions: float = setting(
        1.0,
        "Share of positions at which the additional heads are trained; a smaller share is faster.",
        above=0,
        maximum=1,
    )
    gradient_checkpointing: bool = setting(
        False, "Recomputation of activations: less memory, about a third more time."
    )
    init_from: str = setting(
        "",
        "Decoder whose weights training starts from; starter = the shipped one, empty = from "
        "scratch.",
    )
    freeze_trunk: bool = setting(
        False,
        "Train the additional heads alone, on the decoder of init_from. If its heads differ in "
        "number or kind from those of `model`, new heads are created.",
    )
    codebook_init: bool = setting(
        False,
        "Initialise speech embeddings from the tokenizer's centroids when training from scratch.",
    )
    keep_states: bool = setting(
        False,
        "With freeze_trunk: compute the hidden states of the training split once, with one prompt "
        "per utterance, and keep them in memory (2 bytes per value).",
    )
    replay: str = setting(
        "",
        "Another prepared corpus whose rows fill a share of every batch, so that training on a "
        "small corpus does not make the decoder forget; starter = the shipped one, empty = none.",
    )
    replay_share: float = setting(
        0.5,
        "Share of a batch that is replayed; an epoch is one pass over `data` alone.",
        above=0,
        below=1,
    )
    spoken: SpokenSettings = setting(
        SpokenSettings, "Selection of the best step by the word errors of generated sentences."
    )
    model: CARConfig = setting(
        CARConfig, "Shape of the decoder; vocabulary sizes are taken from the data."
    )
    backbone: BackboneTraining = setting(
        BackboneTraining, "Training of heads on a pretrained language model instead."
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.backbone.path:
            check_width(self.model.hidden_size, self.model.num_attention_heads)
        if self.freeze_trunk and (not self.init_from or self.model.num_prediction_heads == 1):
            raise ConfigError(
                "freeze_trunk trains additional heads on an existing decoder: set init_from=… and "
                "model.num_prediction_heads of at least 2 (on a language model: "
                "backbone.train=heads)"
            )
        if self.keep_states and (not self.freeze_trunk or self.input_corruption):
            raise ConfigError(
                "keep_states stores the hidden states of a trunk that does not change: set "
                "freeze_trunk=true and input_corruption=0"
            )
        if self.codebook_init and (self.init_from or self.backbone.path):
            raise ConfigError(
                "codebook_init initialises a decoder from scratch, but init_from or backbone.path "
                "names weights to start from: omit one of them"
            )
        if self.replay and self.per_device_train_batch_size < 2:
            raise ConfigError(
                "replay fills a share of every batch: set per_device_train_batch_size to 2 or more"
            )
        if self.replay and self.per_device_train_batch_tokens:
            raise ConfigError(
                "replay fills a share of per_device_train_batch_size utterances: omit "
                "per_device_train_batch_tokens"
            )

    @property
    def head_weights(self) -> list[float]:
        return [self.head_weight_decay**k for k in range(self.model.num_prediction_heads)]
