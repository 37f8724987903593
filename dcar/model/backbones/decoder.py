"""CAR heads on a pretrained causal language model of `transformers`, with the interface of `CARDecoder`.

One sequence, causal throughout, as such models were trained: prefix (text with its template), then speech. Speech has
an embedding table and heads of its own, whether the source kept speech ids in its vocabulary (LLaSA) or beside it
(CosyVoice 2): ids are 0..V-1 codes, V = EOS, V + 1 = start of speech, V + 2 = start of the sequence (where there is
one). What the decoding loop, stage one, DCPO, export and the comparison use of a decoder is the same here.

The language model runs as it is; only its cache is ours (heads/layers.py), handed to every attention layer through
the one method that it calls, `update`. So rows of a batch advance, roll back and leave independently of each other.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dcar.errors import CheckpointError, ConfigError
from dcar.model.backbones.cosyvoice_lm import MODEL_TYPE, CosyVoiceLM
from dcar.model.car import SpeechDecoder, SpeechVocabulary
from heads.build import build_heads
from heads.layers import KVCache

UNUSED = {"id2label", "label2id", "problem_type", "transformers_version", "architectures", "dtype", "torch_dtype"}
TEXT_TOKENIZER_FOLDER = "text_tokenizer"  # beside a decoder whose text is not phonemes


def _named(name: str) -> Any:
    """A property: a number of the language model, by the name that `transformers` has for it."""
    return property(lambda self: int(self.architecture[name]))


@dataclass
class BackboneConfig(SpeechVocabulary):
    """Shape and layout of a decoder on a language model. `bos`, `tokenizer`, `phonemes` as in `CARConfig`."""

    architecture: dict[str, Any] = field(default_factory=dict)  # config of the language model, with its model_type
    source: str = ""  # what it was made from: cosyvoice2, llasa, causal-lm, or text-lm (which knew no speech)
    speech_vocab_size: int = 0  # V codes
    num_prediction_heads: int = 7
    heads: str = "independent"  # or shared; this and what follows as in CARConfig
    head_blocks: int = 4
    share_head_blocks: bool = False
    zero_init_heads: bool = True
    head_width: int = 0
    tie_heads: bool = False
    base_head_bias: bool = False  # CosyVoice 2's has one
    # True: speech prompt without its text, then the start symbol, then the target. False: the start symbol closes the
    # prefix, and the prompt is the beginning of the speech (zero-shot layout of CosyVoice 2 and LLaSA).
    bos: bool = False
    sequence_start: bool = False  # the prefix begins with a vector of its own (CosyVoice's sos)
    text_prefix: tuple[int, ...] = ()  # ids before and
    text_suffix: tuple[int, ...] = ()  # behind the text: the model's template
    lora: dict[str, Any] | None = None  # adapters on the language model, see lora.py
    tokenizer: str = ""
    phonemes: str = ""  # the text tokenizer's name and checksum, see dcar/prepare/retokenize.py

    def __post_init__(self):
        # without entries that do not describe the weights or do not survive JSON
        kept = {k: v for k, v in self.architecture.items() if k not in UNUSED and not k.startswith("_")}
        self.architecture = json.loads(json.dumps(kept))

    @property
    def start(self) -> int:
        """Speech id of the start symbol."""
        return self.speech_vocab_size + 1

    text_vocab_size, hidden_size = _named("vocab_size"), _named("hidden_size")
    num_layers, num_attention_heads = _named("num_hidden_layers"), _named("num_attention_heads")
    ffn_size = _named("intermediate_size")

    @property
    def num_kv_heads(self) -> int:
        return int(self.architecture.get("num_key_value_heads") or self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        return int(self.architecture.get("head_dim") or self.hidden_size // self.num_attention_heads)


class LayerCache:
    """The cache interface of `transformers` over a KVCache: `update` writes and returns all columns so far."""

    is_compileable = False

    def __init__(self, cache: KVCache):
        self.cache = cache

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self.cache.write(layer, keys, values)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.cache.prefix + self.cache.longest

    def positions(self, new: Tensor) -> Tensor:
        """Positions of all columns, those that are about to be written, `new` [B, m], included: [B, C]. Empty columns
        have some position."""
        cache, count = self.cache, new.shape[1]
        column = torch.arange(cache.columns(count), device=new.device)
        known = torch.where(column < cache.prefix, column, column - cache.prefix + cache.prefix_lengths[:, None])
        at = cache.prefix + cache.lengths[:, None] + torch.arange(count, device=new.device)
        return known.scatter(1, at, new.expand(cache.batch, -1))


def language_model(architecture: dict[str, Any]) -> Any:
    """An untrained language model without its output layer. CheckpointError where its attention is not plain."""
    from transformers import AutoConfig, AutoModel

    settings = dict(architecture)
    kind = settings.pop("model_type", None)
    if kind == MODEL_TYPE:
        return CosyVoiceLM(settings)
    try:
        config = AutoConfig.for_model(kind, **settings)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"this version of transformers does not know the model type '{kind}' ({error}); install "
                              "one that does, or convert another model") from error
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if layers != {"full_attention"} or window:
        raise CheckpointError(f"'{kind}' with {sorted(layers)} and a window of {window}: the ragged cache holds all "
                              "positions, so only models with full attention in every layer can be used; set "
                              "sliding_window to null in its config.json if the sequences are shorter than the window")
    return AutoModel.from_config(config, attn_implementation="sdpa")


class BackboneDecoder(SpeechDecoder):
    """Text and speech prompt in, distributions of the next K speech tokens out; see `CARDecoder` for the methods."""

    config_class = BackboneConfig
    model_type = "dcar-backbone-decoder"

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.config = config
        self.backbone: Any = language_model(config.architecture)
        if not all(hasattr(self.backbone, name) for name in ("embed_tokens", "layers", "norm")):
            raise CheckpointError(f"'{config.architecture.get('model_type')}' is not built as embed_tokens, layers, "
                                  "norm; Llama, Qwen2, Qwen3, Mistral and their relatives are")
        width = config.hidden_size
        self.speech_embedding = nn.Embedding(config.speech_vocab_size + 3, width)
        self.heads = build_heads(config, config.base_head_bias)
        nn.init.normal_(self.speech_embedding.weight, std=0.02)
        if config.lora:
            inject(self.backbone, config.lora)
        named = inspect.signature(self.backbone.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"  # the first from transformers 5.24 on

    @property
    def norm(self) -> Any:
        return self.backbone.norm

    @property
    def layers(self) -> nn.ModuleList:
        return self.backbone.layers

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        """The modules before the layers: text embedding, others of the model, speech embedding."""
        before = [module for name, module in self.backbone.named_children() if name not in ("layers", "norm")]
        return (*before, self.speech_embedding)

    def restore_buffers(self) -> None:
        """Rotary frequencies are not part of a checkpoint; compute them again after loading."""
        rotary = getattr(self.backbone, "rotary_emb", None)
        if rotary is not None:
            self.backbone.rotary_emb = type(rotary)(config=self.backbone.config)
        if left := [name for name, buffer in self.named_buffers() if buffer.is_meta]:
            raise CheckpointError(f"'{self.config.architecture.get('model_type')}' keeps values outside its checkpoint "
                                  f"({left[:3]}) that this program cannot compute again; use another architecture")

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer's activations in the backward pass; memory for a third more time."""
        self.backbone.gradient_checkpointing_enable({"use_reentrant": False})

    # --- training -----------------------------------------------------------------------------------------------

    def speech_hidden(self, text_ids: Tensor, text_lengths: Tensor, speech_ids: Tensor, speech_lengths: Tensor,
                      prompt_lengths: Tensor) -> Tensor:
        """Hidden states [B, S, D] of the speech positions of complete sequences, without a cache."""
        prefix, lengths = self.prefix(text_ids, text_lengths)
        return self._run(prefix, lengths, speech_ids, None)

    def prefix(self, text_ids: Tensor, text_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [B, N', D] of text with template and special symbols, and how many of them are real [B]."""
        config = self.config
        embed = self.backbone.embed_tokens
        marks = torch.arange(config.start, self.speech_embedding.num_embeddings, device=text_ids.device)
        special = self.speech_embedding(marks)[:, None].to(embed.weight.dtype)  # [2, 1, D]
        before, behind = ([embed(torch.tensor(ids, device=text_ids.device))] if ids else []
                          for ids in (config.text_prefix, config.text_suffix))
        if config.sequence_start:
            before.insert(0, special[1])
        if not config.bos:
            behind.append(special[0])
        rows = [torch.cat([*before, text[:length], *behind])
                for text, length in zip(embed(text_ids), text_lengths.tolist(), strict=True)]
        lengths = torch.tensor([len(row) for row in rows], device=text_ids.device)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths

    def _run(self, prefix: Tensor, lengths: Tensor, speech_ids: Tensor, cache: KVCache | None) -> Tensor:
        """Prefix [B, N', D] and speech [B, S] in one pass -> hidden [B, S, D]; positions follow each row's own text."""
        n, s = prefix.shape[1], speech_ids.shape[1]
        column = torch.arange(n + s, device=prefix.device)
        real = (column < lengths[:, None]) | (column >= n)  # [B, N' + S]
        mask = (column <= column[:, None]) & real[:, None]  # [B, N' + S, N' + S]; every row sees at least column 0
        positions = torch.where(column < n, column, column - n + lengths[:, None])
        x = torch.cat((prefix, self.speech_embedding(speech_ids).to(prefix.dtype)), dim=1)
        return self._pass(x, positions, mask[:, None], cache)[:, n:]

    def _pass(self, x: Tensor, positions: Tensor, mask: Tensor, cache: KVCache | None) -> Tensor:
        view = None if cache is None else LayerCache(cache)
        out = self.backbone(inputs_embeds=x, position_ids=positions, attention_mask=mask,
                            use_cache=view is not None, **{self._cache_name: view})
        return out.last_hidden_state.to(self.heads.base.weight.dtype)  # the heads may be of higher precision

    # --- decoding -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, text_ids: Tensor, text_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor,
                capacity: int) -> tuple[KVCache, Tensor]:
        """Read text [B, N] and speech prompt [B, P]; the cache (room for `capacity` speech positions) and the hidden
        states [B, P, D] of the prompt."""
        config = self.config
        prefix, lengths = self.prefix(text_ids, text_lengths)
        n, p = prefix.shape[1], prompt_ids.shape[1]
        cache = KVCache(config.num_layers, len(text_ids), config.num_kv_heads, n + max(capacity, p), config.head_dim,
                        device=text_ids.device, dtype=prefix.dtype)
        hidden = self._run(prefix, lengths, prompt_ids, cache)
        cache.prefix, cache.prefix_lengths = n, lengths
        cache.lengths, cache.longest = prompt_lengths, p
        return cache, hidden

    @torch.no_grad()
    def extend(self, cache: KVCache, tokens: Tensor, counts: Tensor,
               layout: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Consume tokens[b, :counts[b]] behind each row's past in one pass: tokens [B, m] -> hidden [B, m, D].

        `layout` makes the tokens a tree: attention mask [B or 1, m, m] and positions [B or 1, m] from the end of the
        past on. Without it they are a chain.
        """
        new = tokens.shape[1]
        tree, offsets = (None, torch.arange(new, device=tokens.device)) if layout is None else layout
        positions = (cache.prefix_lengths + cache.lengths)[:, None] + offsets
        mask = cache.mask(new, tree)
        if mask is None:  # every position sees every column
            mask = torch.ones(1, 1, new, cache.columns(new), dtype=torch.bool, device=tokens.device)
        x = self.speech_embedding(tokens).to(self.backbone.embed_tokens.weight.dtype)
        hidden = self._pass(x, positions, mask, cache)
        cache.advance(counts, new)
        return hidden


def peft_config(settings: dict[str, Any]):
    """The `LoraConfig` of peft for `LoraSettings` (dcar/model/backbones/lora.py)."""
    from peft import LoraConfig

    return LoraConfig(r=settings["rank"], lora_alpha=settings["alpha"], lora_dropout=settings["dropout"],
                      target_modules=list(settings["targets"]), bias="none")


def inject(backbone: nn.Module, settings: dict[str, Any]) -> None:
    """Put LoRA adapters into the language model, in place. ConfigError where no layer has a target's name."""
    from peft import inject_adapter_in_model

    names = {name.rpartition(".")[2] for name, _ in backbone.named_modules()}
    if unknown := sorted(set(settings["targets"]) - names):
        linear = {n.rpartition(".")[2] for n, m in backbone.named_modules() if isinstance(m, nn.Linear)}
        raise ConfigError(f"lora targets {unknown} are no layers of this model; it has {sorted(linear)}")
    inject_adapter_in_model(peft_config(settings), backbone)


def check_ragged(decoder: BackboneDecoder, tolerance: float = 1e-3) -> None:
    """CheckpointError if this language model, run on the ragged cache, differs from its own forward pass.

    Two rows of different lengths are read in pieces, rolled back and extended again; each must have the hidden states
    that the model gives for its plain sequence alone. Some architectures ignore a given mask or position.
    """
    config, device = decoder.config, decoder.speech_embedding.weight.device
    training = decoder.training
    decoder.eval()
    text = torch.arange(1, 6, device=device)[None].repeat(2, 1) % config.text_vocab_size
    text_lengths = torch.tensor([5, 2], device=device)
    speech = torch.arange(9, device=device)[None].repeat(2, 1) % config.speech_vocab_size
    cache, hidden = decoder.prefill(text, text_lengths, speech[:, :3], torch.tensor([3, 2], device=device), 12)
    states = [[*hidden[0, :3]], [*hidden[1, :2]]]
    decoder.extend(cache, speech[:, :4].flip(1), torch.tensor([4, 1], device=device))  # a draft that is rejected
    cache.truncate(cache.lengths - torch.tensor([4, 1], device=device))
    for counts in ([2, 3], [3, 1], [1, 2]):
        start = cache.lengths
        index = (start[:, None] + torch.arange(max(counts), device=device)).clamp(max=8)
        hidden = decoder.extend(cache, speech.gather(1, index), torch.tensor(counts, device=device))
        for row, count in enumerate(counts):
            states[row] += [*hidden[row, :count]]
    for row, length in enumerate(text_lengths.tolist()):
        prefix, size = decoder.prefix(text[row : row + 1, :length], text_lengths[row : row + 1])
        count = len(states[row])
        x = torch.cat((prefix, decoder.speech_embedding(speech[row : row + 1, :count]).to(prefix.dtype)), dim=1)
        with torch.no_grad():
            plain = decoder.backbone(inputs_embeds=x, use_cache=False).last_hidden_state[0, int(size):]
        error = float((torch.stack(states[row]) - plain).abs().max() / plain.abs().max())
        if not error < tolerance:
            kind = config.architecture.get("model_type")
            raise CheckpointError(f"'{kind}' does not follow the ragged cache: hidden states differ by {error:.1e} of "
                                  f"their largest value (tolerance {tolerance:.0e}); use an architecture whose "
                                  "attention reads the mask and positions that it is given")
    decoder.train(training)


def cast_backbone(decoder: BackboneDecoder, dtype: torch.dtype) -> BackboneDecoder:
    """Store the language model's own weights in `dtype`; heads, speech embedding and adapters stay float32."""
    for name, parameter in decoder.backbone.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    return decoder
