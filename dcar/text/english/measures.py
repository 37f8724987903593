"""Measures: units of one letter or more, one unit per another, fractions of them, durations, feet
and inches.

Patterns and functions of their matches, like `dcar.text.english.quantities`; `dcar.text.english.spoken` applies
them in order.
"""

import re

from dcar.text.english.numbers import cardinal, number, ordinal, whole
from dcar.text.english.tables import table

NUM = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"

_LENGTHS = table(
    "mm: millimeter, cm: centimeter, km: kilometer, m: meter, ft: foot, in: inch, mi: mile, "
    "yd: yard"
)
_TIMES = table(
    "ns: nanosecond, ms: millisecond, sec: second, secs: second, min: minute, mins: minute, "
    "h: hour, hr: hour, hrs: hour, wk: week, wks: week, mo: month, mos: month, yr: year, "
    "yrs: year"
)
UNITS = {
    **{unit: name for unit, name in _LENGTHS.items() if unit != "in"},  # "in" is a preposition
    **{f"sq {unit}": f"square {name}" for unit, name in _LENGTHS.items()},
    **{f"cu {unit}": f"cubic {name}" for unit, name in _LENGTHS.items()},
    **_TIMES,
    **table(
        "mg: milligram, g: gram, kg: kilogram, lb: pound, lbs: pound, oz: ounce, "
        "fl oz: fluid ounce, ml: milliliter, mL: milliliter, dL: deciliter, uL: microliter, "
        "l: liter, L: liter, gal: gallon, qt: quart, tbsp: tablespoon, Tbsp: tablespoon, "
        "tsp: teaspoon, ha: hectare, kB: kilobyte, KB: kilobyte, MB: megabyte, GB: gigabyte, "
        "TB: terabyte, kbps: kilobit per second, Mbps: megabit per second, "
        "Gbps: gigabit per second, Hz: hertz, kHz: kilohertz, MHz: megahertz, GHz: gigahertz, "
        "W: watt, kW: kilowatt, kWh: kilowatt hour, MWh: megawatt hour, MW: megawatt, "
        "GW: gigawatt, mAh: milliamp hour, mA: milliamp, V: volt, kV: kilovolt, ohm: ohm, "
        "kohm: kilohm, Mohm: megohm, dB: decibel, hp: horsepower, psi: pound per square inch, "
        "kPa: kilopascal, hPa: hectopascal, mmHg: millimeter of mercury, atm: atmosphere, "
        "kN: kilonewton, Nm: newton meter, kcal: kilocalorie, kJ: kilojoule, mol: mole, "
        "mmol: millimole, nm: nanometer, um: micrometer, ug: microgram, mph: mile per hour, "
        "mpg: mile per gallon, km/h: kilometer per hour, kph: kilometer per hour, "
        "m/s: meter per second, m/s2: meter per second squared, rpm: revolution per minute, "
        "kbit/s: kilobit per second, Mbit/s: megabit per second, Gbit/s: gigabit per second, "
        "bpm: beat per minute, fps: frame per second, dpi: dot per inch, ppm: part per million, "
        "pts: point, °C: degree Celsius, °F: degree Fahrenheit, °: degree"
    ),
}
# A single letter is a unit only in clear contexts: after a space or a decimal ("16 A", "9.58s", not
# "seat 16A") and before function words. "K" stays a letter: "300 K" may be a temperature, a file
# size or money.
_APART = r"(?:(?<=[\s-])|(?<=\.\d)|(?<=\.\d\d)|(?<=\.\d\d\d))"
_JOINING = r"and|or|to|of|at|in|on|for|from|with|by|is|was|are|were|but|as|per|than|then|while|after|before|until"
_END = rf"(?=\s(?:{_JOINING})\b|[.,;:!?)]|/|\s?$|\s[^\w\s])"
_HEAT = r"(?=\s(?:today|tonight|tomorrow|outside|inside|all|this|last|next|oven|day|heat|water|weather|below|above)\b)"
_LETTERS = {
    "t": ("tonne", r"t(?!-)"),
    "s": ("second", rf"{_APART}s(?!-)"),
    "d": ("day", rf"(?<=\s)d(?:{_END}|(?=\s(?:later|ago)\b))"),
    "y": ("year", rf"(?<=\s)y(?:{_END}|(?=\s(?:later|ago|old)\b))"),
    "A": (
        "amp",
        rf"{_APART}A(?:{_END}|(?=\s(?:fuse|circuit|breaker|charger|current|plug|socket|load|supply|cable)))",
    ),
    "N": ("newton", rf"{_APART}N(?:{_END}|(?=\s(?:force|weight|load|upwards?|downwards?)\b))"),
    "J": ("joule", rf"{_APART}J{_END}"),
    "T": ("tesla", r"T(?=\s(?:magnet|magnetic|MRI|scanner|field)\b)"),
    "C": ("degree Celsius", rf"(?:(?<=\d)C(?!-)|C(?:{_END}|{_HEAT}))"),
    "F": ("degree Fahrenheit", rf"(?:(?<=\d)F(?!-)|F(?:{_END}|{_HEAT}))"),
    "c.": ("cup", r"c\.(?=\s[a-z])"),
}
# Words before a number and a letter that are a name, not a measure: "gate 22 C", "seat 16 A", "size
# 34C", "I-95 N".
_NAMES_WITH_LETTERS = re.compile(
    r"\b(?:room|gate|seat|apt|apartment|flat|unit|suite|section|row|flight|bus|platform|part|form|figure|fig|table|group|"
    r"grade|class|level|building|block|route|rte|highway|hwy|interstate|US|line|version|chapter|page|number|no|type|step|"
    r"question|exercise|article|appendix|division|league|terminal|exit|model|plan|tier|phase|size|cup|batch|lot|house|"
    r"vitamin|year)\.?\s+-?$|\w-$",
    re.IGNORECASE,
)
_NAMES = UNITS | {unit: name for unit, (name, _) in _LETTERS.items()}
_PATTERNS = {unit: re.escape(unit) for unit in UNITS} | {
    unit: pattern for unit, (_, pattern) in _LETTERS.items()
}
UNIT = "|".join(_PATTERNS[u] for u in sorted(_PATTERNS, key=len, reverse=True))
# Units that may follow a slash: "5 g/L", "$3/kg", "7 L/100 km", "20 m/s".
_PER = {unit: name for unit, name in UNITS.items() if "/" not in unit} | {
    "s": "second",
    "d": "day",
    "t": "tonne",
    "bbl": "barrel",
    "in": "inch",
    "100 km": "hundred kilometers",
    "100 g": "hundred grams",
    "100 ml": "hundred milliliters",
    **{
        word: word
        for word in (
            "second minute hour day night week month year person head piece unit share barrel "
            "gallon mile kilo liter"
        ).split()
    },
}
PER = "|".join(re.escape(u) for u in sorted(_PER, key=len, reverse=True))


