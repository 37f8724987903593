"""Abbreviations with and without a full stop: titles, streets, companies, weekdays, "p. 12",
initials.

Whether the full stop also ends the sentence depends on what follows: a capital, or one of the words
that begin sentences where a name could follow as well ("J. Then" is not an initial).
"""

import re

from dcar.text.english.addresses import LETTER
from dcar.text.english.tables import table

MONTHS = (
    "January February March April May June July August September October November December".split()
)
MONTH_SHORT = {m[:3].lower(): m for m in MONTHS} | {"sept": "September"}
# Read with or without the full stop that follows; "dr" and "st" depend on their neighbours and are
# handled apart.
_ABBREVIATIONS = table(
    "mr: Mister, mrs: Missus, ms: Ms, messrs: Messieurs, prof: Professor, jr: Junior, sr: Senior, "
    "vs: versus"
)
_TITLES = table(  # only before a name: "Gen. Lee", never "gen."
    "gen: General, gov: Governor, sen: Senator, rep: Representative, capt: Captain, "
    "lt: Lieutenant, col: Colonel, sgt: Sergeant, rev: Reverend, hon: Honorable, pres: President, "
    "mt: Mount, ft: Fort, drs: Doctors, maj: Major, adm: Admiral, cpl: Corporal, pvt: Private, "
    "fr: Father, det: Detective, insp: Inspector, supt: Superintendent"
)
_CALLED = rf"(?:Mr|Mrs|Ms|Dr|Prof|Judge|President|{'|'.join(t.capitalize() for t in _TITLES if t not in ('mt', 'ft'))})"
_DOTTED_ABBREVIATIONS = table(
    "ave: Avenue, blvd: Boulevard, rd: Road, dept: Department, inc: Incorporated, ltd: Limited, "
    "corp: Corporation, bros: Brothers, assn: Association, univ: University, "
    "approx: approximately, etc: et cetera, vol: volume, pp: pages, esq: Esquire, "
    "govt: government, cf: compare, viz: namely, misc: miscellaneous, dist: district"
)
# Only where the sentence continues in small letters or with a number: "the max. speed", but "to the
# max."
_INSIDE = table(
    "max: maximum, min: minimum, avg: average, orig: original, temp: temperature, "
    "cont: continued, intl: international, natl: national, mgr: manager, asst: assistant, "
    "assoc: associate, std: standard, esp: especially, est: estimated, prev: previous, "
    "tech: technical"
)
_DAYS = table(  # everyday words too ("sat.", "sun."): only with a capital and inside a sentence
    "mon: Monday, tue: Tuesday, tues: Tuesday, wed: Wednesday, thu: Thursday, thur: Thursday, "
    "thurs: Thursday, fri: Friday, sat: Saturday, sun: Sunday"
)
_BEFORE_NUMBERS = table(  # "p. 12", "Fig. IV"; a capital is kept
    "p: page, pp: pages, vol: volume, vols: volumes, ch: chapter, chap: chapter, fig: figure, "
    "figs: figures, eq: equation, sec: section, nos: numbers, ext: extension, tel: telephone, "
    "apt: apartment, art: article, para: paragraph, est: established, op: opus, tab: table, "
    "app: appendix, hwy: highway, rte: route, chs: chapters, ver: version, rm: room, rms: rooms, "
    "ste: suite, bldg: building, fl: floor, pg: page, pgs: pages"
)
_STREETS = table(  # after a name, with or without the full stop: "Pennsylvania Ave NW"
    "ave: Avenue, blvd: Boulevard, rd: Road, ln: Lane, hwy: Highway, pkwy: Parkway, sq: Square, "
    "terr: Terrace"
)
# read without a full stop too
UNDOTTED = frozenset({*_ABBREVIATIONS, *_STREETS, "st", "dr", "incl", "excl"})
DOTTED = frozenset(
    {
        *_TITLES,
        *_DOTTED_ABBREVIATIONS,
        *_BEFORE_NUMBERS,
        *_INSIDE,
        *_DAYS,
        *MONTH_SHORT,
        "co",
        "ca",
        "al",
    }
)
# all that an abbreviation may stand for, whatever its neighbours
FULL_FORMS: dict[str, tuple[str, ...]] = {
    key: tuple(
        dict.fromkeys(
            table[key]
            for table in (_ABBREVIATIONS, _TITLES, _DOTTED_ABBREVIATIONS, _STREETS, _INSIDE)
            if key in table
        )
    )
    for key in (_ABBREVIATIONS | _TITLES | _DOTTED_ABBREVIATIONS | _STREETS | _INSIDE)
} | {
    "st": ("Saint", "Street"),
    "dr": ("Doctor", "Drive"),
    "ft": ("Fort", "feet"),
    "v": ("versus",),
    "incl": ("including", "included"),
    "excl": ("excluding", "excluded"),
}
_SHORT_DAY = "|".join(sorted((d.capitalize() for d in _DAYS), key=len, reverse=True))
_DAY_OF_DATE = rf"(?<![Tt]he )\b({_SHORT_DAY})(?=,?\s(?:\d|(?:{'|'.join(m[:3] for m in MONTHS)})))"
_WHEN = (
    _DAYS
    | MONTH_SHORT
    | {day.lower(): day for day in _DAYS.values()}
    | {month.lower(): month for month in MONTHS}
)
_WHENS = "|".join(sorted((w.capitalize() for w in _WHEN), key=len, reverse=True))
_SPAN = rf"\b({_WHENS})\.?\s?[-–]\s?({_WHENS})\b(?:\.(?=\s[a-z\d]|,))?"  # "Mon.–Fri.", "May–July"
# A full stop after these may end the sentence as well: "etc." before a capital or at the end keeps
# it.
_MAY_END = frozenset(
    {"etc", "inc", "ltd", "corp", "jr", "sr", "ave", "rd", "blvd", "dept", "bros", "esq"}
)
_STREET = rf"\s+(?:{'|'.join(s.capitalize() for s in _STREETS)}|St|Dr|Street|Avenue|Road|Drive|Day|High|School|Park)\b"
OPENERS = (
    r"(?:The|An?|He|She|It|We|They|I|You|This|That|These|Those|There|But|And|So|In|On|At|When|Then|If|His|Her|Our|"
    r"Their|My|Its|What|Who|Why|How|Where|Yes|Not|For|From|After|Before|Now|Once|All|No)\b(?!\.)"
)


