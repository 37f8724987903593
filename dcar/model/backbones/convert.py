"""Conversion of a pretrained language model into a decoder: its weights, a speech embedding, and K
heads.

    dcar convert-backbone kind=cosyvoice2 \\
        source=pretrained_models/CosyVoice2-0.5B out=runs/cosyvoice2
    dcar convert-backbone kind=cosyvoice source=pretrained_models/CosyVoice-300M out=runs/cosyvoice
    dcar convert-backbone kind=llasa source=HKUSTAudio/Llasa-1B out=runs/llasa_1b heads=7
    dcar convert-backbone kind=causal-lm source=Qwen/Qwen2.5-0.5B \\
        speech_vocab_size=2048 phonemes=true bos=true out=runs/qwen

The base head is the model's own output layer, so before any training car-1 generates the same as
the model. The additional heads start from it (their blocks near the identity, Medusa's
initialisation) and have to be trained: `dcar train backbone.path=…`. The output folder contains the
decoder, its text tokenizer, and a model card.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dcar.config import check, load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import CheckpointError, ConfigError
from dcar.model.backbones.causal_lm import (
    SpeechIds,
    TextTokenizer,
    llasa_ids,
    llasa_template,
    load_causal_lm,
)
from dcar.model.backbones.cosyvoice import BLANK, load_cosyvoice1, load_cosyvoice2
from dcar.model.backbones.decoder import TEXT_TOKENIZER_FOLDER, BackboneDecoder
from dcar.model.cards import decoder_card
from dcar.process import run_claimed
from dcar.text.units import units_for
from dcar.tracking import provenance, write_json
from heads.build import HEAD_KINDS

KINDS = ("cosyvoice2", "cosyvoice", "llasa", "causal-lm")


@dataclass
class ConvertConfig:
    """Settings of `dcar convert-backbone`."""

    kind: str = setting(meaning="What the source is; cosyvoice is CosyVoice-300M.", choices=KINDS)
    source: str = setting(
        meaning="Folder of the published model (causal-lm and llasa: or its name on the Hub)."
    )
    out: str = setting(meaning="Folder to write.", place="folder")
    heads: int = setting(7, "Number of prediction heads K, base head included.", minimum=1)
    head_kind: str = setting(
        "independent",
        "Kind of prediction heads (setting `heads` of a decoder): independent, or shared, one "
        "stack for all offsets.",
        choices=HEAD_KINDS,
    )
    head_blocks: int = setting(
        4, "Number of residual blocks of every additional head, or of the shared stack.", minimum=1
    )
    bos: bool = setting(
        False,
        "Layout of the prompt: true = another utterance without its text, closed by the start "
        "symbol; false = zero-shot.",
    )
    tokenizer: str = setting(
        "", "name@checksum of the speech tokenizer; empty = that of the first corpus trained on."
    )
    phonemes: bool = setting(
        False,
        "causal-lm: whether text is phonemes of this project instead of the model's own tokens.",
    )
    speech_vocab_size: int = setting(
        0, "Number of speech codes; checked against the model if it has speech already.", minimum=0
    )
    first_speech_id: int = setting(
        -1,
        "causal-lm: id of code 0 in its vocabulary; -1 = the model has no speech yet.",
        minimum=-1,
    )
    start_id: int = setting(
        -1, "causal-lm with first_speech_id: id of the start of speech.", minimum=-1
    )
    eos_id: int = setting(
        -1, "causal-lm with first_speech_id: id of the end of speech.", minimum=-1
    )
    text_tokenizer: str = setting(
        "openai/whisper-large-v3",
        "cosyvoice: Whisper's text tokenizer, which CosyVoice's folder does not contain.",
    )
    normalize: str = setting(
        "",
        "Language (code of ISO 639) in whose spoken form texts are written out before the model's "
        "tokenizer reads them, numbers in words for example; empty = as they are written.",
    )
    seed: int = seed_setting(0, "Random seed for the additional heads.")

    def __post_init__(self):
        check(self)
        if self.first_speech_id >= 0 and (
            self.speech_vocab_size < 1 or min(self.start_id, self.eos_id) < 0
        ):
            raise ConfigError(
                "first_speech_id needs speech_vocab_size, start_id and eos_id as well"
            )


def convert(config: ConvertConfig) -> BackboneDecoder:
    """Build the decoder and save it. Raises CheckpointError."""
    torch.manual_seed(config.seed)
    source, out = Path(config.source), Path(config.out)
    settings: dict[str, Any] = dict(
        num_prediction_heads=config.heads,
        heads=config.head_kind,
        head_blocks=config.head_blocks,
        bos=config.bos,
        tokenizer=config.tokenizer,
    )
    text: TextTokenizer | None = None
    if config.kind == "cosyvoice2":
        folder = (source if source.is_dir() else source.parent) / BLANK
        text = TextTokenizer.from_pretrained(folder, config.normalize)
        decoder = load_cosyvoice2(
            source, folder, config.speech_vocab_size, phonemes=text.name, **settings
        )
    elif config.kind == "cosyvoice":
        text = TextTokenizer.from_pretrained(config.text_tokenizer, config.normalize)
        decoder = load_cosyvoice1(source, config.speech_vocab_size, phonemes=text.name, **settings)
        if text.size != decoder.config.text_vocab_size:
            raise CheckpointError(
                f"{config.text_tokenizer}: a tokenizer of {text.size} ids, but the model has "
                f"{decoder.config.text_vocab_size} text embeddings; give text_tokenizer=… "
                "(CosyVoice-"
                "300M reads the ids of openai/whisper-large-v3)"
            )
    elif config.kind == "llasa":
        text = TextTokenizer.from_pretrained(config.source, config.normalize)
        ids = llasa_ids(text.tokenizer, config.source)
        prefix, suffix = llasa_template(text.tokenizer)
        decoder = load_causal_lm(
            config.source,
            ids,
            config.speech_vocab_size,
            source="llasa",
            phonemes=text.name,
            text_prefix=prefix,
            text_suffix=suffix,
            **settings,
        )
    else:
        if not config.phonemes:
            text = TextTokenizer.from_pretrained(config.source, config.normalize)
            settings["phonemes"] = text.name
        codes = range(config.first_speech_id, config.first_speech_id + config.speech_vocab_size)
        speech = (
            SpeechIds(list(codes), config.eos_id, config.start_id)
            if config.first_speech_id >= 0
            else None
        )
        decoder = load_causal_lm(
            config.source,
            speech,
            config.speech_vocab_size,
            source="causal-lm" if speech else "text-lm",
            **settings,
        )
        if config.phonemes and decoder.config.text_vocab_size < units_for().size:
            raise ConfigError(
                f"the model has {decoder.config.text_vocab_size} text embeddings, fewer than the "
                f"{units_for().size} phonemes; choose a larger model or phonemes=false"
            )
    if config.heads > 1:
        decoder.heads.start_outputs(decoder.heads.base.weight)
    origin = provenance(source=config.source, kind=config.kind, checksum=decoder.checksum())
    decoder.save_pretrained(out, card=decoder_card(decoder, origin))
    if text is not None:
        text.tokenizer.save_pretrained(str(out / TEXT_TOKENIZER_FOLDER))
    write_json(out / "provenance.json", origin)
    return decoder


CONFIG = ConvertConfig


def main(arguments: Sequence[str] | None = None) -> None:
    config = load_config(CONFIG, arguments)
    decoder = run_claimed(convert, config)
    size = sum(p.numel() for p in decoder.parameters())
    print(
        f"{config.out}: {size / 1e6:.1f} M parameters, {decoder.config.speech_vocab_size} speech "
        f"codes, {decoder.config.num_prediction_heads} heads, checksum {decoder.checksum()[:12]}"
    )
