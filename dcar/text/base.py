"""Base classes of units, and what several of them do alike."""

from __future__ import annotations

import functools
import hashlib
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from dcar.text.common import PHRASE_MARKS, check_text, without_invisible
from dcar.text.language import Language


class TextUnits(ABC):
    """Function from a text to ids. `name` identifies everything that decides them, and is carried
    by corpora and models; `size` is the number of ids; `languages` are those that can be read (none:
    any)."""

    name: str
    size: int
    languages: tuple[str, ...] = ()

    @abstractmethod
    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text, a fresh list. Raises TextError that says what is wrong."""

    def spoken(self, text: str) -> str:
        """Return a text as it is read, for example with numbers in words. Raises TextError."""
        return check_text(text)

    def sentences(self, text: str, language: Language) -> list[str]:
        """Return the sentences of a text of at most MAX_CHARACTERS, as they are read."""
        written = self.spoken(text)
        ends = language.ends(written)
        cut = [written[a:b].strip() for a, b in zip([0, *ends], ends, strict=False)]
        return [sentence for sentence in cut if any(c.isalnum() for c in sentence)]

    def length(self, text: str) -> int:
        """Return about how many phonemes a sentence has, by which long ones are divided."""
        return sum(3 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


class SymbolUnits(TextUnits):
    """Units with an inventory of symbols, which begins with FIRST."""

    symbols: tuple[str, ...]

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.symbols)

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Mapping of every symbol to its id."""
        return {symbol: i for i, symbol in enumerate(self.symbols)}


def inventory_digest(symbols: Iterable[str]) -> str:
    """Return the part of a name that says which symbols there are."""
    return hashlib.sha256("|".join(symbols).encode()).hexdigest()[:8]


def closed(symbols: Sequence[str]) -> list[str]:
    """Return symbols of which the last is a mark, and no comma."""
    end = len(symbols)
    while symbols[end - 1] == ",":
        end -= 1
    return [*symbols[:end], *([] if symbols[end - 1] in PHRASE_MARKS else ["."])]


def written(text: str, full_stop: str) -> str:
    """Return a text with composed accents, single blanks and a mark at its end."""
    text = " ".join(unicodedata.normalize("NFC", without_invisible(text)).split())
    return text if not text or unicodedata.category(text[-1])[0] == "P" else text + full_stop
