"""Money, dates, times, telephone numbers and Roman numerals in words.

Each rule is a pattern and a function of its match; `dcar.text.english.spoken` applies them in its order.
"""

import re

from dcar.text.english.abbreviations import MONTH_SHORT, MONTHS
from dcar.text.english.measures import PAIRS, attributive, count_of, per
from dcar.text.english.numbers import cardinal, digits, number, ordinal, plural, roman, whole, year
from dcar.text.english.tables import table

MONTHS_SHORT = "|".join(m[:3] for m in MONTHS)
MONTH = (
    "(?P<month>" + "|".join(MONTHS) + r"|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec)\b\.?)"
)
# after a time of day
ZONE = r"(?:[ECMP] ?T|[ECMP][SD]T|GMT|UTC|BST|CES?T|IST|JST|Eastern|Central|Mountain|Pacific)\b"

CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"),
    "¥": ("yen", "yen", "", ""),
    "₹": ("rupee", "rupees", "", ""),
    "₩": ("won", "won", "", ""),
    "R$": ("real", "reais", "centavo", "centavos"),
}
DOLLARS = table(
    "US: U S, C: Canadian, CA: Canadian, A: Australian, AU: Australian, NZ: New Zealand, "
    "HK: Hong Kong"
)
CODES = {
    "USD": ("U S dollar", "U S dollars"),
    "EUR": ("euro", "euros"),
    "GBP": ("British pound", "British pounds"),
    "CHF": ("Swiss franc", "Swiss francs"),
    "JPY": ("Japanese yen", "Japanese yen"),
    "CAD": ("Canadian dollar", "Canadian dollars"),
    "AUD": ("Australian dollar", "Australian dollars"),
    "INR": ("Indian rupee", "Indian rupees"),
    "CNY": ("Chinese yuan", "Chinese yuan"),
}
_SCALE_WORDS = table(
    "k: thousand, m: million, mn: million, bn: billion, b: billion, t: trillion, tn: trillion"
)
_NOTES = re.compile(r"\s(?:bills?|notes?|coins?|banknotes?|stamps?|vouchers?|coupons?|tickets?)\b")
REGNAL = (
    "Henry Louis Elizabeth George Charles Edward James Richard William John Paul Napoleon "
    "Catherine Philip Frederick Francis Leo Pius Benedict Gregory Alexander Nicholas Peter Ivan "
    "Ferdinand Ramses Innocent Clement Urban Otto Mary Sixtus Robert Harald Olaf Christian Gustav "
    "Rameses Ptolemy Xerxes Darius"
).split()
COUNTED = (
    "Chapter Part Parts War Volume Section Act Scene Book Phase Type Level Bowl Class Grade Stage "
    "Article Title Table Figure Appendix Apollo Gemini Saturn Rocky Episode Round Group Division "
    "Tier Canto Fantasy Mark Schedule Lesson"
).split()
# products and stories that are numbered, of those that stand before a verb as persons do
_NUMBERED = (
    "Halo Diablo Titan Trident Windows Civilization Doom Quake Terminator Rambo Godfather Alien "
    "Jaws Batman Gladiator Portal Warcraft Starcraft Frozen Avatar Top Dune Sputnik Mercury Skylab Soyuz"
).split()
NAME = r"[A-Z][a-z]+(?:-[A-Z][a-z]+)?"  # of a ruler
NOT_COUNTED = rf"(?!(?:{'|'.join([*COUNTED, *_NUMBERED])})\b)"
TITLES = (
    "King|Queen|Pope|Emperor|Empress|Tsar|Tsarina|Czar|Sultan|Pharaoh|Shah|Kaiser|Emir|Caliph|"
    "Prince|Princess|Duke|Duchess|Patriarch"
)
# what persons do, and numbered things do not
DEEDS = (
    "ruled|reigned|died|abdicated|succeeded|conquered|married|founded|defeated|invaded|fled|spoke|"
    "ordered|commissioned|inherited|fought|signed|wrote|granted|crowned|ascended|became|built|led|"
    "sent|gave|murdered|declared|appointed|besieged|marched|of [A-Z][a-z]+"
)


