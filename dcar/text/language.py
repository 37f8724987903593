"""Languages: how a transcript is compared with its text, where a text may be cut, and what is
evidently of another language.

English has its own rules (`dcar.text.english`); every other language has those of this module,
which need no list of words:
width, composition of accents, capitals and punctuation never count as errors, digits are read as
words where num2words knows the language, and languages that are written without blanks between
words are compared by characters.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass
from typing import Any, ClassVar

from dcar.errors import AssetError
from dcar.sources.packages import pip_extra
from dcar.text.common import without_invisible

BY_CHARACTERS = frozenset("zh yue ja ko th lo my km".split())
WITHOUT_BLANKS = BY_CHARACTERS - {"ko"}
_SIMPLIFIED = ("zh", "yue")
_APOSTROPHES = str.maketrans({"’": "'", "ʼ": "'"})

# frequent words of languages in Latin letters that are hardly words of another
FREQUENT = {
    code: frozenset(words.split())
    for code, words in {
        "en": "the and to that this with for you they have are from it my your not",
        "de": "und der das nicht ist ich sie wir mit ein eine einen auf für aber auch dem zu von "
        "sich wie haben wird sind",
        "fr": "le les une est et dans pas que qui nous vous avec sur du des je il elle ce cette ne "
        "au mais ou sont",
        "es": "el los las por una para como pero más muy del es en lo su se yo está",
        "it": "gli di che non sono della nel questo anche più",
        "nl": "het een niet maar ook zijn wij naar voor dat",
        "pt": "uma não com você seu sua",
    }.items()
}
# first words of the Unicode names of a script's letters, by ISO 15924; another script: by its
# English name
_LETTERS = {
    "Hans": ("CJK",),
    "Hant": ("CJK",),
    "Jpan": ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"),
    "Kore": ("HANGUL", "CJK"),
}
_MAY_END = re.compile(r"[.?!…]+[\"')\]”’»]*(?:\s+|$)|[。！？｡؟।]+[”’」』）\"']*\s*|…+(?=\w)")
_SHORT_FORM = re.compile(r"(?:^|[\s(«“\"'])(?:[^\W\d_]\.|[A-ZÀ-Þ]\w{1,2}\.|\d+\.)$")


@dataclass(frozen=True)
class Language:
    """Rules of one language; see the module. Subclasses know more of theirs."""

    code: str
    name: str

    @property
    def by_characters(self) -> bool:
        """True if errors are counted by characters, because blanks do not separate words."""
        return self.code in BY_CHARACTERS

    @property
    def error_rate(self) -> str:
        """Name of its error rate, WER or CER."""
        return "CER" if self.by_characters else "WER"

    @property
    def normalizer(self) -> str:
        """Name of the rules by which texts are compared, stored with every score."""
        return f"dcar-{'characters' if self.by_characters else 'words'}-1:{self.code}"

    @property
    def separator(self) -> str:
        """Blank between two sentences, or nothing."""
        return "" if self.code in WITHOUT_BLANKS else " "

    @property
    def full_stop(self) -> str:
        """Mark at the end of a sentence that has none."""
        return "。" if self.code in ("zh", "yue", "ja") else "."

    # where clauses may begin without a comma
    conjunction: ClassVar[re.Pattern[str] | None] = None

    def words(self, text: str) -> str:
        """Return a text as recognisers write it: lower-case words separated by single blanks
        (characters, where blanks separate none), numbers as words. May be empty; raises AssetError
        for Chinese without OpenCC."""
        return self._lower(self._plain(text, "'"))

    def canonical(self, text: str) -> str:
        """Return the form in which texts are compared, without any blank where errors are
        counted by characters. May be empty; raises AssetError for Chinese without OpenCC."""
        folded = self._lower(self._plain(text, "")).casefold().replace("i̇", "i")
        return unicodedata.normalize("NFKC", folded)

    def closest(self, reference: str, hypothesis: str) -> tuple[str, str]:
        """Return the readings of two texts with the fewest errors between them. Here every text
        has one."""
        return self.canonical(reference), self.canonical(hypothesis)

    def split(self, text: str) -> list[str]:
        """Return what errors are counted in, of a text of `words` or `canonical`: its words, or its
        characters."""
        return list(text) if self.by_characters else text.split()

    def is_other(self, text: str) -> bool:
        """Return True for a text that is evidently of another language: most of its letters are of
        scripts that this one does not use, or its frequent words are those of another."""
        if self.has_other_script(text):
            return True
        words = [word.lower() for word in re.findall(r"[^\W\d_]{2,}", text[:5000])]
        if self.code not in FREQUENT or len(words) < 3:
            return False
        counts = {
            code: sum(word in frequent for word in words) for code, frequent in FREQUENT.items()
        }
        own = counts.pop(self.code)
        return max(counts.values()) >= max(2, own + 2, 0.2 * len(words))

    def has_other_script(self, text: str) -> bool:
        """Return True if most letters of a text are of scripts that this language does not use."""
        letters = [c for c in text[:2000] if c.isalpha()]
        scripts = _scripts(self.code)
        strange = sum(unicodedata.name(c, "").split(" ")[0] not in scripts for c in letters)
        return bool(scripts) and 2 * strange > len(letters) >= 3

    def unread(self, text: str) -> list[str]:
        """Return the signs of a text that its reading leaves out."""
        return []

    def ends(self, text: str) -> list[int]:
        """Return where the sentences of a written text end, in order; the last one is its end.

        A full stop after a capital letter or two, a number or an abbreviation of up to three
        letters ends none.
        """
        found = (m.end() for m in _MAY_END.finditer(text) if self.is_end(text, m))
        return [*(end for end in found if end < len(text)), len(text)]

    def last_end(self, text: str, most: int) -> int | None:
        """Return the last place where a sentence of a text ends, up to character `most`; None if
        there is none."""
        marks = [m for m in _MAY_END.finditer(text[: 2 * most]) if m.end() <= most]
        return next((m.end() for m in reversed(marks) if self.is_end(text, m)), None)

    def is_end(self, text: str, mark: re.Match[str]) -> bool:
        """Return True if a sentence ends with a mark of `_MAY_END`."""
        if mark[0][0] != ".":
            return True
        before, after = text[: mark.start() + 1], text[mark.end() :].lstrip("¿¡«„“\"'(")
        return not (after[:1].islower() or _SHORT_FORM.search(before))

    def _lower(self, text: str) -> str:
        if self.code in ("tr", "az"):
            text = text.replace("İ", "i").replace("I", "ı")
        return text.lower()

    def _plain(self, text: str, kept: str) -> str:
        """Return letters, their marks, and numbers in words, single blanks for all else but the
        characters in `kept`."""
        text = without_invisible(unicodedata.normalize("NFKC", text)).translate(_APOSTROPHES)
        text = _number(self.code).sub(lambda m: f" {_in_words(self.code, m)} ", text)
        if self.code in _SIMPLIFIED:
            text = simplifier().convert(text)
        plain = "".join(
            c if unicodedata.category(c)[0] in "LMN" or c in kept else " " for c in text
        ).split()
        words = (word.strip(kept) for word in plain)
        return ("" if self.by_characters else " ").join(word for word in words if word)


@functools.cache
def _scripts(code: str) -> tuple[str, ...]:
    """Return the first words of the Unicode names of a language's letters; none if unknown."""
    from babel import Locale
    from babel.core import get_global

    full = get_global("likely_subtags").get(code, "").split("_")
    if len(full) < 2:
        return ()
    return _LETTERS.get(full[1]) or ((Locale("en").scripts[full[1]].split()[0].upper()),)


