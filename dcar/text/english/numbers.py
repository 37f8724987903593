"""Numbers as words: whole numbers, decimals, ordinals, years, digits one by one, Roman numerals."""

import re

from num2words import num2words

_ONES = "zero one two three four five six seven eight nine".split()
_ROMAN = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_ROMAN_FORM = re.compile("(?=.)M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")


def _words(number: int, kind: str) -> str:
    return " ".join(re.sub(r"\band\b|[,-]", " ", num2words(number, to=kind)).split())


def cardinal(number: int) -> str:
    """Return the words of a whole number: 1234 → "one thousand two hundred thirty four"."""
    return _words(number, "cardinal")


def ordinal(number: int) -> str:
    """Return the ordinal of a whole number: 23 → "twenty third"."""
    return _words(number, "ordinal")


def year(number: int) -> str:
    """Return a year in words: 1905 → "nineteen oh five", 2001 → "two thousand one", 2024 →
    "twenty twenty four"."""
    century, rest = divmod(number, 100)
    if number % 1000 < 10:
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def digits(text: str) -> str:
    """Read digit by digit: "555-0134" → "five five five zero one three four"."""
    return " ".join(_ONES[int(c)] for c in text if c.isdigit())


def whole(text: str) -> str:
    """Return a whole number, with optional thousands commas, in words; digit by digit if it
    begins with 0 or is very long."""
    plain = text.replace(",", "")
    if len(plain) > 15 or (len(plain) > 1 and plain.startswith("0")):
        return digits(plain)
    return cardinal(int(plain))


def number(text: str) -> str:
    """Return a decimal or whole number, with optional thousands commas, in words: "3.14" →
    "three point one four"."""
    before, point, fraction = text.partition(".")
    return (whole(before) if before else "zero") + (
        f" point {digits(fraction)}" if point and fraction else ""
    )


def plural(words: str) -> str:
    """Return the plural of a number in words: "nineteen ninety" → "nineteen nineties"."""
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def roman(text: str) -> int | None:
    """Return the value of a well-formed Roman numeral ("XIV", "xiv"), None for anything else
    ("IIX", "MIXER")."""
    letters = text.upper()
    if not _ROMAN_FORM.fullmatch(letters):
        return None
    values = [_ROMAN[c] for c in letters]
    return sum(-v if i + 1 < len(values) and v < values[i + 1] else v for i, v in enumerate(values))