def pieces_of_money(m: re.Match[str]) -> str:
    one, many, small_one, small_many = CURRENCIES[m["symbol"]]
    if kind := DOLLARS.get(m.groupdict().get("country") or ""):
        one, many = f"{kind} {one}", f"{kind} {many}"
    amount, scale = m["amount"], m["scale"]
    if attributive(m) or _NOTES.match(m.string, m.end()):
        many = one
    if scale:
        return f" {number(amount)} {_SCALE_WORDS.get(scale.lower(), scale.lower())} {many} "
    before, _, fraction = amount.partition(".")
    if fraction and (len(fraction) > 2 or not small_one):
        return f" {number(amount)} {many} "
    units, cents = int(before.replace(",", "") or 0), int(fraction.ljust(2, "0")) if fraction else 0
    parts = []
    if units or not cents:
        parts.append(f"{whole(str(units))} {one if units == 1 else many}")
    if cents:
        parts.append(f"{cardinal(cents)} {small_one if cents == 1 else small_many}")
    return f" {' and '.join(parts)} "


def pence(m: re.Match[str]) -> str:
    """ "99p" → "ninety nine pence"."""
    return f" {number(m['n'])} {'penny' if m['n'] == '1' else 'pence'} "


def scaled(m: re.Match[str]) -> str:
    """ "1.2m people" → "one point two million people", "10k steps" → "ten thousand steps"."""
    return f" {number(m['n'])} {_SCALE_WORDS[m['scale'].lower()]}{' plus' if m['more'] else ''} "


def coded_money(m: re.Match[str]) -> str:
    one, many = CODES[m["before"] or m["after"]]
    amount = m["first"] or m["second"]
    return f" {number(amount)} {one if amount == '1' else many}{per(m) if m['per'] else ''} "


def date(month: str, day: str, year_text: str | None) -> str:
    month = MONTH_SHORT.get(month.rstrip(".").lower(), month)
    return f" {month} {ordinal(int(day))}" + (f", {year_of_date(year_text)} " if year_text else " ")


def month_of_year(m: re.Match[str]) -> str:
    """ "Jan 2020 - Mar 2021" → "January twenty twenty to", "Jan 2020" → "January twenty twenty"."""
    month = MONTH_SHORT.get(m["month"].rstrip(".").lower(), m["month"])
    to = " to" if m[0][-1] in "-– " else ""
    return f"{month} {year_of_date(m['y'])}{to} "


def days(m: re.Match[str]) -> str:
    """ "April 5-7" → "April fifth to seventh"."""
    first, last = int(m["d"]), int(m["e"])
    if not 1 <= first < last <= 31:
        return m[0]
    return f"{date(m['month'], m['d'], None)}to {ordinal(last)}"


def year_of_date(text: str) -> str:
    return year(int(text)) if len(text) == 4 and int(text) >= 1000 else whole(text)


def _american(first: int, second: int) -> tuple[int, int]:
    """Return month and day, in US order unless the first number is not a month."""
    return (first, second) if first <= 12 else (second, first)


def _in_numbers(month: int, day: int, year_text: str | None) -> str | None:
    """Return a date written in numbers; None if the numbers are not a date."""
    return (
        date(MONTHS[month - 1], str(day), year_text)
        if 1 <= month <= 12 and 1 <= day <= 31
        else None
    )


def numeric_date(m: re.Match[str]) -> str:
    first, second, year_text = int(m["a"]), int(m["b"]), m["y"]
    if len(year_text) == 2:
        year_text = ("20" if int(year_text) < 50 else "19") + year_text
    if m["sign"] == ".":  # never American
        first, second = second, first
    return _in_numbers(*_american(first, second), year_text) or m[0]


def day_and_month(m: re.Match[str]) -> str:
    """ "on 5/6" → "on May sixth", in US order unless the first number is not a month."""
    first, second = int(m["a"]), int(m["b"])
    words = None if (first, second) in PAIRS else _in_numbers(*_american(first, second), None)
    return f"{m['before']}{words}" if words else m[0]


def iso_date(m: re.Match[str]) -> str:
    return _in_numbers(int(m["m"]), int(m["d"]), m["y"]) or m[0]


def plural_year(m: re.Match[str]) -> str:
    return plural((year if len(m["t"]) == 4 else cardinal)(int(m["t"])))


