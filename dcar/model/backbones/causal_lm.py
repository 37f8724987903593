"""Any causal language model of `transformers` as a decoder, and LLaSA (zhenye234/LLaSA_training) in
particular.

LLaSA is a Llama whose vocabulary ends with the codes of X-codec 2 (`<|s_0|>` … `<|s_65535|>`) and
eight marks. Its prompt is a chat: the user writes "Convert the text to speech:" and the text
between two marks; the assistant answers with the mark of speech generation, followed by the codes.
Here the speech rows of its embedding and output layers become tables of their own, and the chat
around the text becomes a fixed prefix and suffix of ids.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dcar.errors import CheckpointError, ConfigError, TextError
from dcar.model.backbones.cosyvoice import load_trunk
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder, check_architecture
from dcar.sources.hub import from_hub
from dcar.text.base import TextUnits
from dcar.text.common import check_text
from dcar.text.units import TEXT_TOKENIZER, units_for

SPEECH = "<|s_{}|>"
TEXT_START, TEXT_END = "<|TEXT_UNDERSTANDING_START|>", "<|TEXT_UNDERSTANDING_END|>"
SPEECH_START, SPEECH_END = "<|SPEECH_GENERATION_START|>", "<|SPEECH_GENERATION_END|>"
INSTRUCTION = "Convert the text to speech:"


class SpeechIds(NamedTuple):
    """Ids of speech in a vocabulary: the V codes, the end and the start of speech."""

    codes: list[int]
    end: int
    start: int


class TextTokenizer(TextUnits):
    """Tokens of a language model. It reads texts as they are written, as its publishers do;
    normalize: language in whose spoken form they are written out first, "" for none."""

    def __init__(self, tokenizer: Any, normalize: str = ""):
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError(
                "the model's tokenizer has no tokenizer.json (a slow tokenizer); convert it with "
                "transformers' AutoTokenizer(...).save_pretrained first"
            )
        digest = hashlib.sha256(backend.to_str().encode()).hexdigest()[:16]
        self.name, self.size = f"{TEXT_TOKENIZER}{digest}", len(tokenizer)
        self._marks = dict(tokenizer.get_added_vocab())
        self._reading = units_for(normalize) if normalize else None
        if self._reading is not None:
            self.name += f"+{normalize}"

    @classmethod
    def from_pretrained(cls, source: str | Path, normalize: str = "") -> TextTokenizer:
        from transformers import AutoTokenizer

        return cls(from_hub(AutoTokenizer.from_pretrained, source, "a text tokenizer"), normalize)

    def spoken(self, text: str) -> str:
        return check_text(text) if self._reading is None else self._reading.spoken(text)

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens. Raises TextError if there are none, or
        for a mark of the model in the text."""
        if found := [mark for mark in self._marks if mark in text]:
            raise TextError(
                f"{text[:40]!r}: {found[0]!r} is a mark of the model, not a text; remove it"
            )
        ids = self.tokenizer(self.spoken(text), add_special_tokens=False)["input_ids"]
        if not ids:
            raise TextError("the text has no tokens; give at least one word")
        return list(ids)


def llasa_ids(tokenizer: Any, where: str) -> SpeechIds:
    """Return the ids of LLaSA's speech tokens. Raises CheckpointError if the tokenizer has none."""
    vocabulary = tokenizer.get_vocab()
    marks = (TEXT_START, TEXT_END, SPEECH_START, SPEECH_END, SPEECH.format(0))
    if missing := [m for m in marks if m not in vocabulary]:
        raise CheckpointError(
            f"{where}: expected LLaSA's tokenizer, missing {missing}; give HKUSTAudio/Llasa-1B, "
            "-3B or -8B (or kind=causal-lm with first_speech_id)"
        )
    codes: list[int] = []
    while (token := SPEECH.format(len(codes))) in vocabulary:
        codes.append(vocabulary[token])
    return SpeechIds(codes, vocabulary[SPEECH_END], vocabulary[SPEECH_START])


def llasa_template(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids before and after the text in LLaSA's chat, without the start of speech that
    ends it.

    Some chat templates write today's date: that of the conversion is kept.
    """
    chat = [
        {"role": "user", "content": INSTRUCTION + TEXT_START + TEXT_END},
        {"role": "assistant", "content": SPEECH_START},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start, end = (tokenizer.convert_tokens_to_ids(t) for t in (TEXT_START, TEXT_END))
    cut = ids.index(start) + 1
    last = ids.index(tokenizer.convert_tokens_to_ids(SPEECH_START))
    if ids.index(end) != cut or last != len(ids) - 1:
        raise CheckpointError(
            "the tokenizer's chat template does not keep LLaSA's marks in order; give the "
            "tokenizer that was published with the model"
        )
    return tuple(ids[:cut]), tuple(ids[cut:last])


def load_causal_lm(
    model: str | Path, speech: SpeechIds | None, speech_vocab_size: int = 0, **settings: Any
) -> BackboneDecoder:
    """Build a decoder with the weights of a causal language model, on disk or on the Hub; its
    additional heads are new.

    speech: ids of speech in the model; None for a model of text alone, which then learns
    `speech_vocab_size` codes from scratch. `settings` are passed to BackboneConfig. Raises
    AssetError if the model is missing, CheckpointError if ids or vocabulary do not fit.
    """
    from transformers import AutoModelForCausalLM

    source: Any = from_hub(
        AutoModelForCausalLM.from_pretrained, model, "a causal language model", dtype=torch.float32
    )
    architecture, trunk = source.config.to_dict(), source.base_model.state_dict()
    check_architecture(architecture)
    table = trunk["embed_tokens.weight"]
    codes = len(speech.codes) if speech else speech_vocab_size
    if codes < 1:
        raise ConfigError(
            "speech_vocab_size is not set: give the number of speech codes that the model will "
            "generate"
        )
    if speech_vocab_size and codes != speech_vocab_size:
        raise CheckpointError(
            f"{model}: expected {speech_vocab_size} speech codes, found {codes}; prepare the "
            "corpus with the speech tokenizer of this model"
        )
    if speech and max(*speech.codes, speech.end, speech.start) >= len(table):
        raise CheckpointError(
            f"{model}: a speech id is outside the vocabulary of {len(table)}; model and tokenizer "
            "(or first_speech_id, start_id, eos_id) do not belong together"
        )
    rows = len(table)
    if speech:
        first = speech.codes[0]
        if speech.codes == list(range(first, rows)) and first > max(speech.end, speech.start):
            rows = first  # speech ends the vocabulary: its rows would be there twice
    trunk["embed_tokens.weight"] = table[:rows]
    decoder = BackboneDecoder(
        BackboneConfig(
            architecture={**architecture, "vocab_size": rows, "tie_word_embeddings": False},
            speech_vocab_size=codes,
            **settings,
        )
    )
    load_trunk(decoder, trunk, str(model))
    if speech:
        ids = torch.tensor([*speech.codes, speech.end, speech.start])
        with torch.no_grad():
            decoder.speech_embedding.weight[: codes + 2] = table[ids]
            decoder.heads.base.weight.copy_(source.get_output_embeddings().weight[ids[:-1]])
    else:  # as large as the vectors that the model is used to
        nn.init.normal_(decoder.speech_embedding.weight, std=float(table.float().std()))
    return decoder.eval()