def attributive(m: re.Match[str]) -> bool:
    """Return whether an amount describes the noun that follows: "a $5 bill", "a 5 km run"."""
    return (
        re.search(
            rf"\b[Aa]n?\s+(?:(?:{NUM})\s?(?:ft|in|mm?|cm|yd)?\s?(?:by|x)\s?)*$",
            m.string[: m.start()],
        )
        is not None
        and re.match(r"\s+[a-z]", m.string[m.end() :]) is not None
    )


def per(m: re.Match[str]) -> str:
    """Return the words for the part of a rate after the slash: "/hr" → " per hour"."""
    return f" per {_PER[m['per']]}"


def _units(name: str, single: bool) -> str:
    """Return the name of a unit, in the plural unless `single`: "mile per hour" → "miles per
    hour"."""
    match = re.match(r"(.*?)( per .*| of .*|$)", name)
    assert match is not None
    head, rest = match.groups()
    if not single and not head.endswith(("hertz", "horsepower")):
        first, space, last = head.rpartition(" ")
        if first == "degree":
            head = f"degrees {last}"
        else:
            head = first + space + {"foot": "feet", "inch": "inches"}.get(last, last + "s")
    return head + rest


def unit_names(unit: str) -> tuple[str, ...]:
    """Return the name of a unit's sign, in the singular and the plural; nothing for another
    sign."""
    return (_units(UNITS[unit], True), _units(UNITS[unit], False)) if unit in UNITS else ()


def measure(m: re.Match[str]) -> str:
    """ "5 km" → "five kilometers", "5 mg/kg" → "five milligrams per kilogram", "a 5-km run" → "a
    five kilometer run".

    Names ("seat 16 A", "I-95 N", a single digit and "C") stay as they are."""
    unit, before = m["unit"], m.string[: m.start()]
    if unit in _LETTERS and _NAMES_WITH_LETTERS.search(before):
        return m[0]
    # "Order #12345-A"
    if unit in _LETTERS and unit.isupper() and "-" in m["gap"] and not attributive(m):
        return m[0]
    if unit in ("C", "F") and not m["minus"] and not re.fullmatch(r"\d{2,3}(?:\.\d+)?", m["n"]):
        return m[0]
    single = m["n"] == "1" or attributive(m) or "-" in m["gap"] or unit == "T"
    rate = per(m) if m["per"] else ""
    return (
        f" {'minus ' if m['minus'] else ''}{number(m['n'])} {_units(_NAMES[unit], single)}{rate} "
    )


_FRACTIONS = {2: "half", 4: "quarter"}
PAIRS = {(24, 7), (9, 11), (20, 20), (50, 50)}


