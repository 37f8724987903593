"""Languages by their codes of ISO 639."""

import functools
import re
from collections.abc import Iterable

from dcar.errors import TextError
from dcar.text.language import Language

DEFAULT = "en"
"""Language of the shipped corpus and models, and of corpora that do not say otherwise."""
UNDETERMINED = "und"
"""ISO 639's code for a text whose language nobody said: it can be read, but not scored."""
WITH_PHONEMES = tuple("en zh ar ca cs de es fa fr it lb nl pt ru sv sw".split())
"""Languages that can be read as phonemes: all but English and Mandarin by gruut."""


@functools.cache
def language_of(code: str) -> Language:
    """Return the rules of a language by its code of ISO 639 ("es", "yue"; a region, as in "pt-BR",
    is accepted and not used) or its English name. Raises TextError for an unknown one."""
    from babel import Locale, UnknownLocaleError

    asked = str(code).strip()
    base = re.split("[-_]", asked)[0].lower()
    if len(base) > 3:
        names = {name.lower(): code for code, name in Locale("en").languages.items()}
        base = names.get(asked.lower(), base)
    if base == UNDETERMINED:
        return Language(base, "undetermined")
    if base == "en":
        from dcar.text.english import ENGLISH

        return ENGLISH
    try:
        name = Locale.parse(base).english_name
    except (UnknownLocaleError, ValueError, TypeError):
        raise TextError(
            f"unknown language {asked!r}: give its code of ISO 639, for example yue; "
            f"{', '.join(WITH_PHONEMES)} can be read as phonemes, every other language of "
            "Unicode's CLDR (ja, ko, vi, hi, …) as characters or by a language model's own "
            "tokenizer"
        ) from None
    return Language(base, name or base)


def normalizers_of(codes: Iterable[str]) -> str:
    """Return the names of the rules by which texts in these languages are compared."""
    return ", ".join(sorted({language_of(code).normalizer for code in codes}))


def error_rate_of(codes: set[str]) -> str:
    """Return the name of the error rate of texts in these languages: WER, CER, or both."""
    return "/".join(sorted({language_of(code).error_rate for code in codes}, reverse=True))
