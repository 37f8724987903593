"""Speech tokens → phonemes: a CTC model that reads the codes of an utterance, without sound.

It scores how likely a decoder's tokens are for a sentence, without vocoder and audio: milliseconds
an utterance. `dcar train-recognizer` trains one on a corpus. CTC: Graves et al. (2006).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dcar.config import check, setting
from dcar.errors import CheckpointError, DataError, TextError
from dcar.recognition.base import ctc_collapse
from dcar.recognition.ctc import Alignment, Told, WindowCTC, alignments, likelihoods
from dcar.text.inventory import TEXT_TOKENIZER
from dcar.text.wer import WERScore, corpus_wer, id_errors

BLANK = 0
"""CTC's blank is the id that pads texts, which no text holds (dcar/text/phonemes.py)."""
BATCH_TOKENS = 4096
"""Padded tokens that are read at once in scoring."""


@dataclass
class TokenRecognizerConfig:
    """Shape of a token recogniser, and what it reads."""

    speech_vocab_size: int = setting(
        1024, "Codes of the speech tokenizer; taken from the data.", minimum=1
    )
    text_vocab_size: int = setting(
        61, "Phonemes, the padding with them; taken from the data.", minimum=2
    )
    hidden_size: int = setting(192, "Width of the layers.", minimum=1)
    dilations: tuple[int, ...] = setting(
        (1, 2, 4, 1, 2, 4),
        "Of every layer, how far its window of three tokens reaches to either side.",
        minimum=1,
    )
    # so that tokens and texts of another kind are refused
    tokenizer: str = setting("", "Name and checksum of the speech tokenizer; taken from the data.")
    phonemes: str = setting("", "Version of the phoneme inventory; taken from the data.")

    def __post_init__(self) -> None:
        check(self)


class TokenRecognizer(WindowCTC):
    """See the module. Scores are taken in float32, whatever the training computes in."""

    config_class, model_type = TokenRecognizerConfig, "dcar-token-recognizer"
    config: TokenRecognizerConfig

    def __init__(self, config: TokenRecognizerConfig):
        super().__init__(config.hidden_size, config.dilations, config.text_vocab_size)
        self.config = config
        # the last one stands for a token that training hides
        self.embedding = nn.Embedding(config.speech_vocab_size + 1, config.hidden_size)

    @property
    def hidden_code(self) -> int:
        """The code that stands for a token that is hidden."""
        return self.config.speech_vocab_size

    def vectors(self, frames: Tensor) -> Tensor:
        """Of speech tokens [B, T] int64."""
        return self.embedding(frames)

    def check_reads(self, info: Mapping[str, Any], where: str) -> None:
        """CheckpointError where a prepared corpus (`prepared_info`) has other speech tokens or
        other phonemes than this recogniser was trained on; `where` names the corpus in the
        message."""
        config, made, phonemes = self.config, info["tokenizer"], info["phonemes"]["version"]
        remedy = "train one on this corpus with `dcar train-recognizer`"
        if (
            config.tokenizer.rpartition("@")[2] != made["checksum"]
            or config.speech_vocab_size != made["vocab_size"]
        ):
            raise CheckpointError(
                f"{where}: has tokens of {made['name']}@{made['checksum']}, but the token "
                "recogniser "
                f"reads those of {config.tokenizer or 'a tokenizer not recorded'}; {remedy}"
            )
        if config.phonemes != phonemes:
            raise CheckpointError(
                f"{where}: has text ids of {phonemes}, but the token recogniser knows those of "
                f"{config.phonemes or 'an inventory not recorded'}; "
                + (
                    "it reads no text ids of a language model: take a recogniser of sound instead"
                    if phonemes.startswith(TEXT_TOKENIZER)
                    else remedy
                )
            )

    # --- scores -----------------------------------------------------------------------------------

    def log_likelihood(
        self, speech: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[float]:
        """CTC log-likelihood of the phonemes of every text given the tokens, over all paths, nats
        per phoneme (≤ 0); −inf where there are fewer tokens than the phonemes need.

        Raises TextError for a text without phonemes, DataError for ids that this recogniser does
        not know.
        """
        return likelihoods(self._told(speech, texts), BLANK)

    def align(
        self, speech: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Alignment]:
        """Which phoneme every token speaks, what each phoneme costs there, and `log_likelihood`.
        Errors as there."""
        return alignments(self._told(speech, texts), BLANK)

    def read(self, speech: Sequence[Sequence[int]]) -> list[list[int]]:
        """The phonemes that are read in the tokens of every utterance: the likeliest of each
        token, by CTC's rule."""
        read: list[list[int]] = [[] for _ in speech]
        for index, log_probs in self._log_probs(speech):
            read[index] = ctc_collapse(log_probs.argmax(-1).tolist(), (BLANK,))
        return read

    def error_rate(
        self, speech: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> WERScore:
        """Phoneme errors of `read`, summed over all utterances (`WERScore.wer` is the phoneme
        error rate)."""
        return corpus_wer(
            [id_errors(text, found) for text, found in zip(texts, self.read(speech), strict=True)]
        )

    def _told(
        self, speech: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Iterator[Told]:
        if len(texts) != len(speech):
            raise ValueError(f"{len(speech)} utterances but {len(texts)} texts")
        if not all(len(text) for text in texts):
            raise TextError("a text has no phonemes, so it has no likelihood; remove the utterance")
        self._check_ids(texts, 1, self.config.text_vocab_size, "text id")
        for index, log_probs in self._log_probs(speech):
            yield Told(index, log_probs, list(texts[index]), len(texts[index]))

    def _log_probs(self, speech: Sequence[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        """(index, log-probabilities [T, text_vocab_size] on the CPU) of every utterance, in
        order of length."""
        self._check_ids(speech, 0, self.config.speech_vocab_size, "speech token")
        device = self.output.weight.device
        order = sorted(range(len(speech)), key=lambda i: len(speech[i]))
        while order:
            # the longest first: what follows needs less memory
            longest = max(1, len(speech[order[-1]]))
            rows, order = (
                order[-max(1, BATCH_TOKENS // longest) :],
                order[: -max(1, BATCH_TOKENS // longest)],
            )
            lengths = torch.tensor([len(speech[i]) for i in rows])
            ids = pad_sequence(
                [torch.as_tensor(speech[i], dtype=torch.int64) for i in rows], batch_first=True
            )
            with torch.inference_mode():
                log_probs = self.frames(ids.to(device), lengths.to(device)).cpu()
            for row, i in enumerate(rows):
                yield i, log_probs[row, : lengths[row]]

    @staticmethod
    def _check_ids(rows: Sequence[Sequence[int]], least: int, end: int, what: str) -> None:
        for row in rows:
            if len(row) and not (least <= min(row) and max(row) < end):
                wrong = next(i for i in row if not least <= i < end)
                raise DataError(
                    f"the token recogniser knows no {what} {wrong}, only {least} to {end - 1}; "
                    "load the "
                    "one that was trained on this corpus"
                )