def fraction_in_words(m: re.Match[str]) -> str:
    """ "2/3" → "two thirds", "1 1/2 tsp" → "one and a half teaspoons", "22/7" → "twenty two over
    seven"."""
    before, top, bottom = m["whole"], int(m["top"]), int(m["bottom"].replace(",", ""))
    proper = (2 <= bottom <= 20 or bottom in (100, 1000)) and 1 <= top < bottom
    unit = f" {_units(_NAMES[m['unit']], proper and not before)}" if m["unit"] else ""
    if (top, bottom) in PAIRS and not before:
        return f" {cardinal(top)} {cardinal(bottom)}{unit} "
    if proper:
        usual = None if m["ordinal"] and bottom != 2 else _FRACTIONS.get(bottom)
        name = usual or ordinal(bottom).removeprefix("one ")
        many = "halves" if name == "half" else name + "s"
        words = f"{cardinal(top)} {name if top == 1 else many}"
        return (
            f" {whole(before)} and {re.sub('^one ', 'a ', words)}{unit} "
            if before
            else f" {words}{unit} "
        )
    words = f"{cardinal(top)} over {cardinal(bottom)}"
    return f" {whole(before)} {words}{unit} " if before else f" {words}{unit} "


def divided(m: re.Match[str]) -> str:
    """ "100 / 4" → "100 divided by 4", but "24 / 7" stays a pair."""
    bottom = re.match(r"\d+", m.string[m.end() :])
    assert bottom is not None
    pair = m[1].isdigit() and (int(m[1]), int(bottom[0])) in PAIRS
    return f"{m[1]}/" if pair else f"{m[1]} divided by "


def count_of(count: int, unit: str) -> str:
    """`one minute`, `two minutes`."""
    return f"{cardinal(count)} {unit}{'' if count == 1 else 's'}"


def duration(m: re.Match[str]) -> str:
    """`3h 5m 10s`: letters next to each other are hours, minutes and seconds; alone, m is a
    meter."""
    parts = [
        (m[key], name) for key, name in (("h", "hour"), ("m", "minute"), ("s", "second")) if m[key]
    ]
    return " ".join(count_of(int(n), name) for n, name in parts)


def feet_and_inches(m: re.Match[str]) -> str:
    return f" {cardinal(int(m[1]))} foot {cardinal(int(m[2]))} "


# Words after an amount of inches that are no noun of that size: "27 inches wide", "5 inches off".
_NO_NOUN = (
    rf"{_JOINING}|wide|tall|long|deep|high|thick|across|apart|away|off|up|down|out|over|under|above|below|"
    r"into|around|along|back|ahead|forward|each|per|more|less|total|here|there|it|he|she|they|we|you|the|an?|"
    r"this|that|his|her|its|my|our|your|their|if|so|because|which|who|not|only|too|also|now|just|will|would|"
    r"can|has|have|had|fits?|diagonal|(?:tall|long|short|deep|high|thick|small|low|narrow)er|wider|larger|\w+ly"
)
_NOUN = re.compile(rf"\s+(?!(?:{_NO_NOUN})\b)(?:[a-z]|[A-Z]{{2}})")


def inches(m: re.Match[str]) -> str:
    """`12"` or `12 in.`, unless the sign closes a quotation that was opened before; one `27"
    monitor` is "inch"."""
    if m[0].endswith('"') and _closes(m):
        return m[0]
    before_noun = m[0].endswith('"') and _NOUN.match(m.string, m.end()) is not None
    single = m["n"] == "1" or attributive(m) or before_noun
    return f" {number(m['n'])} {'inch' if single else 'inches'} "


def parts_of_an_inch(m: re.Match[str]) -> str:
    """`3/4" pipe` → "3/4 inch pipe", for the rule of fractions."""
    if _closes(m):
        return m[0]
    single = re.match(r"\d+/", m["n"]) is not None or _NOUN.match(m.string, m.end()) is not None
    return f"{m['n']} {'inch' if single else 'inches'} "


def _closes(m: re.Match[str]) -> bool:
    """Return whether a quotation mark after a number closes a quotation."""
    return len(re.findall(r'(?<!\d)"', m.string[: m.start()])) % 2 == 1


def feet_by_feet(m: re.Match[str]) -> str:
    """ "12' x 10'" → "twelve feet by ten feet", "a 12' x 10' room" → "a twelve foot by ten foot
    room"."""
    sides = re.findall(NUM, m[0])
    return f" {' by '.join(f'{number(n)} ' + ('foot' if n == '1' or attributive(m) else 'feet') for n in sides)} "


def times_a_day(m: re.Match[str]) -> str:
    """ "2x/day" → "two times a day"."""
    name = _PER[m["per"]]
    return f" {number(m[1])} times {'an' if name == 'hour' else 'a'} {name} "


_SIDES = {"N": "north", "S": "south", "E": "east", "W": "west"}


def latitude(m: re.Match[str]) -> str:
    """ "40.7° N", "40°42'46"N" → degrees, minutes and seconds, and the side of the globe."""
    words = f"{number(m['degrees'])} degree{'' if m['degrees'] == '1' else 's'}"
    for key in ("minute", "second"):
        if m[key]:
            words += f" {number(m[key])} {key}{'' if m[key] == '1' else 's'}"
    return f" {words} {_SIDES[m['side']]} "
