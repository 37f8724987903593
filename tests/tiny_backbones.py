"""Language models and checkpoints in miniature, on disk in the formats in which they are published."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_decoders import sharpen_heads

from dcar.decoding import Prompt
from dcar.decoding.batch import pad
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder

CODES = 12
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
             max_position_embeddings=512)
LLASA_MARKS = ["<|TEXT_GENERATION_START|>", "<|TEXT_GENERATION_END|>", "<|TEXT_UNDERSTANDING_START|>",
               "<|TEXT_UNDERSTANDING_END|>", "<|SPEECH_GENERATION_START|>", "<|SPEECH_GENERATION_END|>",
               "<|SPEECH_UNDERSTANDING_START|>", "<|SPEECH_UNDERSTANDING_END|>"]
CHAT = ("{% for m in messages %}<|head|>{{ m['role'] }}<|eoh|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}")


def architecture(kind: str = "qwen2", vocab_size: int = 64, **changes) -> dict:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, vocab_size=vocab_size, **{**SIZES, **changes}).to_dict()


def tiny_backbone(heads: int = 4, seed: int = 0, kind: str = "qwen2", sharpen: float = 6.0,
                  head_kind: str = "independent", **changes) -> BackboneDecoder:
    """A random decoder on a random language model; sharpened so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    settings = dict(architecture=architecture(kind), speech_vocab_size=CODES, num_prediction_heads=heads, head_blocks=2,
                    heads=head_kind, zero_init_heads=False, bos=True, sequence_start=True, text_prefix=(3, 4),
                    text_suffix=(5,))
    decoder = BackboneDecoder(BackboneConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for parameter in decoder.backbone.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
        decoder.speech_embedding.weight.mul_(20)
    sharpen_heads(decoder.heads, sharpen / 2)
    return decoder


def tiny_prompts(bos: bool = True) -> list[Prompt]:
    """Seven prompts of different text and prompt lengths."""
    return [Prompt(f"utt{i}", tuple((3 * i + j) % 19 + 1 for j in range(3 + i)),
                   tuple((i + j) % CODES for j in range(i if bos else i + 1))) for i in range(7)]


def tiny_text_tokenizer(extra: list[str] | None = None, chat: str | None = None):
    """A byte-pair tokenizer trained on two sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|pad|>", "<|head|>", "<|eoh|>", "<|eot|>"], show_progress=False)
    backend.train_from_iterator(["a red house stands on a green hill", "convert the text to speech"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|eot|>")
    if extra:
        tokenizer.add_tokens(extra, special_tokens=True)
    tokenizer.chat_template = chat
    return tokenizer


def write_cosyvoice2(folder: Path, codes: int = CODES, drop: tuple[str, ...] = (), **extra) -> dict[str, torch.Tensor]:
    """CosyVoice2-0.5B in small: llm.pt and CosyVoice-BlankEN/; returns the tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    blank = folder / "CosyVoice-BlankEN"
    tokenizer = tiny_text_tokenizer()
    tokenizer.save_pretrained(str(blank))
    config = AutoConfig.for_model("qwen2", vocab_size=len(tokenizer), tie_word_embeddings=True, **SIZES)
    config.save_pretrained(str(blank))
    model = AutoModelForCausalLM.from_config(config)
    tensors = {f"llm.model.{k}": v.detach().clone() for k, v in model.state_dict().items()}
    width = config.hidden_size
    tensors |= {
        "llm_embedding.weight": torch.randn(2, width), "speech_embedding.weight": torch.randn(codes + 3, width),
        "llm_decoder.weight": torch.randn(codes + 3, width), "llm_decoder.bias": torch.randn(codes + 3),
    }
    torch.save({**{k: v for k, v in tensors.items() if k not in drop}, "epoch": 3, "step": 7, **extra},
               folder / "llm.pt")
    return tensors


def write_llasa(folder: Path, codes: int = CODES):
    """LLaSA in small: a Llama with its marks and codes at the end of the vocabulary, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer = tiny_text_tokenizer([*LLASA_MARKS, *[f"<|s_{i}|>" for i in range(codes)]], CHAT)
    tokenizer.save_pretrained(str(folder))
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), tie_word_embeddings=True, **SIZES)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(str(folder))
    return model, tokenizer


def batch() -> dict[str, torch.Tensor]:
    text, text_lengths = pad([[1, 2, 3], [4, 5, 6, 7, 8]], "cpu")
    speech, speech_lengths = pad([[1, 2, 13, 5, 6, 7], [3, 13, 9, 10]], "cpu")
    return dict(text_ids=text, text_lengths=text_lengths, speech_ids=speech, speech_lengths=speech_lengths,
                prompt_lengths=torch.tensor([3, 2]))
