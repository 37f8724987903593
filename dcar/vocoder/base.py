"""Interface that every vocoder offers, and checks of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from dcar.errors import CheckpointError, DataError
from dcar.tokens.origin import TokenizerInfo

Recorded = tuple[np.ndarray, int]


class Vocoder(Protocol):
    """Speech tokens and voices to waveforms."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def sample_rate(self) -> int: ...

    @property
    def token_rate(self) -> float: ...

    @property
    def tokenizer(self) -> str:
        """Tokenizer whose tokens it reads, "name@checksum": a prefix of its name, and "" for a
        checksum that is not known."""
        ...

    def synthesize(
        self, token_lists: Sequence[Sequence[int]], speaker: np.ndarray
    ) -> list[np.ndarray]:
        """Return one float32 waveform per token list; speaker [B, F]: voice features of the
        prompts.

        A vocoder whose attribute `reads_text` is true takes the texts as a third argument; see
        `dcar.vocoder.voicing.synthesize`.
        """
        ...


class PromptAudio:
    """Recordings of prompts, found by the voice features [F] that were computed from them."""

    def __init__(self, prompts: Iterable[tuple[np.ndarray, Callable[[], Recorded]]]) -> None:
        """Register prompts: pairs of features and a function that reads the recording, which is
        called when the recording is needed."""
        self._read: dict[bytes, Callable[[], Recorded]] = {}
        for features, read in prompts:
            self.add(features, read)

    def add(self, features: np.ndarray, read: Callable[[], Recorded]) -> None:
        """Add a prompt: voice features [F] and the function that reads its recording."""
        self._read[self._key(features)] = read

    @staticmethod
    def _key(features: np.ndarray) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(features, np.float32).tobytes()).digest()

    def __call__(self, features: np.ndarray) -> Recorded:
        """Return waveform and rate of the prompt. Raises DataError if none was given for these
        features."""
        read = self._read.get(self._key(features))
        if read is None:
            raise DataError(
                f"prompts: none of the {len(self._read)} recordings given to load_vocoder belongs "
                "to these voice features; add the recording of this prompt"
            )
        return read()

    @classmethod
    def of_items(cls, items: Iterable[Any], recording: Callable[[str], Recorded]) -> PromptAudio:
        """Create it from `PromptItem`s: `recording` reads an utterance by id; "ID (prompt)" is
        the prompt of ID."""
        return cls(
            (item.speaker_embedding, partial(recording, item.prompt_utterance_id)) for item in items
        )


def check_speaks(vocoder: Vocoder, tokenizer: TokenizerInfo) -> None:
    """Raise CheckpointError if a vocoder does not accept the tokens of this tokenizer, or would
    synthesise them at another speed. Foreign tokens would become noise, without an error."""
    name, _, checksum = vocoder.tokenizer.rpartition("@")
    if not tokenizer.name.startswith(name) or checksum not in ("", tokenizer.checksum):
        raise CheckpointError(
            f"the vocoder reads tokens of {vocoder.tokenizer}, not of {tokenizer.identity}: use "
            "the vocoder of the decoder's tokenizer, or train one with `dcar train-vocoder`"
        )
    if abs(vocoder.token_rate - tokenizer.rate_hz) > 1e-6:
        raise CheckpointError(
            f"the vocoder reads {vocoder.token_rate:g} tokens a second, but {tokenizer.name} makes "
            f"{tokenizer.rate_hz:g}: use the vocoder of the decoder's tokenizer, or train one with "
            "`dcar train-vocoder`"
        )
