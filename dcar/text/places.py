"""Where things are: states and ZIP codes, sides of the compass in streets ("500 N. Main St.") and behind distances."""

from __future__ import annotations

import re

from dcar.text.numbers import digits

_STATES = {
    "AL": "Alabama", "AK": "Alaska", "AZ": "Arizona", "AR": "Arkansas", "CA": "California", "CO": "Colorado",
    "CT": "Connecticut", "DE": "Delaware", "FL": "Florida", "GA": "Georgia", "HI": "Hawaii", "ID": "Idaho",
    "IL": "Illinois", "IN": "Indiana", "IA": "Iowa", "KS": "Kansas", "KY": "Kentucky", "LA": "Louisiana", "ME": "Maine",
    "MD": "Maryland", "MA": "Massachusetts", "MI": "Michigan", "MN": "Minnesota", "MS": "Mississippi", "MO": "Missouri",
    "MT": "Montana", "NE": "Nebraska", "NV": "Nevada", "NH": "New Hampshire", "NJ": "New Jersey", "NM": "New Mexico",
    "NY": "New York", "NC": "North Carolina", "ND": "North Dakota", "OH": "Ohio", "OK": "Oklahoma", "OR": "Oregon",
    "PA": "Pennsylvania", "RI": "Rhode Island", "SC": "South Carolina", "SD": "South Dakota", "TN": "Tennessee",
    "TX": "Texas", "UT": "Utah", "VT": "Vermont", "VA": "Virginia", "WA": "Washington", "WV": "West Virginia",
    "WI": "Wisconsin", "WY": "Wyoming", "DC": "D C",
}  # fmt: skip
_STATE = "|".join(_STATES)
_SURE = "|".join(s for s in _STATES if s not in "AL CT HI ID IN LA MA MD ME MS OK OR PA".split())
_SIDES = {
    "N": "North", "S": "South", "E": "East", "W": "West", "NE": "Northeast", "NW": "Northwest", "SE": "Southeast",
    "SW": "Southwest",
}  # fmt: skip
_STREET = r"(?:St|Ave|Rd|Blvd|Dr|Ln|Pl|Ct|Street|Avenue|Road|Boulevard|Drive|Lane|Place|Court|Way)\b"


def places(text: str) -> str:
    """`text` with states, ZIP codes and sides of the compass in words, where their neighbours say what they are.

    A ZIP code is read digit by digit behind a state. "MD", "OK" and others that mean more are states before one only.
    """
    text = re.sub(rf"(?<=[a-z]), ({_STATE}) (\d{{5}})(?:-(\d{{4}}))?(?![\w-])",
                  lambda m: f", {_STATES[m[1]]} {digits(m[2])}{f', {digits(m[3])}' if m[3] else ''}", text)
    goes_on = r"(?=\s*$|[,;)]|\.(?=\s|$)|\s(?:to|and|or|is|was|in|for|at|on|with|by)\b)"
    text = re.sub(rf"(?<=[A-Z][a-z]{{3}})([a-z]*), ({_SURE}){goes_on}", lambda m: f"{m[1]}, {_STATES[m[2]]}", text)
    text = re.sub(rf"(?<=\([DRI]-)({_STATE})(?=[),])", lambda m: _STATES[m[1]], text)
    text = re.sub(rf"(?<=\d )([NSEW])\.?(?= (?:[A-Z][a-z]+ ){{1,3}}{_STREET})", _side, text)
    text = re.sub(r"(?<![\w.'])([NSEW])\.(?= \d+(?:st|nd|rd|th)\b)", _side, text)
    text = re.sub(rf"({_STREET}\.?) ([NS][EW])(?![\w'])", lambda m: f"{m[1]} {_SIDES[m[2]]}", text)
    return re.sub(r"(?<=[a-z] )([NS][EW]?|[EW])(?= of\b)", lambda m: _SIDES[m[1]].lower() if _far(m) else m[0], text)


def _side(m: re.Match[str]) -> str:
    return _SIDES[m[1]]


def _far(m: re.Match[str]) -> bool:
    """Whether a distance stands before: "20 km SE of the town", not "a letter E of hers"."""
    distance = r"\d\s?(?:km|m|mi|miles?|kilometers|kilometres|meters|metres|yards) $"
    return re.search(distance, m.string[: m.start()]) is not None
