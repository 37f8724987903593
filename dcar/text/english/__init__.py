"""English: readings of numbers, dates and abbreviations, American pronunciation, and texts that are
spelled differently but spoken alike."""

import re

from dcar.errors import TextError
from dcar.text.common import MAX_CHARACTERS
from dcar.text.english.phonemes import in_lexicon, normalize_text
from dcar.text.english.spoken import unread_signs
from dcar.text.language import FREQUENT, Language

NORMALIZER = "dcar-english-3"
_FOREIGN = frozenset().union(*(words for code, words in FREQUENT.items() if code != "en"))


class English(Language):
    """Rules of English. `readings` is imported at its first use, because speaking needs none."""

    normalizer = NORMALIZER
    conjunction = re.compile(
        r"\s+(?=(?:and|but|or|nor|so|yet|because|although|though|while|whereas|when|whenever|where|which|who|whose|that|if|"
        r"unless|until|since|after|before|as|than|whether)\b)"
    )

    def words(self, text: str) -> str:
        from dcar.text.english.readings import spoken_words

        return spoken_words(text)

    def canonical(self, text: str) -> str:
        from dcar.text.english.readings import normalize_transcript

        return normalize_transcript(text)

    def closest(self, reference: str, hypothesis: str) -> tuple[str, str]:
        from dcar.text.english.readings import closest_readings

        return closest_readings(reference, hypothesis)

    def is_other(self, text: str) -> bool:
        # not the letters of "2nd" or "x²", nor those of a formula
        words = [word.lower() for word in re.findall(r"\b[^\W\d_]{2,}\b", text[:5000])]
        foreign = sum(word in _FOREIGN for word in words)
        unknown = sum(not in_lexicon(word) for word in words)
        english = sum(word in FREQUENT["en"] for word in words)
        return self.has_other_script(text) or (
            len(words) >= 3
            and english < 0.1 * len(words)
            and (
                unknown > 0.5 * len(words)
                or (foreign >= 2 and foreign + unknown > 0.35 * len(words))
            )
        )

    def unread(self, text: str) -> list[str]:
        return unread_signs(text)

    def is_end(self, text: str, mark: re.Match[str]) -> bool:
        """Return True if the two parts are read alike apart and together, unlike "Dr." and "Smith
        came."."""
        before, after = (
            text[max(0, mark.end() - MAX_CHARACTERS // 2) : mark.end()],
            text[mark.end() : mark.end() + MAX_CHARACTERS // 2],
        )
        try:
            apart = _sentences(before) + _sentences(after)
            return _sentences(before + after) == apart
        except TextError:
            return False


def _sentences(text: str) -> list[str]:
    return [s.strip() for s in re.split(r"(?<=[.?!])\s+", normalize_text(text)) if s.strip()]


ENGLISH = English("en", "English")
