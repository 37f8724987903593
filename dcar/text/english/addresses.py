"""Addresses in words: e-mail and IP addresses, URLs, file names, and the states, ZIP codes and
streets of postal addresses.

"j.doe@example.org" → "J dot doe at example dot org". These rules precede all others of
`dcar.text.english.spoken`: full stops, slashes and hyphens of an address are read out, while those of a
sentence are pauses.
"""

import re
from collections.abc import Callable

from dcar.text.english.numbers import cardinal, digits, year
from dcar.text.english.tables import table

LETTER = "\ue000"  # after a capital: it is read as a letter, never as an initial or the article "a"

_SIGNS = {
    ".": "dot",
    "-": "dash",
    "_": "underscore",
    "+": "plus",
    "/": "slash",
    "?": "question mark",
    "=": "equals",
    "&": "ampersand",
    "%": "percent",
    "#": "hash",
    "~": "tilde",
    ":": "colon",
    "@": "at",
    "\\": "backslash",
}
# Top-level domains of addresses without https:// or www. that do not look like a missing space
# after a full stop.
_ENDINGS = "com|org|net|edu|gov|info|io|ai|dev|app|co\\.uk|ac\\.uk|uk|de|fr|nl|eu|ch|jp|cn|ca|au"
_FILES = (
    "pdf|txt|jpe?g|png|gif|html?|csv|docx?|xlsx?|pptx?|zip|mp3|mp4|wav|flac|exe|md|js|ts|jsx|tsx|py|json|ya?ml|"
    "toml|cfg|ini|sh|cpp|rs|php|css|xml|svg|sql|log|tar|gz|rtf|odt|epub|avi|mov|mkv|ogg|bmp|tiff?|ipynb"
)
_WORDS = frozenset({"com", "org", "net", "gov", "info", "dev", "app", "co", "zip"})
_SPELLED = frozenset(
    "edu io ai uk eu au id faq api usa url ibm rss exe gif docx xlsx pptx de fr nl ch jp cn ca ac "
    "us".split()
)
_HOST = r"[A-Za-z0-9](?:[\w-]*[A-Za-z0-9])?"
_EMAIL = re.compile(
    rf"(?:\bmailto:)?(?<![\w.+-])([A-Za-z0-9](?:[\w.+-]*[A-Za-z0-9_])?@{_HOST}(?:\.{_HOST})+)"
)
_URL = re.compile(
    r"\b(?:(?P<scheme>(?:https?|ftp)://)(?=[A-Za-z0-9])|(?=www\.))(?P<address>[^\s<>\"()\[\]{}]*[A-Za-z0-9/=_-])"
    rf"|(?<![\w@.-])(?P<bare>(?:{_HOST}\.)+(?:{_ENDINGS})(?:(?=[\s,;.!?:'\")\]}}>]|$)|/[^\s<>\"()\[\]{{}}]*[A-Za-z0-9/]|/))"
    r"(?![\w@])",
    re.IGNORECASE,
)
_FILE = re.compile(rf"(?<![\w./@-])({_HOST}\.(?:{_FILES})(?:#\w[\w-]*)?)(?![\w@-]|\.\w)")
# ~/notes, /etc/hosts, C:\temp\a.txt: a path of one part without a home or a drive may be an
# alternative ("and /or")
_PATH = re.compile(
    r"(?<![\w./\\:~-])((?:~/|/[A-Za-z][\w-]+/)[\w./-]*\w|[A-Z]:\\(?:[\w.-]+\\)*[\w.-]*\w)(?!\w)"
)
_IP = re.compile(
    r"(?<![\w.])((?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3})(?![\w]|\.\d)"
)


def addresses(text: str, is_word: Callable[[str], bool]) -> str:
    """Return `text` with its addresses in words. is_word: whether the lexicon has a word. Single
    letters are marked with LETTER."""
    text = re.sub(r"<((?:https?://|mailto:|ftp://|[\w.+-]+@)[^\s<>]+)>", r" \1 ", text)
    text = _EMAIL.sub(lambda m: f" {_dictated(m[1], is_word)} ", text)
    text = _URL.sub(
        lambda m: f" {_dictated((m['address'] or m['bare']).removesuffix('/'), is_word)} ", text
    )
    # 1.2.3.4 is a version there
    if re.search(r"(?i)(?<!\d)(?:v|version )\d+(?:\.\d+){3}", text) is None:
        text = _IP.sub(lambda m: f" {' dot '.join(map(digits, m[1].split('.')))} ", text)
    text = _PATH.sub(lambda m: f" {_dictated(m[1], is_word)} ", text)
    return _FILE.sub(lambda m: f" {_dictated(m[1], is_word)} ", text)


