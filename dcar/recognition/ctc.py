"""CTC: likelihood and alignment of a text, and the network of the two recognisers trained here.

Frames are of audio (units: characters or subwords) or speech tokens (units: phonemes,
dcar/recognition/tokens.py).

Viterbi search runs on the lattice of Graves et al. (2006): the units with a blank before, between
and after them. From frame to frame a path stays in its state, advances by one, or skips a blank
between two units that differ. NeMo's `viterbi_decoding` finds the same paths (a test compares
them), but returns neither their costs nor whether a path exists.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.errors import TextError
from dcar.recognition.base import WINDOW_SECONDS, InLanguage, ctc_collapse, in_windows
from dcar.text.languages import language_of
from heads.checkpoint import Checkpoint


@dataclass(frozen=True)
class Alignment:
    """Likeliest path of a text. A blank belongs to the unit before it, blanks at the beginning to
    the first unit.

    - costs [U]: −log-probability of every unit's frames, in nats; their sum is the cost of the
      path. All are inf if no path exists (fewer frames than the text needs, or a probability of 0).
    - units [T]: unit of every frame, never decreasing; spread evenly if no path exists.
    - log_likelihood: log-likelihood of the text over all paths, in nats per character.
    - characters: number of characters of the text; phonemes if the text consists of phonemes.
    - transcript: the recogniser's, of the same frames; "" if the frames are speech tokens.
    """

    costs: np.ndarray
    units: np.ndarray
    log_likelihood: float
    characters: int
    transcript: str = ""


def viterbi(
    log_probs: np.ndarray, target: Sequence[int], blank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (costs [U], units [T]) of a text of U ≥ 1 symbols in T ≥ 1 frames [T, symbols + 1];
    see `Alignment`."""
    states = np.full(2 * len(target) + 1, blank)
    states[1::2] = target
    skips = np.zeros(len(states), bool)  # True if a state may be entered from two before it
    skips[3::2] = states[3::2] != states[1:-2:2]
    emitted = log_probs.astype(np.float64)[:, states]  # [T, S]
    ways = np.full((3, len(states)), -np.inf)  # stay, advance, skip a blank
    came = np.zeros(emitted.shape, np.int64)  # number of states that the best way advanced by
    best = np.full(len(states), -np.inf)
    best[:2] = emitted[0, :2]
    for t in range(1, len(emitted)):
        ways[0], ways[1, 1:], ways[2, 2:] = best, best[:-1], np.where(skips[2:], best[:-2], -np.inf)
        came[t] = ways.argmax(0)
        best = ways.max(0) + emitted[t]
    state = len(states) - 1 - int(best[-2] > best[-1])
    frames = np.arange(len(emitted))
    if not np.isfinite(best[state]):
        return np.full(len(target), np.inf), frames * len(target) // len(frames)
    path = np.zeros(len(emitted), np.int64)
    for t in frames[::-1]:
        path[t] = state
        state -= int(came[t, state])
    units = np.maximum(path - 1, 0) // 2
    return -np.bincount(units, emitted[frames, path], minlength=len(target)), units


def frames_needed(symbols: Sequence[object]) -> int:
    """Return the least number of frames that CTC needs: one per symbol, and one between two
    equal neighbours."""
    return len(symbols) + sum(a == b for a, b in pairwise(symbols))


@dataclass(frozen=True)
class Target:
    """An utterance and its text: its index in the caller's list, log-probabilities [T, symbols]
    float32 on the CPU, the text's symbols, and its number of characters."""

    index: int
    log_probs: Tensor
    target: list[int]
    characters: int


def likelihood(log_probs: Tensor, target: Sequence[int], blank: int) -> float:
    """Return the log-likelihood of symbols over all their paths through log-probabilities [T,
    symbols], in nats; −inf if no path exists."""
    if not len(log_probs):
        return -torch.inf
    return -float(
        F.ctc_loss(
            log_probs[:, None],
            torch.tensor([list(target)]),
            torch.tensor([len(log_probs)]),
            torch.tensor([len(target)]),
            blank=blank,
            reduction="sum",
        )
    )


def likelihoods(utterances: Iterable[Target], blank: int) -> list[float]:
    """Return the CTC log-likelihood of every text, in nats per character (≤ 0), in the order of
    the caller's list."""
    by_row = {
        one.index: likelihood(one.log_probs, one.target, blank) / one.characters
        for one in utterances
    }
    return [by_row[i] for i in range(len(by_row))]


def alignments(
    utterances: Iterable[Target], blank: int, read: Callable[[Tensor], str] | None = None
) -> list[Alignment]:
    """Return the alignment of every text, in the order of the caller's list. read: function that
    transcribes the same log-probabilities."""
    by_row: dict[int, Alignment] = {}
    for one in utterances:
        if len(one.log_probs):
            costs, units = viterbi(one.log_probs.numpy(), one.target, blank)
        else:
            costs, units = np.full(len(one.target), np.inf), np.zeros(0, np.int64)
        total = likelihood(one.log_probs, one.target, blank) / one.characters
        transcript = read(one.log_probs) if read else ""
        by_row[one.index] = Alignment(costs, units, total, one.characters, transcript)
    return [by_row[i] for i in range(len(by_row))]


