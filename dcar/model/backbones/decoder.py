"""CAR heads on a pretrained causal language model of `transformers`, with the interface of
`CARDecoder`.

One sequence, causal throughout, as such models were trained: prefix (text with its template), then
speech. Speech has its own embedding table and heads, whether the source kept speech ids in its
vocabulary (LLaSA) or outside it (CosyVoice 2): ids are 0..V-1 codes, V = EOS, V + 1 = start of
speech, V + 2 = start of the sequence (if there is one). Decoding, stage one, DCPO, export and the
comparison use the same interface as for `CARDecoder`.

Training runs the language model as it is. Decoding computes its layers itself, with its modules and
on our own ragged cache (dcar/decoding/language.py), so only architectures whose layers it supports
can be used.
"""

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dcar.errors import CheckpointError, ConfigError
from dcar.model.backbones.cosyvoice_lm import MODEL_TYPE, CosyVoiceLM
from dcar.model.batch import SpeechBatch
from dcar.model.car import SpeechDecoder, SpeechVocabulary
from heads.build import build_heads

UNUSED = set(
    ("id2label label2id problem_type transformers_version architectures dtype torch_dtype").split()
)
# models of transformers whose layers decoding computes
ROTARY = ("llama", "qwen2", "qwen3", "mistral")
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
TEXT_TOKENIZER_FOLDER = "text_tokenizer"  # in the folder of a decoder whose text is not phonemes


def _named(name: str) -> Any:
    """Make a property that reads a number of the language model, by its name in `transformers`."""
    return property(lambda self: int(self.architecture[name]))


@dataclass
class BackboneConfig(SpeechVocabulary):
    """Shape and layout of a decoder on a language model. `bos`, `tokenizer`, `phonemes` and
    `languages` as in `CARConfig`."""

    # config of the language model, with its model_type
    architecture: dict[str, Any] = field(default_factory=dict)
    # what it was made from: cosyvoice2, llasa, causal-lm, or text-lm (which knew no speech)
    source: str = ""
    speech_vocab_size: int = 0  # V codes
    num_prediction_heads: int = 7
    heads: str = "independent"  # or shared; this and what follows as in CARConfig
    head_blocks: int = 4
    base_head_bias: bool = False  # CosyVoice 2's has one
    # True: speech prompt without its text, then the start symbol, then the target. False: the start
    # symbol closes the prefix, and the prompt is the beginning of the speech (zero-shot layout of
    # CosyVoice 2 and LLaSA).
    bos: bool = False
    sequence_start: bool = False  # the prefix begins with a vector of its own (CosyVoice's sos)
    text_prefix: tuple[int, ...] = ()  # ids before and
    text_suffix: tuple[int, ...] = ()  # after the text: the model's template
    lora: dict[str, Any] | None = None  # adapters on the language model, see lora.py
    tokenizer: str = ""
    phonemes: str = ""  # the text tokenizer's name and checksum, see dcar/prepare/retokenize.py
    languages: tuple[str, ...] = ()

    def __post_init__(self):
        self.languages = tuple(self.languages)
        # without entries that do not describe the weights or do not survive JSON
        recorded = {
            k: v for k, v in self.architecture.items() if k not in UNUSED and not k.startswith("_")
        }
        self.architecture = json.loads(json.dumps(recorded))

    @property
    def start(self) -> int:
        """Speech id of the start symbol."""
        return self.speech_vocab_size + 1

    text_vocab_size, hidden_size = _named("vocab_size"), _named("hidden_size")
    num_layers, num_attention_heads = _named("num_hidden_layers"), _named("num_attention_heads")
    ffn_size = _named("intermediate_size")

    @property
    def template_length(self) -> int:
        """Positions before the speech besides those of the text."""
        return len(self.text_prefix) + len(self.text_suffix) + self.sequence_start + (not self.bos)

    @property
    def num_kv_heads(self) -> int:
        return int(self.architecture.get("num_key_value_heads") or self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        return int(
            self.architecture.get("head_dim") or self.hidden_size // self.num_attention_heads
        )


def check_architecture(architecture: dict[str, Any]) -> None:
    """Raise CheckpointError if decoding (dcar/decoding/language.py) does not support the
    language model's architecture."""
    kind = architecture.get("model_type")
    if kind not in (*ROTARY, MODEL_TYPE):
        raise CheckpointError(
            f"a language model of type '{kind}' cannot be decoded; give one of type "
            f"{', '.join(ROTARY)} or {MODEL_TYPE}"
        )


def language_model(architecture: dict[str, Any]) -> Any:
    """Build an untrained language model without its output layer. Raises CheckpointError if its
    type is not supported, it attends within a window, or its rotary frequencies change with the
    length of a sequence."""
    from transformers import AutoConfig, AutoModel

    check_architecture(architecture)
    settings = dict(architecture)
    kind = settings.pop("model_type")
    if kind == MODEL_TYPE:
        return CosyVoiceLM(settings)
    config = AutoConfig.for_model(kind, **settings)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = (
        getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True)
        else None
    )
    if layers != {"full_attention"} or window:
        raise CheckpointError(
            f"'{kind}' with {sorted(layers)} and a window of {window}: the ragged cache holds all "
            "positions, so only models with full attention in every layer can be used; set "
            "sliding_window to null in its config.json if the sequences are shorter than the window"
        )
    if (rope := config.rope_parameters["rope_type"]) not in FIXED_ROTARY:
        raise CheckpointError(
            f"'{kind}' with rotary positions of type '{rope}': only types whose frequencies do not "
            f"depend on the length of a sequence can be used ({', '.join(FIXED_ROTARY)}); give "
            "another model"
        )
    return AutoModel.from_config(config, attn_implementation="sdpa")


