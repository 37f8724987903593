"""What every vocoder offers, and what adapters of other projects' vocoders share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dcar.errors import AssetError, CheckpointError, DataError
from dcar.prepare.prepared import tokenizer_identity

Recorded = tuple[np.ndarray, int]


class Vocoder(Protocol):
    """Speech tokens and voices to waveforms."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def sample_rate(self) -> int: ...

    @property
    def token_rate(self) -> int: ...

    def check_tokenizer(self, identity: str) -> None:
        """CheckpointError if it does not speak the tokens of this tokenizer ("name@checksum")."""
        ...

    def synthesize(self, token_lists: Sequence[Sequence[int]], speaker: np.ndarray) -> list[np.ndarray]:
        """One float32 waveform per token list; speaker [B, F] voice features of the prompts."""
        ...


class PromptAudio:
    """Recordings of prompts, found by the voice features [F] that were made from them."""

    def __init__(self, prompts: Iterable[tuple[np.ndarray, Callable[[], Recorded]]]) -> None:
        """prompts: (features, function that reads the recording); it is read when it is needed."""
        self._read: dict[bytes, Callable[[], Recorded]] = {}
        for features, read in prompts:
            self.add(features, read)

    def add(self, features: np.ndarray, read: Callable[[], Recorded]) -> None:
        """One prompt more: voice features [F] and the function that reads its recording."""
        self._read[self._key(features)] = read

    @staticmethod
    def _key(features: np.ndarray) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(features, np.float32).tobytes()).digest()

    def __call__(self, features: np.ndarray) -> Recorded:
        """Waveform and rate of the prompt; DataError if none was given for these features."""
        read = self._read.get(self._key(features))
        if read is None:
            raise DataError("no prompt recording belongs to these voice features; give load_vocoder the prompts' audio")
        return read()

    @classmethod
    def of_items(cls, items: Iterable[Any], recording: Callable[[str], Recorded]) -> PromptAudio:
        """For `PromptItem`s: `recording` reads an utterance by id; "ID (prompt)" is the prompt of ID."""
        return cls((item.speaker_embedding, partial(recording, item.prompt_utterance_id)) for item in items)


def check_rates(vocoder: Vocoder, rate_hz: float, tokenizer: str) -> None:
    """CheckpointError where a vocoder would speak the tokens of a tokenizer at another speed."""
    if abs(vocoder.token_rate - rate_hz) > 1e-6:
        raise CheckpointError(
            f"the vocoder speaks {vocoder.token_rate:g} tokens a second, {tokenizer} makes {rate_hz:g}: use the "
            "vocoder of the decoder's tokenizer, or train one with `dcar train-vocoder`"
        )


def check_speaks(vocoder: Vocoder, info: Mapping[str, Any]) -> None:
    """CheckpointError where a vocoder does not speak the tokens of a prepared corpus (`prepared_info`), or would at
    another speed."""
    vocoder.check_tokenizer(tokenizer_identity(info))
    check_rates(vocoder, info["tokenizer"]["rate_hz"], info["tokenizer"]["name"])


class CodecVocoder:
    """What adapters share: checks of tokens and identity, one utterance at a time, clipping."""

    name: str
    vocab_size: int
    sample_rate: int
    token_rate: int
    tokenizer_names: tuple[str, ...] = ()
    tokenizer_checksum = ""

    def check_tokenizer(self, identity: str) -> None:
        """CheckpointError if the tokens are not this codec's: of another kind, or of another checkpoint."""
        name, _, checksum = identity.rpartition("@")
        wrong_kind = bool(name) and bool(self.tokenizer_names) and not name.startswith(self.tokenizer_names)
        if wrong_kind or (self.tokenizer_checksum and checksum and checksum != self.tokenizer_checksum):
            raise CheckpointError(
                f"the vocoder {self.name} speaks tokens of {' or '.join(self.tokenizer_names) or 'its own tokenizer'} "
                f"({self.tokenizer_checksum[:12] or 'any checkpoint'}), not of {identity[:60]}; take the decoder's"
            )

    def synthesize(self, token_lists: Sequence[Sequence[int]], speaker: np.ndarray) -> list[np.ndarray]:
        """One float32 waveform in −1…1 per utterance, empty without tokens. DataError for ids outside the codebook."""
        if len(speaker) != len(token_lists):
            raise DataError(f"{self.name}: {len(token_lists)} utterances but {len(speaker)} voices")
        return [self._one(list(tokens), row) for tokens, row in zip(token_lists, np.asarray(speaker), strict=True)]

    def _one(self, tokens: list[int], speaker: np.ndarray) -> np.ndarray:
        import torch

        if not tokens:
            return np.zeros(0, np.float32)
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            worst = min(tokens) if min(tokens) < 0 else max(tokens)
            raise DataError(
                f"{self.name}: token {worst} is outside 0..{self.vocab_size - 1}; strip EOS and use the vocoder of the "
                "decoder's tokenizer"
            )
        with torch.inference_mode():
            wave = self.speak(torch.tensor(tokens, dtype=torch.int64), speaker)
        return np.clip(wave.reshape(-1).float().cpu().numpy(), -1.0, 1.0).astype(np.float32)

    def speak(self, tokens: Any, speaker: np.ndarray) -> Any:
        """Waveform tensor of token ids [T] int64 in the voice of `speaker` [F]."""
        raise NotImplementedError


def on_path(what: str, path: str) -> AssetError:
    """What to do about another project's code that is not installed."""
    return AssetError(f"{what} is not installed: clone {path} and put the clone on PYTHONPATH (see docs/data.md)")


def folder_of(path: str | Path, files: Sequence[str], what: str, hint: str) -> Path:
    """`path` as a folder that holds `files`; AssetError names the first that is missing and how to get it."""
    folder = Path(path)
    for file in files:
        if not (folder / file).is_file():
            raise AssetError(f"{folder / file}: missing; {what}: {hint}")
    return folder
