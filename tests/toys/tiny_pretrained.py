"""Random models of transformers with a few thousand parameters, saved as their publishers do."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers


def save_hubert(
    folder: Path,
    seed: int = 0,
    hidden: int = 32,
    rate: int = 16_000,
    normalize: bool = True,
    large: bool = True,
) -> Path:
    """Save a HuBERT of two layers and its feature extractor.

    large: the architecture of HuBERT-Large, else that of HuBERT-base.
    """
    torch.manual_seed(seed)
    config = transformers.HubertConfig(
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=[16] * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        do_stable_layer_norm=large,
        feat_extract_norm="layer" if large else "group",
    )
    transformers.HubertModel(config).eval().save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(
        sampling_rate=rate, do_normalize=normalize
    ).save_pretrained(folder)
    return folder


def save_whisper(folder: Path) -> Path:
    """Save a Whisper that transcribes noise as a few letters."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = ["a", "b", "c", "Ġ", "Ġa", "ab"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nĠ a\n")
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[("a", "b"), ("Ġ", "a")])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|startoftranscript|>"]})
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        encoder_layers=1,
        decoder_layers=1,
        d_model=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_target_positions=64,
        pad_token_id=end,
        bos_token_id=start,
        eos_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight.mul_(20)
        model.model.decoder.embed_tokens.weight[[start, end, vocabulary["Ġ"]]] *= 0.01
    model.save_pretrained(folder)
    transformers.WhisperProcessor(
        transformers.WhisperFeatureExtractor(), tokenizer
    ).save_pretrained(folder)
    return folder


def save_ctc(
    folder: Path, family: str = "Hubert", norm: str = "group", seed: int = 2
) -> tuple[Any, list[str]]:
    """Save a random CTC model in the real format; return it with its symbols."""
    symbols = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABC"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate(symbols)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=norm == "layer")
    transformers.Wav2Vec2Processor(extractor, tokenizer).save_pretrained(folder)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(symbols),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=[8] * 7,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        pad_token_id=0,
        ctc_loss_reduction="sum",
        feat_extract_norm=norm,
        do_stable_layer_norm=norm == "layer",
    )
    model = getattr(transformers, f"{family}ForCTC")(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
    model.save_pretrained(folder)
    return model, symbols