class CTCRecognizer(InLanguage, ABC):
    """Recogniser of audio by CTC, greedy. In addition to transcripts it yields a denser signal
    than the WER of one transcript: the log-likelihood of a text and its cost unit by unit.
    Results do not depend on the other waveforms."""

    name: str
    blank: int
    window_seconds = WINDOW_SECONDS  # longest waveform that is transcribed at once

    @abstractmethod
    def _log_probs(self, waves: list[np.ndarray], sample_rate: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, log-probabilities [frames, symbols]) of every waveform, in any order.
        Raises AudioError."""

    @abstractmethod
    def spell(self, symbols: list[int]) -> str:
        """Return the text of collapsed symbols."""

    @abstractmethod
    def symbols(self, text: str) -> list[int]:
        """Return the symbols of words in lower case. Raises TextError for characters that the
        model does not know."""

    @property
    def alphabet(self) -> Sequence[str]:
        """Characters that its transcripts can contain, in lower case; none if it has subwords."""
        return ()

    def unknown(self, text: str) -> set[str]:
        """Return the characters of a text's words that the model does not know."""
        known = self._known
        return set(language_of(self.language).words(text)) - known if known else set()

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.alphabet)

    def read(self, log_probs: Tensor) -> str:
        """Return the text of log-probabilities [frames, symbols]: the likeliest symbol of each
        frame, collapsed by CTC's rule."""
        return self.spell(ctc_collapse(log_probs.argmax(-1).tolist(), (self.blank,)))

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        return in_windows(self._read, waves, sample_rate, self.window_seconds)

    def _read(self, windows: list[np.ndarray]) -> list[str]:
        texts = [""] * len(windows)
        for index, log_probs in self._log_probs(windows, ENCODER_SAMPLE_RATE):
            texts[index] = self.read(log_probs)
        return texts

    def log_likelihood(
        self, waves: list[np.ndarray], sample_rate: int, texts: Sequence[str]
    ) -> list[float]:
        """Return the CTC log-likelihood of each text given its waveform, in nats per character (≤
        0).

        It is −inf if the waveform has fewer frames than the text needs. Raises TextError for a text
        without words or with characters that the model does not know, AudioError as `transcribe`
        does.
        """
        return likelihoods(self._utterances(waves, sample_rate, texts), self.blank)

    def align(
        self, waves: list[np.ndarray], sample_rate: int, texts: Sequence[str]
    ) -> list[Alignment]:
        """Align each text to its waveform unit by unit (characters, or the model's subwords):
        the cost of every unit, `log_likelihood` and the transcript, by one pass of the model.
        Raises the errors of `log_likelihood`."""
        return alignments(self._utterances(waves, sample_rate, texts), self.blank, self.read)

    def _utterances(
        self, waves: list[np.ndarray], sample_rate: int, texts: Sequence[str]
    ) -> Iterator[Target]:
        spoken = [language_of(self.language).words(text) for text in texts]
        if "" in spoken:
            index = spoken.index("")
            raise TextError(
                f"log_likelihood: text number {index}, {texts[index]!r}, has no words; remove the "
                "utterance"
            )
        targets = [self.symbols(text) for text in spoken]
        for index, log_probs in self._log_probs(waves, sample_rate):
            yield Target(index, log_probs.float(), targets[index], len(spoken[index]))


def spelled(text: str, vocabulary: Sequence[str], name: str) -> list[int]:
    """Return the indices in a vocabulary of the characters of a text. Raises TextError for
    characters that are not in it."""
    if unknown := sorted(set(text) - set(vocabulary)):
        raise TextError(
            f"{name}: the characters {unknown} of {text!r} are not in its vocabulary; write the "
            "text without them"
        )
    return [vocabulary.index(character) for character in text]


class WindowLayer(nn.Module):
    """Residual layer over a dilated window of three frames, as in WaveNet and Conv-TasNet: x +
    W₂ gelu(W₁ [y(t − d), y(t), y(t + d)]) with y = LayerNorm(x), and 0 outside the utterance."""

    def __init__(self, size: int, dilation: int):
        super().__init__()
        self.dilation = dilation
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(3 * size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Apply the layer to x [B, T, D]. real [B, T, 1]: True if a position is inside its
        utterance."""
        d, steps = self.dilation, x.shape[1]
        y = F.pad(self.norm(x) * real, (0, 0, d, d))
        window = torch.cat([y[:, shift : shift + steps] for shift in (0, d, 2 * d)], -1)
        return x + self.down(F.gelu(self.up(window), approximate="tanh"))


class WindowCTC(Checkpoint):
    """Network from frames to log-probabilities of CTC's symbols; subclasses compute the frames'
    vectors. Utterances of a batch do not influence each other."""

    def __init__(self, size: int, dilations: Sequence[int], symbols: int):
        super().__init__()
        self.layers = nn.ModuleList(WindowLayer(size, d) for d in dilations)
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, symbols)

    def vectors(self, frames: Tensor) -> Tensor:
        """Return the vectors [B, T, size] of the frames [B, T, …] that this model reads."""
        raise NotImplementedError

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Return the log-probabilities [B, T, symbols] float32 (symbol 0: blank) of frames [B,
        T, …]. Values after a row's length [B] are undefined."""
        return self.frames(frames, lengths)

    def frames(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Compute `forward` in the type of the weights, even if Accelerate wraps `forward` in an
        autocast."""
        x = self.vectors(frames)
        real = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None]
        for layer in self.layers:
            x = layer(x, real)
        return self.output(self.norm(x)).float().log_softmax(-1)
