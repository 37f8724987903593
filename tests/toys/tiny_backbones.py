"""Tiny language models and checkpoints, on disk in the formats in which they are published."""

import math
from pathlib import Path

import torch
from tiny_decoders import random_blocks, sharpen_heads

from dcar.decoding import Prompt
from dcar.model.backbones.cosyvoice_lm import MODEL_TYPE
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder
from dcar.model.batch import SpeechBatch, speech_batch

CODES = 12
SIZES = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=512,
)
LLASA_MARKS = (
    "<|TEXT_GENERATION_START|> <|TEXT_GENERATION_END|> <|TEXT_UNDERSTANDING_START|> "
    "<|TEXT_UNDERSTANDING_END|> <|SPEECH_GENERATION_START|> <|SPEECH_GENERATION_END|> "
    "<|SPEECH_UNDERSTANDING_START|> <|SPEECH_UNDERSTANDING_END|>"
).split()
CHAT = (
    "{% for m in messages %}<|head|>{{ m['role'] }}<|eoh|>\n\n{{ m['content'] | trim "
    "}}<|eot|>{% endfor %}"
)

YAML = """sample_rate: 22050
llm: !new:cosyvoice.llm.llm.TransformerLM
    text_encoder: !new:cosyvoice.transformer.encoder.ConformerEncoder
        input_layer: 'linear'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        use_cnn_module: False
        static_chunk_size: 1
    llm: !new:cosyvoice.transformer.encoder.TransformerEncoder
        input_layer: 'linear_legacy'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        static_chunk_size: 1

flow: !new:cosyvoice.flow.flow.MaskedDiffWithXvec
    input_layer: 'linear'
"""
TEXT = dict(size=24, heads=2, ffn=40, layers=2, inputs=20)
SPEECH = dict(size=32, heads=4, ffn=48, layers=3, inputs=32)


def architecture(kind: str = "qwen2", vocab_size: int = 64, **changes) -> dict:
    from transformers import AutoConfig

    sizes = {**SIZES, **changes}
    if kind == MODEL_TYPE:
        encoder = {**sizes, "input_size": 20, "hidden_size": 24, "num_attention_heads": 2}
        return {
            **sizes,
            "model_type": kind,
            "vocab_size": vocab_size,
            "text_encoder": encoder,
            "num_key_value_heads": sizes["num_attention_heads"],
        }
    if kind == "mistral":
        sizes.setdefault("sliding_window", None)
    return AutoConfig.for_model(kind, vocab_size=vocab_size, **sizes).to_dict()


def tiny_backbone(
    heads: int = 4,
    seed: int = 0,
    kind: str = "qwen2",
    sharpen: float = 6.0,
    head_kind: str = "independent",
    **changes,
) -> BackboneDecoder:
    """Return a random decoder on a random language model, sharpened so that its distributions
    are far from uniform."""
    torch.manual_seed(seed)
    settings = dict(
        architecture=architecture(kind),
        speech_vocab_size=CODES,
        num_prediction_heads=heads,
        head_blocks=2,
        heads=head_kind,
        bos=True,
        sequence_start=True,
        text_prefix=(3, 4),
        text_suffix=(5,),
    )
    if kind == MODEL_TYPE:  # its text encoder reads only the text
        settings |= dict(text_prefix=(), text_suffix=())
    with random_blocks("dcar.model.backbones.decoder"):
        decoder = BackboneDecoder(BackboneConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for name, parameter in decoder.backbone.named_parameters():
            # different from their initial values
            if name.endswith(("bias", "bias_u", "bias_v", "q_norm.weight", "k_norm.weight")):
                parameter.normal_(std=0.5)
            elif parameter.dim() > 1:
                parameter.mul_(4 if kind != MODEL_TYPE else 1)
        decoder.speech_embedding.weight.mul_(20)
    sharpen_heads(decoder.heads, sharpen / 2)
    return decoder


@torch.no_grad()
def plain_hidden(decoder: BackboneDecoder, text: list[int], speech: list[int]) -> torch.Tensor:
    """Return the hidden states [S, D] of the language model's own pass over one sequence without
    padding, cache or mask."""
    config, embed = decoder.config, decoder.backbone.embed_tokens
    codes = decoder.speech_embedding.weight.to(embed.weight.dtype)
    parts = [codes[config.start + 1][None]] if config.sequence_start else []
    parts.append(embed(torch.tensor([*config.text_prefix, *text, *config.text_suffix])))
    if not config.bos:
        parts.append(codes[config.start][None])
    x = torch.cat([*parts, codes[torch.tensor(speech)]])[None]
    return (
        decoder.backbone(inputs_embeds=x, use_cache=False)
        .last_hidden_state[0, -len(speech) :]
        .float()
    )


def tiny_prompts(bos: bool = True) -> list[Prompt]:
    """Return seven prompts of different text and prompt lengths."""
    return [
        Prompt(
            f"utt{i}",
            tuple((3 * i + j) % 19 + 1 for j in range(3 + i)),
            tuple((i + j) % CODES for j in range(i if bos else i + 1)),
        )
        for i in range(7)
    ]


def tiny_text_tokenizer(extra: list[str] | None = None, chat: str | None = None):
    """Return a byte-pair tokenizer trained on two sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|pad|>", "<|head|>", "<|eoh|>", "<|eot|>"],
        show_progress=False,
    )
    backend.train_from_iterator(
        ["a red house stands on a green hill", "convert the text to speech"], trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|eot|>"
    )
    if extra:
        tokenizer.add_tokens(extra, special_tokens=True)
    tokenizer.chat_template = chat
    return tokenizer


def write_cosyvoice2(folder: Path) -> dict[str, torch.Tensor]:
    """Write a tiny CosyVoice2-0.5B: llm.pt and CosyVoice-BlankEN/; return the tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    blank = folder / "CosyVoice-BlankEN"
    tokenizer = tiny_text_tokenizer()
    tokenizer.save_pretrained(str(blank))
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), tie_word_embeddings=True, **SIZES
    )
    config.save_pretrained(str(blank))
    model = AutoModelForCausalLM.from_config(config)
    tensors = {f"llm.model.{k}": v.detach().clone() for k, v in model.state_dict().items()}
    width = config.hidden_size
    tensors |= {
        "llm_embedding.weight": torch.randn(2, width),
        "speech_embedding.weight": torch.randn(CODES + 3, width),
        "llm_decoder.weight": torch.randn(CODES + 3, width),
        "llm_decoder.bias": torch.randn(CODES + 3),
    }
    torch.save({**tensors, "epoch": 3, "step": 7}, folder / "llm.pt")
    return tensors