def _dictated(address: str, is_word: Callable[[str], bool]) -> str:
    words = []
    for m in re.finditer(
        r"(?P<port>:\d+)|(?P<letters>[A-Za-z]+)|(?P<digits>\d+)|(?P<sign>.)", address
    ):
        if m["port"]:
            words.append(f"colon {digits(m['port'])}")
        elif m["letters"]:
            words.append(_letters(m["letters"], is_word))
        elif m["digits"]:
            words.append(_digits(m["digits"]))
        else:
            words.append(_SIGNS.get(m["sign"], ""))
    return " ".join(" ".join(words).split())


def _letters(run: str, is_word: Callable[[str], bool]) -> str:
    lower = run.lower()
    if lower not in _WORDS and (
        len(run) == 1 or lower in _SPELLED or not set("aeiouy") & set(lower)
    ):
        return " ".join(c.upper() + LETTER for c in run)
    # in capitals a word would be taken for an initialism
    return run.lower() if is_word(lower) or run.isupper() else run


def _digits(run: str) -> str:
    if len(run) <= 2 and not run.startswith("0"):
        return cardinal(int(run))
    return year(int(run)) if len(run) == 4 and 1100 <= int(run) <= 2099 else digits(run)


# --- places ---------------------------------------------------------------------------------------

_STATES = table(
    "AL: Alabama, AK: Alaska, AZ: Arizona, AR: Arkansas, CA: California, CO: Colorado, "
    "CT: Connecticut, DE: Delaware, FL: Florida, GA: Georgia, HI: Hawaii, ID: Idaho, "
    "IL: Illinois, IN: Indiana, IA: Iowa, KS: Kansas, KY: Kentucky, LA: Louisiana, ME: Maine, "
    "MD: Maryland, MA: Massachusetts, MI: Michigan, MN: Minnesota, MS: Mississippi, MO: Missouri, "
    "MT: Montana, NE: Nebraska, NV: Nevada, NH: New Hampshire, NJ: New Jersey, NM: New Mexico, "
    "NY: New York, NC: North Carolina, ND: North Dakota, OH: Ohio, OK: Oklahoma, OR: Oregon, "
    "PA: Pennsylvania, RI: Rhode Island, SC: South Carolina, SD: South Dakota, TN: Tennessee, "
    "TX: Texas, UT: Utah, VT: Vermont, VA: Virginia, WA: Washington, WV: West Virginia, "
    "WI: Wisconsin, WY: Wyoming, DC: D C"
)
_STATE = "|".join(_STATES)
_SURE = "|".join(s for s in _STATES if s not in "AL CT HI ID IN LA MA MD ME MS OK OR PA".split())
_SIDES = table(
    "N: North, S: South, E: East, W: West, NE: Northeast, NW: Northwest, SE: Southeast, "
    "SW: Southwest"
)
_STREET = (
    r"(?:St|Ave|Rd|Blvd|Dr|Ln|Pl|Ct|Street|Avenue|Road|Boulevard|Drive|Lane|Place|Court|Way)\b"
)


def places(text: str) -> str:
    """Return `text` with states, ZIP codes and compass directions in words, where the context
    identifies them.

    A ZIP code is read digit by digit after a state. Ambiguous ones such as "MD" and "OK" are states
    only before one.
    """
    text = re.sub(
        rf"(?<=[a-z]), ({_STATE}) (\d{{5}})(?:-(\d{{4}}))?(?![\w-])",
        lambda m: f", {_STATES[m[1]]} {digits(m[2])}{f', {digits(m[3])}' if m[3] else ''}",
        text,
    )
    goes_on = r"(?=\s*$|[,;)]|\.(?=\s|$)|\s(?:to|and|or|is|was|in|for|at|on|with|by)\b)"
    text = re.sub(
        rf"(?<=[A-Z][a-z]{{3}})([a-z]*), ({_SURE}){goes_on}",
        lambda m: f"{m[1]}, {_STATES[m[2]]}",
        text,
    )
    text = re.sub(rf"(?<=\([DRI]-)({_STATE})(?=[),])", lambda m: _STATES[m[1]], text)
    text = re.sub(
        rf"(?<=\d )([NSEW])\.?(?= (?:[A-Z][a-z]+ ){{1,3}}{_STREET})", lambda m: _SIDES[m[1]], text
    )
    text = re.sub(r"(?<![\w.'])([NSEW])\.(?= \d+(?:st|nd|rd|th)\b)", lambda m: _SIDES[m[1]], text)
    text = re.sub(rf"({_STREET}\.?) ([NS][EW])(?![\w'])", lambda m: f"{m[1]} {_SIDES[m[2]]}", text)
    return re.sub(
        r"(?<=[a-z] )([NS][EW]?|[EW])(?= of\b)",
        lambda m: _SIDES[m[1]].lower() if _after_distance(m) else m[0],
        text,
    )


def _after_distance(m: re.Match[str]) -> bool:
    """Return whether a distance precedes: "20 km SE of the town", not "a letter E of hers"."""
    distance = r"\d\s?(?:km|m|mi|miles?|kilometers|kilometres|meters|metres|yards) $"
    return re.search(distance, m.string[: m.start()]) is not None
