"""Written English → spoken English: numbers, money, dates, times, units, abbreviations and initialisms as words.

gruut can expand numbers too, but it reads "12/03" with today's year, "$5 million" as "five dollars million",
"St. Louis" as "Street Louis" and spells "THE" as three letters; a training corpus needs a reading that is the same
every day and every time. So the text is expanded here by rules that can be read, and gruut only pronounces words.

The result is plain: words of a-z, A-Z and apostrophes, and the phrase marks `, . ? !`. A single capital other than "I"
is a letter to be spelled ("N B A"), never the article, which is written "a".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from num2words import num2words

from dcar.errors import TextError

NORMALIZATION_VERSION = "1"


def _words(text: str) -> list[str]:
    return text.split()


_ONES = _words("zero one two three four five six seven eight nine")
_TENS = _words("_ _ twenty thirty forty fifty sixty seventy eighty ninety")
_MONTHS = _words("January February March April May June July August September October November December")
_MONTH_SHORT = {m[:3].lower(): m for m in _MONTHS} | {"sept": "September"}
_CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"),
    "¥": ("yen", "yen", "", ""),
}
_SCALE_WORDS = {"k": "thousand", "m": "million", "mn": "million", "bn": "billion", "b": "billion", "tn": "trillion"}
_UNITS = {
    "mm": "millimeter", "cm": "centimeter", "km": "kilometer", "m": "meter", "ft": "foot", "mg": "milligram",
    "g": "gram", "kg": "kilogram", "lb": "pound", "lbs": "pound", "oz": "ounce", "ml": "milliliter", "mL": "milliliter",
    "kB": "kilobyte", "KB": "kilobyte", "MB": "megabyte", "GB": "gigabyte", "TB": "terabyte", "Hz": "hertz",
    "kHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz", "W": "watt", "kW": "kilowatt", "kWh": "kilowatt-hour",
    "MW": "megawatt", "V": "volt", "dB": "decibel", "ms": "millisecond", "um": "micrometer", "ug": "microgram",
    "sec": "second",
    "secs": "second", "min": "minute", "mins": "minute", "hr": "hour", "hrs": "hour", "mph": "mile per hour",
    "km/h": "kilometer per hour", "kph": "kilometer per hour", "m/s": "meter per second", "°C": "degree Celsius",
    "°F": "degree Fahrenheit", "°": "degree",
}  # fmt: skip
# Read with or without the full stop that follows; "dr" and "st" depend on their neighbours and are handled apart.
_ABBREVIATIONS = {
    "mr": "Mister", "mrs": "Missus", "ms": "Ms", "messrs": "Messieurs", "prof": "Professor", "jr": "Junior",
    "sr": "Senior", "vs": "versus",
}  # fmt: skip
_TITLES = {  # only before a name: "Gen. Lee", never "gen."
    "gen": "General", "gov": "Governor", "sen": "Senator", "rep": "Representative", "capt": "Captain",
    "lt": "Lieutenant", "col": "Colonel", "sgt": "Sergeant", "rev": "Reverend", "hon": "Honorable", "pres": "President",
    "mt": "Mount", "ft": "Fort", "drs": "Doctors",
}  # fmt: skip
_DOTTED_ABBREVIATIONS = {
    "ave": "Avenue", "blvd": "Boulevard", "rd": "Road", "dept": "Department", "inc": "Incorporated", "ltd": "Limited",
    "corp": "Corporation", "bros": "Brothers", "assn": "Association", "univ": "University", "approx": "approximately",
    "etc": "et cetera", "vol": "volume", "pp": "pages", "esq": "Esquire",
}  # fmt: skip
_DAYS = {  # everyday words too ("sat.", "sun."): only with a capital and inside a sentence
    "mon": "Monday", "tue": "Tuesday", "tues": "Tuesday", "wed": "Wednesday", "thu": "Thursday", "thur": "Thursday",
    "thurs": "Thursday", "fri": "Friday", "sat": "Saturday", "sun": "Sunday",
}  # fmt: skip
# A full stop after these may end the sentence as well: "etc." before a capital or at the end keeps it.
_MAY_END = frozenset({"etc", "inc", "ltd", "corp", "jr", "sr", "ave", "rd", "blvd", "dept", "bros", "esq"})
_REGNAL = _words(
    "Henry Louis Elizabeth George Charles Edward James Richard William John Paul Napoleon Catherine Philip Frederick "
    "Francis Leo Pius Benedict Gregory Alexander Nicholas Peter Ivan Ferdinand Ramses Innocent Clement Urban Otto "
    "Rocky Mary Sixtus Robert Harald Olaf Christian Gustav Rameses Ptolemy Xerxes Darius"
)
_LETTER_NAMES = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi",
    "ς": "sigma", "χ": "chi", "ψ": "psi", "ω": "omega",
}  # fmt: skip
_LATIN = str.maketrans({
    "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ø": "o", "Ø": "O", "ß": "ss", "ẞ": "SS", "ł": "l", "Ł": "L", "đ": "d",
    "Đ": "D", "ð": "th", "Ð": "Th", "þ": "th", "Þ": "Th", "ı": "i",
})  # fmt: skip
_MARKS = str.maketrans({
    "’": "'", "‘": "'", "ʼ": "'", "`": "'", "´": "'", "＇": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"',
    "‐": "-", "‑": "-", "−": "-", "–": "–", "—": "—", "―": "—", "…": "...", "²": " squared ", "³": " cubed ",
    "×": " times ", "÷": " divided by ", "±": " plus or minus ", "≈": " about ", "≠": " is not equal to ",
    "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "™": " ", "®": " ", "©": " ", "€": "€", "µ": "μ",
    "Ω": "Ω", "。": ". ", "、": ", ", "\u00ad": None, "\u200b": None, "\u200d": None, "\ufeff": None,
})  # fmt: skip
_SPELLED = frozenset(_words(
    "US USA UK EU UN TV PC IT AI ID CEO CFO CTO PM AM HQ FBI CIA DNA RNA BBC CNN NBA NFL GDP GPS USB VIP DIY FAQ OK "
    "PR HR IQ MP ER ICU UFO AP PE PI EP LA DC NY"
))  # fmt: skip
_VOWELS = set("aeiouyAEIOUY")


def _said(number: int, kind: str) -> str:
    return " ".join(re.sub(r"\band\b|[,-]", " ", num2words(number, to=kind)).split())


def cardinal(number: int) -> str:
    """The words of a whole number: 1234 → "one thousand two hundred thirty four"."""
    return _said(number, "cardinal")


def ordinal(number: int) -> str:
    """The ordinal of a whole number: 23 → "twenty third"."""
    return _said(number, "ordinal")


def year(number: int) -> str:
    """A year as it is said: 1905 → "nineteen oh five", 2001 → "two thousand one", 2024 → "twenty twenty four"."""
    century, rest = divmod(number, 100)
    if number % 1000 < 10:
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def digits(text: str) -> str:
    """Digit by digit: "555-0134" → "five five five zero one three four"."""
    return " ".join(_ONES[int(c)] for c in text if c.isdigit())


def _whole(text: str) -> str:
    plain = text.replace(",", "")
    if len(plain) > 15 or (len(plain) > 1 and plain.startswith("0")):
        return digits(plain)
    return cardinal(int(plain))


def _number(text: str) -> str:
    """A decimal or whole number with optional thousands commas: "3.14" → "three point one four"."""
    whole, point, fraction = text.partition(".")
    return (_whole(whole) if whole else "zero") + (f" point {digits(fraction)}" if point and fraction else "")


def _plural_year(text: str) -> str:
    words = year(int(text)) if len(text) == 4 else _TENS[int(text[0])]
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _money(m: re.Match[str]) -> str:
    one, many, small_one, small_many = _CURRENCIES[m["symbol"]]
    amount, scale = m["amount"], m["scale"]
    if scale:
        return f" {_number(amount)} {_SCALE_WORDS.get(scale.lower(), scale.lower())} {many} "
    whole, _, fraction = amount.partition(".")
    if fraction and (len(fraction) > 2 or not small_one):
        return f" {_number(amount)} {many} "
    units, cents = int(whole.replace(",", "") or 0), int(fraction.ljust(2, "0")) if fraction else 0
    parts = []
    if units or not cents:
        parts.append(f"{_whole(str(units))} {one if units == 1 else many}")
    if cents:
        parts.append(f"{cardinal(cents)} {small_one if cents == 1 else small_many}")
    return f" {' and '.join(parts)} "


def _date(month: str, day: str, year_text: str | None) -> str:
    return f" {month} {ordinal(int(day))}" + (f", {_year_text(year_text)} " if year_text else " ")


def _year_text(text: str) -> str:
    return year(int(text)) if len(text) == 4 and int(text) >= 1000 else _whole(text)


def _numeric_date(m: re.Match[str]) -> str:
    first, second, year_text = int(m["a"]), int(m["b"]), m["y"]
    month, day = (first, second) if first <= 12 else (second, first)  # US order unless that is no month
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return m[0]
    return _date(_MONTHS[month - 1], str(day), year_text)


def _iso_date(m: re.Match[str]) -> str:
    month, day = int(m["m"]), int(m["d"])
    return _date(_MONTHS[month - 1], str(day), m["y"]) if 1 <= month <= 12 and 1 <= day <= 31 else m[0]


def _time(m: re.Match[str]) -> str:
    hour, minute, half = int(m["h"]), m["min"], m["half"]
    if hour > 23 or (half and not 1 <= hour <= 12):
        return m[0]
    words = cardinal(hour) if hour else ("zero" if not half else "twelve")
    if minute and int(minute):
        words += (" oh " if int(minute) < 10 else " ") + cardinal(int(minute))
    elif not half:
        words += " o'clock" if 1 <= hour <= 12 else " hundred"
    stop = "." if half and half.endswith(".") and re.match(r"\s*$|\s+[A-Z]", m.string[m.end() :]) else ""
    return f" {words}{f' {half[0].upper()} M' if half else ''}{stop} "


_FRACTIONS = {2: "half", 4: "quarter"}
_SAID_AS_PAIR = {(24, 7), (9, 11)}


def _fraction(m: re.Match[str]) -> str:
    whole, top, bottom = m["whole"], int(m["top"]), int(m["bottom"])
    if (top, bottom) in _SAID_AS_PAIR and not whole:
        return f" {cardinal(top)} {cardinal(bottom)} "
    if 2 <= bottom <= 20 and 1 <= top < bottom:
        name = _FRACTIONS.get(bottom, ordinal(bottom))
        many = "halves" if bottom == 2 else name + "s"
        words = f"{cardinal(top)} {name if top == 1 else many}"
        return f" {_whole(whole)} and {re.sub('^one ', 'a ', words)} " if whole else f" {words} "
    words = f"{cardinal(top)} over {cardinal(bottom)}"
    return f" {_whole(whole)} {words} " if whole else f" {words} "


def _unit(m: re.Match[str]) -> str:
    first, per, rest = _UNITS[m["unit"]].partition(" ")
    if m["n"] != "1" and not first.endswith("hertz"):
        first = "feet" if first == "foot" else first + "s"
    return f" {_number(m['n'])} {first}{per}{rest} "


def _roman_value(text: str) -> int:
    values = [{"I": 1, "V": 5, "X": 10}[c] for c in text]
    return sum(-v if i + 1 < len(values) and v < values[i + 1] else v for i, v in enumerate(values))


def _year_or_number(m: re.Match[str]) -> str:
    text = m[0]
    if "," not in text and "." not in text and len(text) == 4 and 1100 <= int(text) <= 2099:
        return f" {year(int(text))} "
    return f" {_number(text)} "


_NUM = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_MONTH = "(?P<month>" + "|".join(_MONTHS) + r"|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec)\b\.?)"


def _month_name(text: str) -> str:
    return _MONTH_SHORT.get(text.rstrip(".").lower(), text)


_ORDERED: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    # addresses of the net, before anything touches their punctuation
    (re.compile(r"\bhttps?://", re.IGNORECASE), ""),
    (re.compile(r"(?<=\w)@(?=\w)"), " at "),
    (re.compile(r"\b(?:www\.)?[A-Za-z][\w-]*(?:\.[\w-]+)*\.(?:com|org|net|edu|gov|io|co\.uk|ai)\b(?:/\S*\w)?"),
     lambda m: m[0].replace("www.", "W W W dot ").replace(".", " dot ").replace("/", " slash ")),
    (re.compile(rf"(?P<symbol>[$£€¥])\s?(?P<amount>{_NUM}|\.\d+)"
                r"(?:\s?(?P<scale>thousand|million|billion|trillion|[kK]\b|[mM]n?\b|[bB]n?\b|tn\b))?"), _money),
    (re.compile(rf"(?P<amount>{_NUM})\s?(?P<symbol>€)(?P<scale>)"), _money),
    (re.compile(r"\b(?P<y>[12]\d{3})-(?P<m>\d{2})-(?P<d>\d{2})\b"), _iso_date),
    (re.compile(r"(?<![\d/])(?P<a>\d{1,2})/(?P<b>\d{1,2})/(?P<y>[12]\d{3})(?![\d/])"), _numeric_date),
    (re.compile(rf"\b{_MONTH}\s+(?P<d>[0-3]?\d)(?:st|nd|rd|th)?(?![\d:.]\d|\d|,\d{{3}}\b)(?:,?\s+(?P<y>[12]\d{{3}})\b)?"),
     lambda m: _date(_month_name(m["month"]), m["d"], m["y"]) if 1 <= int(m["d"]) <= 31 else m[0]),
    (re.compile(rf"\b(?P<the>the )?(?P<d>[0-3]?\d)(?:st|nd|rd|th)?\s+{_MONTH}(?:,?\s+(?P<y>[12]\d{{3}})\b)?"),
     lambda m: f"{m['the'] or 'the '}{ordinal(int(m['d']))} of {_month_name(m['month'])} "
               + (f"{_year_text(m['y'])} " if m["y"] else "") if 1 <= int(m["d"]) <= 31 else m[0]),
    (re.compile(r"\b(?P<h>\d{1,2}):(?P<min>[0-5]\d)(?!:?\d)\s?(?P<half>[ap]\.m\.|[ap]m\b)?", re.IGNORECASE), _time),
    (re.compile(r"\b(?P<h>\d{1,2})(?P<min>)\s?(?P<half>[ap]\.m\.|[ap]m\b)", re.IGNORECASE), _time),
    (re.compile(r"(?<![\w-])(?:\(?\d{3}\)?[-. ])?\d{3}[-.]\d{4}(?![\w-])"), lambda m: f" {digits(m[0])} "),
    (re.compile(r"(?<!\w)'(?P<t>[1-9]0)s\b"), lambda m: _plural_year(m["t"])),
    (re.compile(r"\b(?P<t>[12]\d\d0|[2-9]0)'?s\b"), lambda m: _plural_year(m["t"])),
    (re.compile(rf"(?<![\w/.])(?:(?P<whole>{_NUM})\s+)?(?P<top>\d{{1,3}})/(?P<bottom>\d{{1,3}})(?![\w/])"), _fraction),
    (re.compile(r"\b(\d[\d,]*)(?:st|nd|rd|th)\b", re.IGNORECASE),
     lambda m: f" {ordinal(int(m[1].replace(',', '')))} " if len(m[1]) < 16 else f" {digits(m[1])} "),
    (re.compile(rf"(?<![\w.,])(?P<n>{_NUM})\s?(?P<unit>" + "|".join(
        re.escape(u) for u in sorted(_UNITS, key=len, reverse=True)) + r")(?![\w/'])"), _unit),
    (re.compile(rf"({_NUM})\s?%"), lambda m: f" {_number(m[1])} percent "),
    (re.compile(rf"(?:#|\b[Nn][Oo]s?\.)\s?(?={_NUM})"), " number "),
    (re.compile(r"\b(\d{1,4})\s?[-–]\s?(?=\d{1,4}\b)"), r"\1 to "),
    (re.compile(r"(?<![\w.])-(?=\.?\d)"), " minus "),
    (re.compile(r"\b(?P<n>Chapter|Part|War|Volume|Section|Act|Scene|Book|Phase|Type|Level|Bowl|Class|Grade|Stage|Article"
                r"|Title)\s+(?P<r>[IVX]{1,5})\b"), lambda m: f"{m['n']} {cardinal(_roman_value(m['r']))}"),
    (re.compile(rf"\b(?P<n>{'|'.join(_REGNAL)})\s+(?P<r>(?=[VX]|II|I[VX])[IVX]{{1,5}})\b"),
     lambda m: f"{m['n']} the {ordinal(_roman_value(m['r']))}"),
    (re.compile(r"(?<![\w.])\.(?=\d)"), "0."),
    (re.compile(r"(?<![\d.])\d+(?:\.\d+){2,}(?![\d.])"), lambda m: " point ".join(map(_whole, m[0].split(".")))),
    # letters and digits that touch are read one after the other: H2O, COVID-19, MP3
    (re.compile(r"(?<=[A-Za-z])-?(?=\d)|(?<=\d)-?(?=[A-Za-z])"), " "),
    (re.compile(_NUM), _year_or_number),
    (re.compile(r"\be\.g\.", re.IGNORECASE), "for example"),
    (re.compile(r"\bi\.e\.", re.IGNORECASE), "that is"),
    (re.compile(r"\bPh\.?D\b\.?"), "P H D"),
    (re.compile(r"\band/or\b", re.IGNORECASE), "and or"),
    (re.compile(r"(?<=[A-Za-z])/(?=[A-Za-z])"), " or "),
    (re.compile(r"\b([A-Z]{1,3})&([A-Z]{1,3})\b"), lambda m: f"{' '.join(m[1])} and {' '.join(m[2])}"),
    (re.compile(r"&"), " and "),
    (re.compile(r"%"), " percent "),
    (re.compile(r"\+"), " plus "),
    (re.compile(r"="), " equals "),
    (re.compile(r"@"), " at "),
]  # fmt: skip


def _abbreviations(text: str) -> str:
    """Titles, streets, companies, weekdays, months: by table; "St." and "Dr." by their neighbours."""

    def word(m: re.Match[str]) -> str:
        name, dot, rest = m["word"], m["dot"], text[m.end() :]
        key = name.lower()
        next_name = re.match(r"\s+[A-Z][a-z']", rest) is not None
        ends = re.match(r"\s*$|\s+[A-Z\"']", rest) is not None
        before = re.search(r"(\w+)\s+$", text[: m.start()])
        after_name = before is not None and before[1][0].isupper() and before[1].lower() not in ("the", "and", "of")
        if not name[0].isupper() and key in ("st", "dr") and not dot:
            return m[0]
        if key == "st" and (dot or next_name):
            return ("Street" + (dot if ends and not next_name else "")) if after_name or not next_name else "Saint"
        if key == "dr" and (dot or next_name):
            return "Doctor" if next_name or not after_name else "Drive" + (dot if ends else "")
        if key in _ABBREVIATIONS:
            if key in ("mr", "mrs", "ms", "messrs", "prof") and not name[0].isupper():
                return m[0]
            return _ABBREVIATIONS[key] + (dot if key in _MAY_END and ends else "")
        if dot and name[0].isupper() and next_name and key in _TITLES:
            return _TITLES[key]
        if dot and name[0].isupper() and not ends:
            return _DAYS.get(key) or _MONTH_SHORT.get(key) or _DOTTED_ABBREVIATIONS.get(key) or m[0]
        if dot and key in _DOTTED_ABBREVIATIONS:
            return _DOTTED_ABBREVIATIONS[key] + (dot if key in _MAY_END and ends else "")
        return m[0]

    def initial(m: re.Match[str]) -> str:
        before = re.search(r"(\S+)\s+$", text[: m.start()])
        another = re.match(r"\s+[A-Z]\.", text[m.end() :]) is not None
        return m[1] if another or before is None or before[1][0].isupper() else m[0]

    text = re.sub(r"(?<![\w.'])([B-HJ-Z])\.(?=\s+[A-Z])", initial, text)
    text = re.sub(r"(?<![\w.'])([AI])\.(?=\s+[A-Z](?:\.|\s))", initial, text)
    return re.sub(r"(?<![\w.'])(?P<word>[A-Za-z]{2,8})(?P<dot>\.?)(?![\w.])", word, text)


def _initialisms(text: str, is_word: Callable[[str], bool]) -> str:
    """Spell "U.S.A.", "IBM", "UK"; read "NASA" and a shouted "STOP" as words; tell the article "a" from the letter."""

    def dotted(m: re.Match[str]) -> str:
        ends = len(m[0]) > 4 and re.match(r"\s*$|\s+[A-Z][a-z]", text[m.end() :]) is not None
        return " ".join(m[0].replace(".", "").upper()) + ("." if ends else "")

    text = re.sub(r"(?<![\w.])(?:[A-Za-z]\.){2,}", dotted, text)
    words = [w for w in re.findall(r"[A-Za-z']+", text) if len(w) > 1]
    shouting = len(words) > 1 and all(w.isupper() for w in words)

    def capitals(m: re.Match[str]) -> str:
        word, tail = m["word"], m["tail"].lower()
        if is_word(word.lower()) and (shouting or word not in _SPELLED):
            return word.lower() + tail
        sayable = len(word) > 5 and bool(_VOWELS & set(word))
        # a plural of letters keeps an apostrophe, so that "V's" is not taken for a word
        return word.lower() + tail if sayable else " ".join(word) + ("'s" if tail else "")

    text = re.sub(r"(?<![A-Za-z'])(?P<word>[A-Z]{2,})(?P<tail>'[sS]|s|)(?![A-Za-z'])", capitals, text)
    # Sentence-initial "A" before a word is the article; anywhere else a lone "A" is the letter.
    return re.sub(r"(?:^|(?<=[.?!,] ))A(?= (?!and |or )(?:[a-z]|[A-Z][a-z']))", "a", " ".join(text.split()))


def _fold(text: str) -> str:
    """Compatibility forms, accents and other scripts' digits to ASCII; a lone Greek letter to its name.

    Raises TextError where letters remain that English phonemes cannot say: leaving words out would be a wrong reading.
    """
    folded = unicodedata.normalize("NFKC", text.translate(_MARKS)).translate(_LATIN)
    folded = re.sub(r"μ(?=[mg]\b)", "u", folded)  # 10 μm, 5 μg: found again in the table of units
    folded = re.sub(
        r"(?<![\u0370-\u03ff])[\u0370-\u03ff](?![\u0370-\u03ff])",
        lambda m: f" {_LETTER_NAMES[m[0].lower()]} " if m[0].lower() in _LETTER_NAMES else m[0],
        folded,
    )
    out = []
    for c in folded:
        if c.isascii():
            out.append(c)
        elif (value := unicodedata.decimal(c, None)) is not None:
            out.append(str(value))
        elif c in "–—£€¥°":
            out.append(c)
        elif c.isalpha():
            base = "".join(b for b in unicodedata.normalize("NFD", c) if not unicodedata.combining(b))
            out.append(base if base.isascii() else c)
        elif not unicodedata.combining(c):
            out.append(" ")
    foreign = sorted({c for c in out if c.isalpha() and not c.isascii()})
    if foreign:
        raise TextError(
            f"text holds letters that English phonemes cannot say ({' '.join(foreign[:8])}): {_quote(text)}; "
            "transliterate them or remove the utterance"
        )
    return "".join(out)


def _phrase_marks(text: str) -> str:
    """Keep apostrophes inside words and the marks `, . ? !`; every other sign becomes a pause or a space."""
    text = re.sub(r"\s*\.{2,}\s*$", ".", text)
    text = re.sub(r"\.{2,}|\s-+\s|--+|\s*[–—]\s*|[:;()\[\]{}]", " , ", text)
    text = re.sub(r"(?<![A-Za-z])'|'(?![A-Za-z])", " ", text)
    text = re.sub(r"[^A-Za-z',.?! ]+", " ", text)

    def strongest(m: re.Match[str]) -> str:
        marks = m[0]
        return next(mark for mark in "?!.," if mark in marks) + " "

    text = re.sub(r"\s*[,.?!][\s,.?!]*", strongest, text)
    text = re.sub(r"^[\s,.?!]+", "", text)
    return re.sub(r",\s*$", "", " ".join(text.split()))


def _quote(text: str) -> str:
    short = text if len(text) <= 60 else text[:57] + "..."
    return repr(short)


def expand(text: str, is_word: Callable[[str], bool]) -> str:
    """Spoken form of `text`: words of letters and apostrophes, phrase marks `, . ? !`, single spaces.

    `is_word(lower-case word)` says whether the pronunciation lexicon knows a word; it decides if capitals are an
    initialism. Raises TextError if nothing speakable is in the text or if it is written in another script.
    """
    # abbreviations first: the rules below write letters with stops of their own ("five P M. He left")
    text = _abbreviations(" ".join(_fold(text).split()))
    for pattern, replacement in _ORDERED:
        text = pattern.sub(replacement, text)
    text = _phrase_marks(_initialisms(" ".join(text.split()), is_word))
    if not re.search("[A-Za-z]", text):
        raise TextError("text is empty or has no letter or digit that can be spoken; give at least one English word")
    return text
