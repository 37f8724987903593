"""Division of a text into phrases that are decoded one by one: sentences, and clauses of sentences
that are too long.

A long sentence is split at a comma (semicolons, colons, dashes and brackets are commas in the
spoken form) or, if none is near the middle, before a conjunction or a relative pronoun, and if it
has neither, as an address of the net, between words. Paragraphs,
headings and list items are separate, whether or not they end in a full stop.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dcar.errors import TextError
from dcar.text.base import TextUnits
from dcar.text.common import MAX_CHARACTERS
from dcar.text.language import Language

logger = logging.getLogger(__name__)

MAX_TEXT = 100_000  # characters of a whole text; a sentence has MAX_CHARACTERS at most
MAX_PHONEMES = 200  # of what is decoded at once; the starter decoder has seen about 100
PAUSE_SECONDS = 0.15  # between sentences
BREATH_SECONDS = 0.08  # between clauses of one sentence
PARAGRAPH_SECONDS = 0.5  # after a paragraph, a heading, an item of a list
MIN_SHARE = 0.25  # of a sentence that a cut must leave on either side, if another kind of cut can

_PARAGRAPH = re.compile(r"\n\s*\n")
# of a heading, an item, a quotation, a row
_MARKER = re.compile(r"\s*(?:#{1,6}\s+|[-*+•–>]\s+|(\d{1,3})[.)]\s+|\|)")
HEADING = 60  # characters of a first line that may be one
_COMMA = re.compile(r"[,;:]\s+|[，、；：]\s*")
_BLANK = re.compile(r"\s+")
_IN_WORD = re.compile(r"(?<=\w)(?=\w)")


@dataclass(frozen=True)
class Phrase:
    """Text that is decoded at once, and the silence after it in seconds (0 after the last)."""

    text: str
    pause: float


def phrases(text: str, units: TextUnits, language: Language) -> list[Phrase]:
    """Return the sentences of a text as they are read, long ones divided into their clauses.

    units: what the decoder reads. Raises TextError if there are no words, or if the text has more
    than MAX_TEXT characters.
    """
    reader = _Reader(units, language)
    parts: list[Phrase] = []
    for block in reader.sentences_by_block(text):
        for i, sentence in enumerate(block, 1):
            *clauses, last = reader.clauses(sentence)
            parts += [Phrase(clause, BREATH_SECONDS) for clause in clauses]
            parts.append(Phrase(last, PAUSE_SECONDS if i < len(block) else PARAGRAPH_SECONDS))
    return [*parts[:-1], Phrase(parts[-1].text, 0.0)]


def note_what_is_not_read(text: str, language: Language) -> None:
    """Warn of signs that are left out, and of a text that is evidently of another language than it
    is read in."""
    if signs := language.unread(text):
        logger.warning("note: signs without a reading are left out: %s", " ".join(signs[:8]))
    if language.is_other(text):
        logger.warning(
            "note: this text does not look %s, but it is read with %s pronunciation, which is what "
            "the decoder was trained on",
            language.name,
            language.name,
        )


class _Reader:
    """Divider of texts in one language, read in the units of a decoder."""

    def __init__(self, units: TextUnits, language: Language) -> None:
        self.units, self.language = units, language

    def sentences_by_block(self, text: str) -> list[list[str]]:
        """Return the sentences of each paragraph, heading and item. An empty line ends one; other
        line breaks do not."""
        if not isinstance(text, str) or not _sayable(text):
            return [self._sentences(text)]
        if len(text) > MAX_TEXT:
            raise TextError(
                f"the text has {len(text)} characters, but the limit is {MAX_TEXT}; divide it into "
                "parts"
            )
        return [
            [s for piece in self._pieces(block) if _sayable(piece) for s in self._sentences(piece)]
            for paragraph in _PARAGRAPH.split(text)
            for block in _blocks(paragraph)
            if _sayable(block)
        ]

    def _sentences(self, text: str) -> list[str]:
        """Return the sentences of a text of at most MAX_CHARACTERS."""
        sentences = self.units.sentences(text, self.language)
        if not sentences:
            raise TextError("the text has no words; give at least one")
        return sentences

    def _pieces(self, text: str) -> Iterator[str]:
        """Split a long paragraph into pieces as long as possible, at most MAX_CHARACTERS: at
        sentence ends; a sentence that is longer, at a blank or else anywhere."""
        while len(text) > MAX_CHARACTERS:
            cut = self.language.last_end(text, MAX_CHARACTERS)
            if cut is None:
                blanks = (m.end() for m in _BLANK.finditer(text[:MAX_CHARACTERS]))
                cut = max(blanks, default=MAX_CHARACTERS)
            yield text[:cut]
            text = text[cut:]
        yield text

    def clauses(self, sentence: str) -> list[str]:
        """Divide a sentence, as it is read, into clauses of at most MAX_PHONEMES, of similar
        length."""
        if self.units.length(sentence) <= MAX_PHONEMES:
            return [sentence]
        cut = self._cut(sentence)
        return self.clauses(sentence[: cut.start()]) + self.clauses(sentence[cut.end() :])

    def _cut(self, sentence: str) -> re.Match[str]:
        """Return the place to split: the comma nearest to the middle, else before a conjunction;
        far from the middle only if there is nothing nearer. Without either, it is between words,
        or within the only one."""
        middle = len(sentence) / 2

        def nearest(*kinds: re.Pattern[str] | None) -> list[re.Match[str]]:
            places = (
                min(kind.finditer(sentence), key=lambda m: abs(m.start() - middle), default=None)
                for kind in kinds
                if kind is not None
            )
            return [m for m in places if m is not None]

        there = nearest(_COMMA, self.language.conjunction)
        if not self.language.separator:
            there += nearest(_BLANK, _IN_WORD)
        there = there or nearest(_BLANK) or nearest(_IN_WORD)
        most = (0.5 - MIN_SHARE) * len(sentence)
        balanced = [m for m in there if abs(m.start() - middle) <= most]
        return next(iter(balanced), None) or min(there, key=lambda m: abs(m.start() - middle))


def _blocks(paragraph: str) -> Iterator[str]:
    """Return the blocks of a paragraph: headings and list items separately, without their
    markers; lines without a word end a block."""
    lines = paragraph.splitlines()
    marks = [_MARKER.match(line) for line in lines]
    listed = len([m for m in marks if m]) > 1 or any(marks[:1])
    block: list[str] = []
    for i, line in enumerate(lines):
        mark = marks[i] if listed else None
        if block and (mark or not _sayable(line)):
            yield "\n".join(block)
            block = []
        if mark:
            line = (f"{mark[1]}, " if mark[1] else "") + line[mark.end() :]
        if _sayable(line):
            block.append(line)
        if block and ((mark and "#" in mark[0]) or (i == 0 and _is_heading(lines))):
            yield "\n".join(block)
            block = []
    yield "\n".join(block)


def _is_heading(lines: list[str]) -> bool:
    """Return whether the first line of a paragraph is a heading: shorter than the others,
    without punctuation at its end, and the next line starts like a sentence."""
    first, *rest = (line.strip() for line in lines)
    return (
        bool(rest)
        and len(first) <= min(HEADING, 0.6 * max(map(len, rest)))
        and first[-1:].isalnum()
        and _begins(rest[0].lstrip("\"'“‘(¿¡«„"))
    )


def _begins(line: str) -> bool:
    """Return whether a line begins like a sentence: with a digit, or a letter that is not small."""
    return line[:1].isalnum() and not line[:1].islower()


def _sayable(text: str) -> bool:
    """Return whether there is a letter or digit (a line of asterisks has none)."""
    return any(c.isalnum() for c in text)