def time_of_day(m: re.Match[str]) -> str:
    hour, minute, half = int(m["h"]), m["min"], m["half"]
    if (hour > 23 and (hour, minute) != (24, "00")) or (half and not 1 <= hour <= 12):
        return m[0]
    words = cardinal(hour) if hour else ("zero" if not half else "twelve")
    if minute and int(minute):
        words += (" oh " if int(minute) < 10 else " ") + cardinal(int(minute))
    elif not half:
        words += " o'clock" if 1 <= hour <= 12 else " hundred"
    stop = (
        "."
        if half
        and half.endswith(".")
        and re.match(rf"\s*$|\s+(?!{ZONE})[A-Z]", m.string[m.end() :])
        else ""
    )
    return f" {words}{f' {half[0].upper()} M' if half else ''}{stop} "


def iso_timestamp(m: re.Match[str]) -> str:
    """ "2024-03-15T10:30:00Z" → the date, the time and the zone, each in the form that later
    rules read."""
    zone = ""
    if m[3]:
        hours = (
            ""
            if m[3] == "Z" or not int(m[5])
            else f" {'plus' if m[4] == '+' else 'minus'} {cardinal(int(m[5]))}"
        )
        zone = f" U T C{hours}"
    return f"{m[1]}, {m[2]}{zone}"


def stopwatch_time(m: re.Match[str]) -> str:
    """Read a stopwatch time: "1:45.32" → "one forty five point three two"."""
    minute = int(m["min"])
    return (
        f" {cardinal(int(m['h']))} {'oh ' if minute < 10 else ''}{cardinal(minute)} point "
        f"{digits(m['part'])} "
    )


def time_with_seconds(m: re.Match[str]) -> str:
    hour, minute, second = (int(m[i]) for i in (1, 2, 3))
    if hour > 23:
        return m[0]
    minutes = f" {'oh ' if minute < 10 else ''}{cardinal(minute)}" if minute else ""
    seconds = f" and {count_of(second, 'second')}" if second or not minute else ""
    return f" {cardinal(hour)}{minutes}{seconds} "


def toll_free(m: re.Match[str]) -> str:
    """Read a toll-free number with a word: "1-800-FLOWERS" → "one eight hundred FLOWERS"."""
    code = f"{cardinal(int(m[1][0]))} hundred" if m[1].endswith("00") else digits(m[1])
    return f"one {code} "


def telephone(m: re.Match[str]) -> str:
    """Read a telephone number digit by digit, with a leading "plus", and 1-800 as "one eight
    hundred"."""
    words = digits(m[0])
    if free := re.match(r"1[-. ](800|900)[-. ]", m[0]):
        words = f"one {cardinal(int(free[1][0]))} hundred {digits(m[0][free.end() :])}"
    return f" {'plus ' if m[0].startswith('+') else ''}{words} "


def international(m: re.Match[str]) -> str:
    return telephone(m) if 8 <= sum(c.isdigit() for c in m[0]) <= 15 else m[0]


def counted(m: re.Match[str]) -> str:
    """ "Chapter IV" → "Chapter four"; after a lower-case noun only numerals that cannot be a
    letter or pronoun."""
    noun, text = m["n"], m["r"]
    value = roman(text)
    if (
        value is None
        or (noun[0].islower() and text == "I")
        or (len(text) == 1 and text not in "IVX")
    ):
        return m[0]
    return f"{noun} {cardinal(value)}"


def regnal(m: re.Match[str]) -> str:
    value = roman(m["r"])
    return m[0] if value is None else f"{m['n']} the {ordinal(value)}"


def century(m: re.Match[str]) -> str:
    value = roman(m[1])
    return m[0] if value is None else ordinal(value)


def lone_numeral(m: re.Match[str]) -> str:
    value = roman(m[0])
    if value is None:
        return m[0]
    if len(m[0]) >= 4 and 1500 <= value <= 2099:
        return year(value)
    return cardinal(value) if set(m[0]) <= set("IVX") and m[0] not in ("IV", "XX", "XXX") else m[0]


def year_or_number(m: re.Match[str]) -> str:
    text = m[0]
    if "," not in text and "." not in text and len(text) == 4 and 1100 <= int(text) <= 2099:
        return f" {year(int(text))} "
    return f" {number(text)} "
