"""Train a recogniser that reads speech tokens instead of sound: CTC from the codes of a prepared
corpus to its phonemes.

    dcar train-recognizer --config token_recognizer_starter
    accelerate launch -m dcar.cli train-recognizer data=runs/prepared out=runs/token_recognizer

It serves the reward `token_likelihood` of stage two. Recordings lack the errors of a decoder, so
training imitates them: a share of the tokens is replaced by others, and spans of them are hidden.
The run writes weights, config.json, config.yaml, README.md, log.jsonl, provenance.json and
checkpoints to out. The same command resumes from the last checkpoint.
"""

import dataclasses
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dcar.config import load_config, setting
from dcar.config.commands import DataSettings
from dcar.errors import DataError
from dcar.model.cards import model_card
from dcar.prepare.columns import Split
from dcar.prepare.prepared import load_split, prepared_info
from dcar.process import run_claimed, run_command
from dcar.recognition.tokens import TokenRecognizer, TokenRecognizerConfig
from dcar.text.units import TEXT_TOKENIZER
from dcar.train.checkpoints import data_stamp, last_of
from dcar.train.small import CTCTexts, CTCTrainer, SmallSettings, hidden_spans

logger = logging.getLogger(__name__)

MAX_TOO_SHORT = 0.05
"""Largest share of a split that may have fewer tokens than CTC needs. A few fast speakers stay
below it; a tokenizer with too low a rate exceeds it."""


@dataclass
class TrainTokenRecognizerConfig(DataSettings, SmallSettings):
    """Settings of `dcar train-recognizer`."""

    out: str = "runs/token_recognizer"
    max_steps: int = 1700
    warmup_steps: int = 170
    input_corruption: float = setting(
        0.08, "Share of speech tokens replaced at random in training.", minimum=0, below=1
    )
    longest_span: int = setting(
        12, "Longest hidden span in tokens; one span is hidden per 60 tokens; 0 = none.", minimum=0
    )
    model: TokenRecognizerConfig = setting(
        TokenRecognizerConfig, "Shape of the recogniser; vocabulary sizes are taken from the data."
    )


class TokenTexts(CTCTexts):
    """Tokens and phonemes of a prepared split. Utterances with fewer tokens than CTC needs are
    left out; raises DataError if these are more than MAX_TOO_SHORT."""

    def __init__(self, split: Split, config: TrainTokenRecognizerConfig, where: str):
        tokens, units = split.columns["speech_tokens"], split.columns["text_units"]
        usable = np.flatnonzero((units > 0) & (tokens >= split.columns["ctc_frames"]))
        if (too_short := len(split) - len(usable)) > MAX_TOO_SHORT * len(split):
            raise DataError(
                f"{where}: {too_short} of {len(split)} utterances have fewer tokens than CTC "
                "needs for their phonemes, so a token recogniser cannot be trained on them; use a "
                "tokenizer with more tokens per second"
            )
        if too_short:
            logger.warning(
                "%s: %d utterances have fewer tokens than CTC needs and are left out",
                where,
                too_short,
            )
            split = split.select(usable)
        texts = split.rows["text_ids"]
        super().__init__(config, split.rows["speech"], texts, texts, split.columns["speech_tokens"])

    def changed(self, frames: Any, rng: np.random.Generator) -> np.ndarray:
        """Return tokens [T] with a share replaced at random and some spans hidden."""
        config, codes = self.config, self.config.model.speech_vocab_size
        hit = rng.random(len(frames)) < config.input_corruption
        speech = np.where(hit, rng.integers(0, codes, len(frames)), np.asarray(frames))
        for span in hidden_spans(len(speech), config.longest_span, rng):
            speech[span] = codes  # TokenRecognizer.hidden_code
        return speech


class TokenRecognizerTrainer(CTCTrainer):
    """Trainer of a token recogniser; its dev metric is the phoneme error rate."""

    model: TokenRecognizer
    what = "a token recogniser"
    errors = "phoneme_error_rate"

    def count(self, dev: TokenTexts, mine: list[int]) -> tuple[float, float, float, float]:
        speech, texts = [dev.frames[i] for i in mine], [dev.texts[i] for i in mine]
        nats = -sum(
            value * len(text)
            for value, text in zip(self.model.log_likelihood(speech, texts), texts, strict=True)
        )
        errors = self.model.error_rate(speech, texts)
        edits = errors.substitutions + errors.deletions + errors.insertions
        return nats, errors.reference_words, edits, errors.reference_words


def run(config: TrainTokenRecognizerConfig) -> TokenRecognizer:
    """Train (or resume training) and save the recogniser with its card, log and provenance in
    `config.out`.

    Raises DataError for data that is missing, broken or without phonemes, CheckpointError if out
    holds another run.
    """
    asked = config
    prepared = prepared_info(config.data)
    if prepared.phonemes.startswith(TEXT_TOKENIZER):
        raise DataError(
            f"{config.data}: its text ids are those of a language model, not phonemes; use the "
            "corpus as it was before `dcar prepare mode=retokenize`"
        )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model,
            speech_vocab_size=prepared.tokenizer.vocab_size,
            text_vocab_size=prepared.content["phonemes"]["size"],
            tokenizer=prepared.tokenizer.identity,
            phonemes=prepared.phonemes,
        ),
    )
    last = last_of(config, TokenRecognizer.load_config, config.model, "token recogniser")
    train, dev = (
        TokenTexts(load_split(config.data, split), config, f"{config.data}: split {split}")
        for split in ("train", "dev")
    )
    torch.manual_seed(config.seed)
    model = TokenRecognizer(config.model)
    trainer = TokenRecognizerTrainer(config, model, train, dev)
    made_of = {"data": prepared.content}
    return trainer.make(last, asked, token_recognizer_card, made_of, data=data_stamp(config.data))


def token_recognizer_card(recognizer: TokenRecognizer, source: Mapping[str, Any]) -> str:
    """Return the README.md of a token recogniser."""
    config = recognizer.config
    return model_card(
        "Token recogniser",
        "Recognises phonemes from speech tokens without audio, by CTC over the codes. It serves "
        "the reward `token_likelihood` of stage two, and must not evaluate models that were "
        "trained with it.",
        [
            (
                "size",
                f"{sum(p.numel() for p in recognizer.parameters()):,} parameters, "
                f"{len(config.dilations)} layers, width {config.hidden_size}",
            ),
            ("speech", f"{config.speech_vocab_size} codes of {config.tokenizer}"),
            ("text", f"{config.phonemes}; id 0 is CTC's blank"),
            ("checksum", f"`{recognizer.checksum()}`"),
        ],
        source,
        metrics_of="dev split; loss in nats per phoneme",
        tags=("ctc",),
        settings=(
            "learning_rate per_device_train_batch_size max_steps input_corruption "
            "longest_span bf16 seed"
        ).split(),
        code="from dcar.recognition.load import load_token_recognizer\n\n"
        'recognizer = load_token_recognizer("path/to/this/directory")\n'
        "print(recognizer.read([[3, 1, 4, 1, 5]]))  # phoneme ids of every utterance",
    )


CONFIG = TrainTokenRecognizerConfig


def main(arguments: list[str] | None = None) -> None:
    run_claimed(run, load_config(CONFIG, arguments), resumes=True)


if __name__ == "__main__":
    sys.exit(run_command("dcar.train.token_recognizer", main))