def write_cosyvoice1(folder: Path) -> dict[str, torch.Tensor]:
    """Write a tiny CosyVoice-300M: llm.pt with the names of the published one, cosyvoice.yaml,
    and in whisper/ a tokenizer of another size in place of Whisper's; return the tensors."""
    torch.manual_seed(0)
    tokenizer = tiny_text_tokenizer()
    tokenizer.save_pretrained(str(folder / "whisper"))
    t: dict[str, torch.Tensor] = {}

    def linear(name: str, inputs: int, outputs: int, bias: bool = True, scale: float = 2.0) -> None:
        t[f"{name}.weight"] = scale * torch.randn(outputs, inputs) / math.sqrt(inputs)
        if bias:
            t[f"{name}.bias"] = 0.3 * torch.randn(outputs)

    def norm(name: str, size: int) -> None:
        t[f"{name}.weight"] = 1 + 0.2 * torch.randn(size)
        t[f"{name}.bias"] = 0.2 * torch.randn(size)

    def encoder(name: str, shape: dict[str, int], norms: tuple[str, str]) -> None:
        size = shape["size"]
        linear(f"{name}.embed.out.0", shape["inputs"], size)
        norm(f"{name}.embed.out.1", size)
        norm(f"{name}.after_norm", size)
        for i in range(shape["layers"]):
            at = f"{name}.encoders.{i}"
            for which in ("q", "k", "v", "out"):
                linear(f"{at}.self_attn.linear_{which}", size, size)
            linear(f"{at}.self_attn.linear_pos", size, size, bias=False)
            for which in "uv":
                t[f"{at}.self_attn.pos_bias_{which}"] = torch.randn(
                    shape["heads"], size // shape["heads"]
                )
            linear(f"{at}.feed_forward.w_1", size, shape["ffn"])
            linear(f"{at}.feed_forward.w_2", shape["ffn"], size)
            for which in norms:
                norm(f"{at}.{which}", size)

    width = SPEECH["size"]
    t["text_embedding.weight"] = torch.randn(len(tokenizer), TEXT["inputs"])
    encoder("text_encoder", TEXT, ("norm_ff", "norm_mha"))
    linear("text_encoder_affine_layer", TEXT["size"], width)
    t["llm_embedding.weight"] = torch.randn(2, width)
    t["speech_embedding.weight"] = torch.randn(CODES, width)
    encoder("llm", SPEECH, ("norm1", "norm2"))
    linear("llm_decoder", width, CODES + 1)
    linear("spk_embed_affine_layer", 192, width)
    torch.save({**t, "epoch": 3, "step": 7}, folder / "llm.pt")
    (folder / "cosyvoice.yaml").write_text(YAML)
    return t


def rewritten(folder: Path, tensors: dict[str, torch.Tensor], **changes) -> None:
    """Write the tensors of a folder again with some changes; None leaves one out."""
    torch.save(
        {k: v for k, v in {**tensors, **changes}.items() if v is not None}, folder / "llm.pt"
    )


def write_llasa(folder: Path, codes: int = CODES):
    """Write a tiny LLaSA: a Llama with its marks and codes at the end of the vocabulary, and its
    tokenizer; return both."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer = tiny_text_tokenizer([*LLASA_MARKS, *[f"<|s_{i}|>" for i in range(codes)]], CHAT)
    tokenizer.save_pretrained(str(folder))
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), tie_word_embeddings=True, **SIZES
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(str(folder))
    return model, tokenizer


def batch() -> SpeechBatch:
    return speech_batch([[1, 2, 3], [4, 5, 6, 7, 8]], [[1, 2, 13, 5, 6, 7], [3, 13, 9, 10]], [3, 2])
