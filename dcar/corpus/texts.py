"""Texts of a corpus: the languages and the units in which they are read, and rows that seem to be
of another language."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dcar.corpus.rows import Utterance
from dcar.errors import TextError
from dcar.text.base import SymbolUnits
from dcar.text.common import check_text
from dcar.text.language import Language
from dcar.text.languages import DEFAULT, language_of
from dcar.text.units import default_kind, units_for

logger = logging.getLogger(__name__)

SHOWN = 3


@dataclass(frozen=True)
class CorpusTexts:
    """Rules of one corpus. language: of rows that do not name theirs. kind: of `units.KINDS`, or ""
    for phonemes where the language has them, else characters."""

    language: str = DEFAULT
    kind: str = ""

    @cached_property
    def units(self) -> SymbolUnits | None:
        """Units of the text ids; None if the inventory is collected from the whole corpus. Raises
        TextError, ConfigError or AssetError if the language has none."""
        kind = self.kind or default_kind(self.language)
        return None if kind == "characters" else units_for(self.language)

    def rules(self, u: Utterance) -> Language:
        """Return the rules of the language of a row."""
        return language_of(u.language or self.language)

    @property
    def name(self) -> str:
        """Name of the units, as far as it is known before the corpus is read."""
        return self.units.name if self.units else f"characters-{language_of(self.language).code}"

    @property
    def size(self) -> int:
        """Number of text ids, or an upper limit."""
        return self.units.size if self.units else 1 << 20

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text; none before there is an inventory."""
        return self.units(text) if self.units else []

    def check(self, u: Utterance, text: str) -> None:
        """Raise TextError for a text that cannot be read, or of a language that is not read."""
        if self.units is not None:
            if u.language and language_of(u.language).code not in self.units.languages:
                raise TextError(
                    f"its language is {u.language}, but the corpus is read as "
                    f"{self.units.languages[0]}: set language={u.language}, or units=characters "
                    "for a corpus of several languages"
                )
            self.units(text)
        elif not self.rules(u).canonical(check_text(text)):
            raise TextError(f"{text[:40]!r} has no words; give at least one")

    def others(self, utterances: Iterable[Utterance]) -> list[str]:
        """Return the rows that are evidently of another language than they are read in: the place
        of each and the beginning of its text."""
        return [
            f"{u.source}: {u.text[:40]!r}" for u in utterances if self.rules(u).is_other(u.text)
        ]

    def note(self, rows: Sequence[str]) -> None:
        """Log the rows of `others`."""
        if rows:
            logger.warning(
                "%d rows do not look like %s, in which they are read: %s; set language=…, name "
                "each row's in a column `language`, or remove them",
                len(rows),
                language_of(self.language).name,
                "; ".join(rows[:SHOWN]),
            )
