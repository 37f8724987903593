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
from dcar.text.phonemes import MAX_CHARACTERS, in_lexicon, normalize_text, phonemes_of
from dcar.text.spoken import unread_signs

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
_ENGLISH = frozenset("the and to that this with for you they have are from it my your not".split())
# Frequent words of German, French, Spanish, Italian, Dutch and Portuguese that are hardly English
# ones.
_FOREIGN = frozenset(
    """
    und der das nicht ist ich sie wir mit ein eine einen auf für aber auch dem zu von sich
    wie haben wird sind
    le les une est et dans pas que qui nous vous avec sur du des je il elle ce cette ne au mais
    ou sont
    el los las por una para como pero más muy del es en lo su se yo está gli di che non sono
    della nel questo anche più
    het een niet maar ook zijn wij naar voor dat uma não com você seu sua
""".split()
)
_MAY_END = re.compile(r"[.?!…]+[\"')\]”’»]*\s+")
_COMMA = re.compile(r",\s+")
_CONJUNCTION = re.compile(
    r"\s+(?=(?:and|but|or|nor|so|yet|because|although|though|while|whereas|when|whenever|where|which|who|whose|that|if|"
    r"unless|until|since|after|before|as|than|whether)\b)"
)
_BLANK = re.compile(r"\s+")
_IN_WORD = re.compile(r"(?<=\w)(?=\w)")


@dataclass(frozen=True)
class Phrase:
    """Text that is decoded at once, and the silence after it in seconds (0 after the last)."""

    text: str
    pause: float


def phrases(text: str) -> list[Phrase]:
    """Return the sentences of a text in spoken form, long ones divided into their clauses.

    Raises TextError if there are no words, or if the text has more than MAX_TEXT characters.
    """
    parts: list[Phrase] = []
    for block in _sentences_by_block(text):
        for i, sentence in enumerate(block, 1):
            *clauses, last = split_clauses(sentence)
            parts += [Phrase(clause, BREATH_SECONDS) for clause in clauses]
            parts.append(Phrase(last, PAUSE_SECONDS if i < len(block) else PARAGRAPH_SECONDS))
    return [*parts[:-1], Phrase(parts[-1].text, 0.0)]


def note_what_is_not_read(text: str) -> None:
    """Warn of signs that are left out, and of a text that does not look English, because it is
    read with English pronunciation."""
    if signs := unread_signs(text):
        logger.warning("note: signs without a reading are left out: %s", " ".join(signs[:8]))
    # not the letters of "2nd" or "x²", nor those of a formula
    words = [word.lower() for word in re.findall(r"\b[^\W\d_]{2,}\b", text[:5000])]
    foreign = sum(word in _FOREIGN for word in words)
    unknown = sum(not in_lexicon(word) for word in words)
    english = sum(word in _ENGLISH for word in words)
    if (
        len(words) >= 3
        and english < 0.1 * len(words)
        and (unknown > 0.5 * len(words) or (foreign >= 2 and foreign + unknown > 0.35 * len(words)))
    ):
        logger.warning(
            "note: this text does not look English (%d of its first %d words); it is read with "
            "English pronunciation, the only one supported",
            max(foreign, unknown),
            len(words),
        )


def _sentences_by_block(text: str) -> list[list[str]]:
    """Return the sentences of each paragraph, heading and item. An empty line ends one; other line
    breaks do not."""
    if not isinstance(text, str) or not _sayable(text):
        return [_sentences(text)]
    if len(text) > MAX_TEXT:
        raise TextError(
            f"the text has {len(text)} characters, but the limit is {MAX_TEXT}; divide it into "
            "parts"
        )
    return [
        [s for piece in _pieces(block) if _sayable(piece) for s in _sentences(piece)]
        for paragraph in _PARAGRAPH.split(text)
        for block in _blocks(paragraph)
        if _sayable(block)
    ]


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
        and bool(re.match(r"[\"'“‘(]*[A-Z0-9]", rest[0]))
    )


def _sayable(text: str) -> bool:
    """Return whether there is a letter or digit (a line of asterisks has none)."""
    return any(c.isalnum() for c in text)


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text of at most MAX_CHARACTERS."""
    sentences = [
        s.strip() for s in re.split(r"(?<=[.?!])\s+", normalize_text(text)) if re.search(r"\w", s)
    ]
    if not sentences:
        raise TextError("the text has no words; give at least one")
    return sentences


def _pieces(text: str) -> Iterator[str]:
    """Split a long paragraph into pieces as long as possible, at most MAX_CHARACTERS: at sentence
    ends; a sentence that is longer, at a blank or else anywhere."""
    while len(text) > MAX_CHARACTERS:
        ends = [0, *(m.end() for m in _MAY_END.finditer(text[: 2 * MAX_CHARACTERS])), len(text)]
        cuts = zip(ends, ends[1:], ends[2:], strict=False)
        cut = next(
            (
                at
                for start, at, stop in reversed([c for c in cuts if c[1] <= MAX_CHARACTERS])
                if _is_end(text[start:at], text[at:stop])
            ),
            None,
        )
        if cut is None:
            cut = max(
                (m.end() for m in _BLANK.finditer(text[:MAX_CHARACTERS])), default=MAX_CHARACTERS
            )
        yield text[:cut]
        text = text[cut:]
    yield text


def _is_end(before: str, after: str) -> bool:
    """Return whether a sentence ends between two parts: "Dr." and "Smith came." read differently
    apart and together."""
    before, after = before[-MAX_CHARACTERS // 2 :], after[: MAX_CHARACTERS // 2]
    try:
        return _sentences(before + after) == _sentences(before) + _sentences(after)
    except TextError:
        return False


def split_clauses(sentence: str) -> list[str]:
    """Divide a sentence in spoken form into clauses of at most MAX_PHONEMES, of similar length."""
    if len(phonemes_of(sentence)) <= MAX_PHONEMES:
        return [sentence]
    cut = _cut(sentence)
    return split_clauses(sentence[: cut.start()]) + split_clauses(sentence[cut.end() :])


def _cut(sentence: str) -> re.Match[str]:
    """Return the place to split: the comma nearest to the middle, else before a conjunction; far
    from the middle only if there is nothing nearer. Without either, it is between words, or within
    the only one."""
    middle = len(sentence) / 2

    def nearest(*kinds: re.Pattern[str]) -> list[re.Match[str]]:
        places = (
            min(kind.finditer(sentence), key=lambda m: abs(m.start() - middle), default=None)
            for kind in kinds
        )
        return [m for m in places if m is not None]

    there = nearest(_COMMA, _CONJUNCTION) or nearest(_BLANK) or nearest(_IN_WORD)
    balanced = [m for m in there if abs(m.start() - middle) <= (0.5 - MIN_SHARE) * len(sentence)]
    return next(iter(balanced), None) or min(there, key=lambda m: abs(m.start() - middle))