@functools.cache
def _number(code: str) -> re.Pattern[str]:
    """Return the pattern of a number, in a language's own writing of groups and decimals."""
    from babel import Locale, UnknownLocaleError

    try:
        symbols = Locale.parse(code).number_symbols["latn"]
        group, decimal = symbols["group"], symbols["decimal"]
    except (UnknownLocaleError, ValueError, KeyError):
        group, decimal = ",", "."
    groups = " \u00a0\u202f" if group.isspace() else group
    return re.compile(
        rf"(?P<whole>\d{{1,3}}(?:[{re.escape(groups)}]\d{{3}})+(?!\d)|\d+)"
        rf"(?:{re.escape(decimal)}(?P<part>\d+))?(?P<year>年)?"
    )


MOST_DIGITS = 15  # of a number; longer ones are read digit by digit, as are those that begin with 0


def _in_words(code: str, number: re.Match[str]) -> str:
    """Return a number of `_number` in words; as it is where no rules are known."""
    whole = "".join(str(unicodedata.digit(c)) for c in number["whole"] if c.isdigit())
    part = "".join(str(unicodedata.digit(c)) for c in number["part"] or "")
    after = number["year"] or ""
    if code in _SIMPLIFIED:
        year = bool(after) and len(whole) == 4
        spoken = _digit_by_digit(whole) if year else _chinese(whole)
        return spoken + ("点" + _digit_by_digit(part) if part else "") + after
    return (_by_num2words(code, whole, part) or whole + part) + after


@functools.lru_cache(maxsize=8192)
def _by_num2words(code: str, whole: str, part: str) -> str:
    """Return a number in words; nothing if num2words does not know the language."""
    from num2words import num2words

    try:
        if len(whole) > MOST_DIGITS or (whole[0] == "0" and len(whole) > 1):
            return " ".join(num2words(int(c), lang=code) for c in whole + part)
        return str(num2words(float(f"{whole}.{part}") if part else int(whole), lang=code))
    except NotImplementedError:  # by which num2words says that it does not know the language
        return ""


_ZH_DIGITS = "零一二三四五六七八九"


def _digit_by_digit(digits: str) -> str:
    return "".join(_ZH_DIGITS[int(c)] for c in digits)


def _chinese(digits: str) -> str:
    """Return a whole number in Chinese; digit by digit if it begins with 0 or is longer than twelve
    digits."""
    if len(digits) > 12 or (digits[0] == "0" and len(digits) > 1):
        return _digit_by_digit(digits)
    text, zero = "", False
    for i, c in enumerate(digits):
        place = len(digits) - 1 - i
        if c != "0":
            text += "零" if zero and text else ""
            text += _ZH_DIGITS[int(c)] + ("", "十", "百", "千")[place % 4]
        zero = c == "0"
        if place % 4 == 0 and place and digits[max(0, i - 3) : i + 1].strip("0"):
            text, zero = text + ("万", "亿")[place // 4 - 1], False
    return re.sub("^一十", "十", text) or "零"


@functools.cache
def simplifier() -> Any:
    """Return the converter from traditional to simplified characters, by which both are equal.
    Raises AssetError without OpenCC."""
    try:
        from opencc import OpenCC
    except ImportError:
        raise AssetError(
            "Chinese texts are compared in simplified characters, which needs OpenCC; run: "
            f"{pip_extra('judge')}"
        ) from None
    return OpenCC("t2s")
