"""Wrapper of a CARDecoder for Hugging Face's `generate`, the reference of the speed benchmark: the
same weights and mathematics, another decoding loop.

Speech codes, EOS and BOS keep their ids, text ids come after them; the input is one row, text then
speech prompt. EOS is never generated, so that every run has the requested number of tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from dcar.decoding import Prompt
from dcar.errors import ConfigError
from dcar.model.car import CARDecoder
from dcar.model.draft import AnyDecoder
from heads.layers import rotate

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Name of the cache in transformers: the first name from 5.24 on."""


class PeerConfig(PretrainedConfig):
    model_type = "dcar-peer"


class CausalLMPeer(PreTrainedModel, GenerationMixin):
    """Next-token decoding with head 1, batch 1."""

    config_class = PeerConfig
    _supports_sdpa = True

    def __init__(self, decoder: AnyDecoder):
        """Wrap a decoder. Raises ConfigError for a decoder on a language model, which Hugging
        Face's loop decodes as it is."""
        if not isinstance(decoder, CARDecoder):
            raise ConfigError(
                "the peer of `what=speed` is made of a CARDecoder, not of a "
                f"{type(decoder).__name__}; leave peers out of `parts`"
            )
        c = decoder.config
        config = PeerConfig()
        config.vocab_size, config.pad_token_id = c.output_size, c.eos
        config.hidden_size, config.num_hidden_layers = c.hidden_size, len(decoder.layers)
        config.num_attention_heads = c.num_attention_heads
        super().__init__(config)
        self.decoder = decoder
        self.text = self.prompt = 0
        self.offset = decoder.speech_embedding.num_embeddings  # text ids come after all speech ids

    def read(self, prompt: Prompt) -> Tensor:
        """Return input ids [1, text + speech prompt]; the model stores where the text ends."""
        bos = (self.decoder.config.speech_vocab_size + 1,) if self.decoder.config.bos else ()
        speech = (*prompt.prompt_ids, *bos)
        self.text, self.prompt = len(prompt.text_ids), len(speech)
        ids = [*(self.offset + t for t in prompt.text_ids), *speech]
        return torch.tensor([ids], device=self.device)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        past = int(kwargs[CACHE].get_seq_length())
        keep = kwargs.get("logits_to_keep")
        return {"input_ids": input_ids[:, past:], CACHE: kwargs[CACHE], "logits_to_keep": keep}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,  # of one row: all is seen
        logits_to_keep: int | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        d, device = self.decoder, input_ids.device
        cache = past_key_values if cache is None else cache
        past, new = int(cache.get_seq_length()), input_ids.shape[1]
        origin = self.prompt - 1 if d.config.bos else 0  # the speech that has position 0
        if past == 0:
            text = torch.arange(self.text, device=device)[None]
            speech = torch.arange(new - self.text, device=device)[None] - origin
            tables = zip(d.text_rotary(text), d.speech_rotary(speech), strict=True)
            cos, sin = (torch.cat(pair, 2) for pair in tables)
            text_ids, speech_ids = input_ids.split([self.text, new - self.text], 1)
            embedded = d.text_embedding(text_ids - self.offset), d.speech_embedding(speech_ids)
            x = torch.cat(embedded, 1)
        else:
            cos, sin = d.speech_rotary.span(past - self.text - origin, new, device)
            x = d.speech_embedding(input_ids)
        width = cache.get_max_length()
        width = past + new if width is None or width < 0 else width
        mask = None
        if past == 0 or new > 1 or width > past + 1:
            column = torch.arange(width, device=device)
            visible = column <= past + torch.arange(new, device=device)[:, None]
            mask = (visible | (column < self.text))[None, None]  # every position sees all text
        layer: Any
        for index, layer in enumerate(d.layers):  # `TransformerLayer.forward` on this cache
            qkv = layer.project(x)
            q, k = rotate(qkv[:2], cos, sin)
            keys, values = cache.update(k, qkv[2], index)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = x + layer.out(y.transpose(1, 2).reshape(x.shape))
            x = x + layer.down(F.gelu(layer.up(layer.ffn_norm(x)), approximate="tanh"))
        logits = d.heads.base(d.norm(x[:, -(logits_to_keep or 1) :])).float()
        logits[..., d.config.eos] = -1e9
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


@torch.inference_mode()
def generate(
    peer: CausalLMPeer,
    prompt: Prompt,
    tokens: int,
    static: bool = False,
    assistant: CausalLMPeer | None = None,
    draft_length: int = 3,
) -> list[int]:
    """Generate exactly `tokens` tokens greedily with Hugging Face's loop; an assistant drafts
    `draft_length` tokens for every pass, whatever its confidence."""
    ids = peer.read(prompt)
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    if static:
        # transformers would compile this on a GPU, but the forward asks for lengths as numbers
        settings |= {"cache_implementation": "static", "disable_compile": True}
    if assistant is not None:
        assistant.read(prompt)
        drafting = assistant.generation_config
        drafting.num_assistant_tokens = draft_length
        drafting.num_assistant_tokens_schedule = "constant"
        drafting.assistant_confidence_threshold = 0.0
        settings["assistant_model"] = assistant
    out = peer.generate(ids, attention_mask=torch.ones_like(ids), **settings)  # type: ignore[operator]
    return out[0, ids.shape[1] :].tolist()