def abbreviations(text: str) -> str:
    """Expand titles, streets, companies, weekdays, months; "St." and "Dr." depend on their
    neighbours."""
    numbered = rf"(?<![\w.'])((?i:{'|'.join(_BEFORE_NUMBERS)}))\.\s?(?=\d|(?:[IVXL]{{2,}}|[VX])\b)"
    text = re.sub(numbered, _before_number, text)
    text = re.sub(r"(?<=\w\s)v\.(?=\s[A-Za-z])", "versus", text)
    text = re.sub(r"\b([Ii]n|[Ee]x)cl\b\.?", _included, text)
    text = re.sub(r"(?<![\w.'])(?:ca\.\s?(?=\d)|c\.\s?(?=\d{3,4}\b))", "circa ", text)
    text = re.sub(
        r"\bet al\.(?=(\s*$|\s+[A-Z])?)",
        lambda m: "et al" + ("." if m[1] is not None else ""),
        text,
    )
    text = re.sub(
        r"(&\s|\band\s|\b[A-Z][\w'-]+\s)Co\.(?=(\s*$|\s+(?!Ltd|Inc)[A-Z])?)",
        lambda m: m[1] + "Company" + ("." if m[2] is not None else ""),
        text,
    )

    text = re.sub(_SPAN, lambda m: f"{_WHEN[m[1].lower()]} to {_WHEN[m[2].lower()]}", text)
    text = re.sub(_DAY_OF_DATE, lambda m: _DAYS[m[1].lower()], text)

    def word(m: re.Match[str]) -> str:
        name, dot, rest = m["word"], m["dot"], text[m.end() :]
        key = name.lower()
        next_name = re.match(r"\s+[A-Z][a-z']", rest) is not None
        ends = re.match(r"\s*$|\s+[A-Z\"']", rest) is not None
        before = re.search(r"(\w+)\s+$", text[: m.start()])
        after_name = (
            before is not None
            and before[1][0].isupper()
            and before[1].lower() not in ("the", "and", "of")
        )
        if not name[0].isupper() and key in ("st", "dr") and not dot:
            return m[0]
        if after_name and key in _STREETS and name[0].isupper():
            return _STREETS[key] + (dot if ends else "")
        if key == "st" and (dot or next_name or after_name):
            return (
                ("Street" + (dot if ends and not next_name else ""))
                if after_name or not next_name
                else "Saint"
            )
        if key == "dr" and (dot or next_name):
            return "Doctor" if next_name or not after_name else "Drive" + (dot if ends else "")
        if key in _ABBREVIATIONS:
            if key in ("mr", "mrs", "ms", "messrs", "prof") and not name[0].isupper():
                return m[0]
            return _ABBREVIATIONS[key] + (
                dot if key in _MAY_END and ends and not re.match(_STREET, rest) else ""
            )
        named = next_name or re.match(rf"\s+[A-Z](?:\w*\.|{LETTER}?)\s+[A-Z]", rest)
        if dot and name[0].isupper() and named and key in _TITLES:
            return _TITLES[key]
        if (
            dot
            and key in _INSIDE
            and re.match(r"\s+[a-z\d]", rest)
            and not (before and before[1][-1].isdigit())
        ):
            return _INSIDE[key].capitalize() if name[0].isupper() else _INSIDE[key]
        if dot and name[0].isupper() and not ends:
            return _DAYS.get(key) or MONTH_SHORT.get(key) or _DOTTED_ABBREVIATIONS.get(key) or m[0]
        if dot and key in _DOTTED_ABBREVIATIONS:
            return _DOTTED_ABBREVIATIONS[key] + (dot if key in _MAY_END and ends else "")
        return m[0]

    def initial(m: re.Match[str]) -> str:
        before = re.search(r"(\S+)\s+$", text[: m.start()])
        if re.match(rf"\s+{OPENERS}", text[m.end() :]) and before is not None:
            return m[0]
        another = re.match(r"\s+[A-Z](?:\.|\s+[A-Z])", text[m.end() :]) is not None
        return m[1] if another or before is None or before[1][0].isupper() else m[0]

    # spaced letters: the last stop ends the sentence only before a capital
    text = re.sub(
        r"(?<![\w.'])((?:[A-Z]\.\s)+[A-Z])\.(?=\s[a-z])", lambda m: m[1].replace(".", ""), text
    )
    text = re.sub(rf"\b({_CALLED}\.?\s)([AI])\.(?=\s+[A-Z][a-z])", rf"\1\2{LETTER}", text)
    # "Best regards, A. Smith"
    text = re.sub(r"(,\s)([A-Z])\.(?=\s+[A-Z][a-z]+\W*$)", rf"\1\2{LETTER}", text)
    text = re.sub(r"(?<=[A-Z]\.\s)([AI])\.(?=\s+[A-Z][a-z])", initial, text)
    text = re.sub(r"(?<![\w.'])([B-HJ-Z])\.(?=\s+[A-Z])", initial, text)
    text = re.sub(r"(?<![\w.'])([AI])\.(?=\s+[A-Z](?:\.|\s))", initial, text)
    return re.sub(r"(?<![\w.'])(?P<word>[A-Za-z]{2,8})(?P<dot>\.?)(?![\w.])", word, text)


def _included(m: re.Match[str]) -> str:
    """ "incl. tax" → "including tax", "tax incl." → "tax included."."""
    if re.match(r"\s*$", m.string[m.end() :]):
        return f"{m[1]}cluded" + ("." if m[0].endswith(".") else "")
    closed = re.match(r"[,;)]|\s+(?:is|are|was|were|and|or|but)\b", m.string[m.end() :])
    return f"{m[1]}clud" + ("ed" if closed else "ing")


def _before_number(m: re.Match[str]) -> str:
    words = _BEFORE_NUMBERS[m[1].lower()]
    return (words.capitalize() if m[1][0].isupper() and m[1].lower() != "nos" else words) + " "
