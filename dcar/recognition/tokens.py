"""CTC model from speech tokens to phonemes, which reads the codes of an utterance without audio.

It scores the likelihood of a decoder's tokens for a sentence without vocoder and audio, in
milliseconds per utterance. `dcar train-recognizer` trains one on a corpus. CTC: Graves et al.
(2006).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dcar.config import check, setting
from dcar.errors import CheckpointError, DataError, TextError
from dcar.recognition.base import ctc_collapse
from dcar.recognition.ctc import Alignment, Target, WindowCTC, alignments, likelihoods
from dcar.text.units import TEXT_TOKENIZER
from dcar.text.wer import WERScore, corpus_wer, id_errors
from dcar.tokens.origin import Origin

BLANK = 0
"""CTC's blank: the id that pads texts, which no text contains (dcar/text/common.py)."""
BATCH_TOKENS = 4096
"""Padded tokens in one batch of scoring."""


@dataclass
class TokenRecognizerConfig:
    """Shape of a token recogniser, and the tokens and phonemes that it was trained on."""

    speech_vocab_size: int = setting(
        1024, "Number of codes of the speech tokenizer.", minimum=1, recorded=True
    )
    text_vocab_size: int = setting(
        61, "Number of phonemes, including padding.", minimum=2, recorded=True
    )
    hidden_size: int = setting(192, "Width of the layers.", minimum=1)
    dilations: tuple[int, ...] = setting(
        (1, 2, 4, 1, 2, 4),
        "Reach of each layer's window of three tokens to either side, in tokens.",
        minimum=1,
        recorded=True,
    )
    # recorded, so that tokens and texts of another kind are rejected
    tokenizer: str = setting("", "Name and checksum of the speech tokenizer.", recorded=True)
    phonemes: str = setting("", "Version of the phoneme inventory.", recorded=True)

    def __post_init__(self) -> None:
        check(self)


class TokenRecognizer(WindowCTC):
    """CTC recogniser of speech tokens; see the module. Scores are computed in float32, whatever
    type training uses."""

    config_class, model_type = TokenRecognizerConfig, "dcar-token-recognizer"
    config: TokenRecognizerConfig

    def __init__(self, config: TokenRecognizerConfig):
        super().__init__(config.hidden_size, config.dilations, config.text_vocab_size)
        self.config = config
        # the last row is that of `hidden_code`
        self.embedding = nn.Embedding(config.speech_vocab_size + 1, config.hidden_size)

    @property
    def hidden_code(self) -> int:
        """Code that replaces a hidden token."""
        return self.config.speech_vocab_size

    def vectors(self, frames: Tensor) -> Tensor:
        """Return the vectors [B, T, size] of speech tokens [B, T] int64."""
        return self.embedding(frames)

    def check_reads(self, origin: Origin, where: str) -> None:
        """Raise CheckpointError for ids of another tokenizer or phoneme inventory than those that
        this recogniser was trained on. `where` names the corpus in the message."""
        config, tokens_of, phonemes = self.config, origin.tokenizer, origin.phonemes
        remedy = "train one on this corpus with `dcar train-recognizer`"
        if (
            config.tokenizer.rpartition("@")[2] != tokens_of.checksum
            or config.speech_vocab_size != tokens_of.vocab_size
        ):
            raise CheckpointError(
                f"{where}: has tokens of {tokens_of.identity}, but the token "
                f"recogniser reads those of {config.tokenizer or 'an unrecorded tokenizer'}; "
                f"{remedy}"
            )
        if config.phonemes != phonemes:
            if phonemes.startswith(TEXT_TOKENIZER):
                remedy = "it cannot use text ids of a language model; use a recogniser of audio"
            raise CheckpointError(
                f"{where}: has text ids of {phonemes}, but the token recogniser was trained on "
                f"those of {config.phonemes or 'an unrecorded inventory'}; {remedy}"
            )

    # --- scores -----------------------------------------------------------------------------------

    def log_likelihood(
        self, speech: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[float]:
        """Return the CTC log-likelihood of the phonemes of every text given the tokens, over all
        paths, in nats per phoneme (≤ 0); −inf if there are fewer tokens than the phonemes need.

        Raises TextError for a text without phonemes, DataError for ids that this recogniser does
        not know.
        """
        return likelihoods(self._utterances(speech, texts), BLANK)

    def align(
        self, speech: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Alignment]:
        """Align the phonemes of every text to its tokens: the phoneme of every token, the cost
        of every phoneme, and `log_likelihood`, whose errors it raises."""
        return alignments(self._utterances(speech, texts), BLANK)

    def read(self, speech: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the phonemes recognised in the tokens of every utterance: the likeliest of each
        token, collapsed by CTC's rule."""
        read: list[list[int]] = [[] for _ in speech]
        for index, log_probs in self._log_probs(speech):
            read[index] = ctc_collapse(log_probs.argmax(-1).tolist(), (BLANK,))
        return read

    def error_rate(
        self, speech: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> WERScore:
        """Return the phoneme errors of `read`, summed over all utterances (`WERScore.wer` is the
        phoneme error rate)."""
        return corpus_wer(
            [id_errors(text, read) for text, read in zip(texts, self.read(speech), strict=True)]
        )

    def _utterances(
        self, speech: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> Iterator[Target]:
        lengths = [len(text) for text in texts]
        if 0 in lengths:
            raise TextError(
                f"log_likelihood: text number {lengths.index(0)} has no phonemes, so it has no "
                "likelihood; remove the utterance"
            )
        self._check_ids(texts, 1, self.config.text_vocab_size, "text id")
        for index, log_probs in self._log_probs(speech):
            yield Target(index, log_probs, list(texts[index]), len(texts[index]))

    def _log_probs(self, speech: Sequence[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, log-probabilities [T, text_vocab_size] on the CPU) of every utterance,
        in batches, the longest utterances first."""
        self._check_ids(speech, 0, self.config.speech_vocab_size, "speech token")
        device = self.output.weight.device
        order = sorted(range(len(speech)), key=lambda i: len(speech[i]))
        while order:
            # the longest first, so that no later batch needs more memory
            longest = max(1, len(speech[order[-1]]))
            count = max(1, BATCH_TOKENS // longest)
            rows, order = order[-count:], order[:-count]
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
                    f"the token recogniser knows no {what} {wrong}, only those from {least} to "
                    f"{end - 1}; load the recogniser that was trained on this corpus"
                )