class BackboneDecoder(SpeechDecoder):
    """Decoder on a language model: text and speech prompt in, distributions of the next K speech
    tokens out. See `CARDecoder` for the methods."""

    config_class = BackboneConfig
    model_type = "dcar-backbone-decoder"
    adapters: Any  # peft's model around `backbone`, if it has adapters

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.config = config
        self.backbone: Any = language_model(config.architecture)
        width = config.hidden_size
        self.speech_embedding = nn.Embedding(config.speech_vocab_size + 3, width)
        self.heads = build_heads(config, config.base_head_bias)
        nn.init.normal_(self.speech_embedding.weight, std=0.02)
        if config.lora:
            self.add_adapters(config.lora)

    def add_adapters(self, settings: dict[str, Any]) -> None:
        """Insert untrained LoRA adapters (`LoraSettings` as a dict) into the language model."""
        # not registered as a module, because it contains the language model a second time
        vars(self)["adapters"] = inject(self.backbone, settings)
        self.config.lora = settings

    @property
    def norm(self) -> Any:
        return self.backbone.norm

    @property
    def layers(self) -> nn.ModuleList:
        return self.backbone.layers

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the modules before the layers: text embedding, others of the model, speech
        embedding."""
        before = [
            module
            for name, module in self.backbone.named_children()
            if name not in ("layers", "norm")
        ]
        return (*before, self.speech_embedding)

    def restore_buffers(self) -> None:
        """Recompute the rotary frequencies, which are not part of a checkpoint."""
        rotary = getattr(self.backbone, "rotary_emb", None)
        if rotary is not None:
            self.backbone.rotary_emb = type(rotary)(config=self.backbone.config)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer's activations in the backward pass: less memory for a third more
        time."""
        self.backbone.gradient_checkpointing_enable({"use_reentrant": False})

    # --- training ---------------------------------------------------------------------------------

    def speech_hidden(self, batch: SpeechBatch) -> Tensor:
        """Return hidden states [B, S, D] of the speech positions of complete sequences, without
        a cache; positions follow each row's own text."""
        speech_ids = batch["speech_ids"]
        prefix, lengths = text_prefix(
            self.config,
            self.backbone.embed_tokens,
            self.speech_embedding,
            batch["text_ids"],
            batch["text_lengths"],
        )
        n, s = prefix.shape[1], speech_ids.shape[1]
        column = torch.arange(n + s, device=prefix.device)
        real = (column < lengths[:, None]) | (column >= n)  # [B, N' + S]
        # [B, N' + S, N' + S]; every row sees at least column 0
        mask = (column <= column[:, None]) & real[:, None]
        positions = torch.where(column < n, column, column - n + lengths[:, None])
        x = torch.cat((prefix, self.speech_embedding(speech_ids).to(prefix.dtype)), dim=1)
        out = self.backbone(
            inputs_embeds=x, position_ids=positions, attention_mask=mask[:, None], use_cache=False
        )
        # the heads may be of higher precision
        return out.last_hidden_state[:, n:].to(self.heads.base.weight.dtype)


@lru_cache
def _constant(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ids on a device, copied once: a captured pass may not copy from the host."""
    with torch.inference_mode(False):  # training may read what decoding has made
        return torch.tensor(ids, device=device)


def text_prefix(
    config: BackboneConfig,
    embed_text: nn.Module,
    embed_speech: nn.Embedding,
    text_ids: Tensor,
    text_lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return vectors [B, N', D] of text with template and special symbols, and the number [B] of
    them that are not padding."""
    device = text_ids.device
    texts = embed_text(text_ids)
    marks = torch.arange(config.start, embed_speech.num_embeddings, device=device)
    special = embed_speech(marks)[:, None].to(texts.dtype)  # [2, 1, D]
    before, after = (
        [embed_text(_constant(tuple(ids), device))] if ids else []
        for ids in (config.text_prefix, config.text_suffix)
    )
    if config.sequence_start:
        before.insert(0, special[1])
    if not config.bos:
        after.append(special[0])
    parts = [
        torch.cat([texts[0, :0], *rows]).expand(len(texts), -1, -1) for rows in (before, after)
    ]
    f, t, e = parts[0].shape[1], texts.shape[1], parts[1].shape[1]
    table = torch.cat((parts[0], texts, parts[1], torch.zeros_like(texts[:, :1])), dim=1)
    column = torch.arange(f + t + e, device=device)
    text_end = f + text_lengths[:, None]
    place = torch.where(column < text_end, column, column + t - text_lengths[:, None])
    place = place.clamp(max=f + t + e)  # the row of zeros
    lengths = text_end[:, 0] + e
    return table.gather(1, place[..., None].expand(-1, -1, table.shape[2])), lengths


def inject(backbone: nn.Module, settings: dict[str, Any]) -> Any:
    """Insert LoRA adapters into the language model, in place, and return peft's model around it,
    which saves and merges them. Its modules have the names of a causal language model, `model.…`.
    Raises ConfigError if no layer has a target's name."""
    from peft import LoraConfig, get_peft_model

    linear = {n.rpartition(".")[2] for n, m in backbone.named_modules() if isinstance(m, nn.Linear)}
    if unknown := sorted(set(settings["target_modules"]) - linear):
        raise ConfigError(
            f"lora.target_modules: {unknown} are not layers of this model; it has {sorted(linear)}"
        )
    return get_peft_model(nn.ModuleDict({"model": backbone}), LoraConfig(**settings))  # type: ignore[arg-type]


def cast_backbone(decoder: BackboneDecoder, dtype: torch.dtype) -> BackboneDecoder:
    """Store the language model's own weights in `dtype`; heads, speech embedding and adapters
    stay float32."""
    for name, parameter in decoder.backbone.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    return decoder
