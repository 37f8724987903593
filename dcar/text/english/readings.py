"""Readings: texts as words that can be compared. A text has a canonical reading, and others that
its spelling allows.

A text is read by `dcar.text.english.spoken`, as for synthesis; then contractions are expanded, British
spellings made American, and "and" inside numbers dropped. That is its canonical reading, which
depends on this text alone. For spellings with several common readings ("1,500", "911", "11:00",
"she's", "FBI"), `closest_readings` also tries the others and takes, of both texts, those with the
fewest errors. Only spellings have several readings: "fifteen hundred" in words is not "one thousand
five hundred".
"""

import functools
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from dcar.errors import TextError
from dcar.text.common import without_invisible
from dcar.text.english.abbreviations import DOTTED, FULL_FORMS, MONTH_SHORT, MONTHS, UNDOTTED
from dcar.text.english.measures import NUM, UNITS, unit_names
from dcar.text.english.numbers import cardinal, digits, number, ordinal, roman
from dcar.text.english.phonemes import in_lexicon
from dcar.text.english.spoken import INITIALISMS, expand
from dcar.text.english.tables import table

_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "`": "'", "´": "'"})
_NUMBER_WORDS = set(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety "
    "first second third fourth fifth sixth "
    "seventh eighth ninth tenth eleventh twelfth".split()
)
_BEFORE_AND = {"hundred", "thousand", "million", "billion"}
# "is" after these is far commoner than the possessive or "has"; both sides of a comparison get the
# same reading.
_IS_HOSTS = (
    "he she it that this there here what where who how when why everything everyone "
    "nothing something"
).split()
_HAD_HOSTS = "i you he she it we they who that there this what where how why".split()
_CONTRACTIONS = (
    table(
        "can't: can not, cannot: can not, won't: will not, shan't: shall not, ain't: is not, "
        "let's: let us, i'm: i am, y'all: you all, o'clock: o clock, gonna: going to, "
        "wanna: want to, gotta: got to"
    )
    | {f"{host}'s": f"{host} is" for host in _IS_HOSTS}
    | {f"{host}'d": f"{host} would" for host in _HAD_HOSTS}
)
_ENDINGS = (("n't", " not"), ("'re", " are"), ("'ve", " have"), ("'ll", " will"))
_SPELLINGS = table(
    "ok: okay, okey: okay, alright: all right, grey: gray, greys: grays, greyer: grayer, "
    "mum: mom, plough: plow, ploughs: plows, ploughed: plowed, ploughing: plowing, tyre: tire, "
    "tyres: tires, cheque: check, cheques: checks, programme: program, programmes: programs, "
    "cosy: cozy, cosier: cozier, mould: mold, moulds: molds, mouldy: moldy, moustache: mustache, "
    "pyjamas: pajamas, kerb: curb, defence: defense, offence: offense, licence: license, "
    "licences: licenses, practise: practice, practised: practiced, practising: practicing, "
    "sceptical: skeptical, sceptic: skeptic, ageing: aging, jewellery: jewelry, woollen: woolen, "
    "storey: story, storeys: stories, draught: draft, draughty: drafty, skilful: skillful, "
    "fulfil: fulfill, enrol: enroll, instalment: installment, wilful: willful, "
    "catalogue: catalog, dialogue: dialog, analogue: analog, axe: ax, doughnut: donut, "
    "doughnuts: donuts, whisky: whiskey, yoghurt: yogurt, towards: toward, afterwards: afterward, "
    "learnt: learned, burnt: burned, spelt: spelled, spilt: spilled, manoeuvre: maneuver, "
    "judgement: judgment, judgements: judgments, gramme: gram, grammes: grams"
)
_OUR = re.compile(
    r"\b((?:un|mis|dis)?(?:arb|ard|arm|behavi|cand|clam|col|discol|endeav|fav|ferv|flav|harb|hon|hum|lab|neighb|od|parl|"
    r"ranc|rig|rum|sav|splend|succ|tum|val|vap|vig))our(?=(?:s|ed|ing|ite|ites|able|ably|ful|fully|less|er|ers|ly|y|"
    r"hood|hoods|al)?\b)"
)
_RE = re.compile(
    r"\b(cent|theat|met|lit|fib|somb|spect|meag|lust|calib|kilomet|centimet|millimet)re(s|d)?\b"
)
_ISE = re.compile(
    r"\b(apolog|author|categor|central|character|civil|computer|critic|emphas|empathi|energ|equal|familiar|final|general|"
    r"harmon|hospital|ideal|individual|local|maxim|memor|minim|mobil|modern|neutral|normal|optim|organ|real|recogn|"
    r"revolution|special|stabil|standard|summar|symbol|sympath|symbol|util|visual|capital|fertil|general|material|"
    r"jeopard|monopol|patron|scrutin|victim|bapt|cauter|crystall)is(e|ed|es|er|ers|ing|ation|ations)\b"
)
_YSE = re.compile(r"\b(anal|paral|catal)ys(e|ed|es|er|ers|ing)\b")
_DOUBLED = re.compile(
    r"\b(travel|cancel|label|model|signal|level|fuel|marvel|quarrel|counsel|jewel|channel|tunnel|shovel|funnel)"
    r"l(ed|ing|er|ers|ous)\b"
)
_AE = re.compile(
    r"\b(encyclop|medi|orthop|leuk|arch|gyn|prim|p(?=aedi)|f(?=aec|oet)|h(?=aem)|an(?=ae[ms])|diarrh|hom(?=oe)|am(?=oe)|"
    r"(?=oe(?:str|soph|dem)))[ao]e(?=[a-z])"
)
# Compounds that are written together as well; they sound the same.
_APART = (
    r"(?i)\b(e (?=mail|book)|web (?=sites?\b|pages?\b)|home (?=pages?\b)|any (?=more\b|time\b|way\b)|every (?=day\b)|"
    r"on (?=line\b)|off (?=line\b)|for (?=ever\b)|back (?=yards?\b|packs?\b)|data (?=bases?\b)|ice (?=creams?\b)|"
    r"key (?=boards?\b)|note (?=books?\b)|week (?=ends?\b)|birth (?=days?\b)|health (?=care\b)|air (?=ports?\b))"
)

# --- the canonical reading ------------------------------------------------------------------------

# Words that `expand` may read in another way than they are written, besides those with capitals,
# digits or signs.
_READ_OUT = re.compile(
    r"[^A-Za-z' ,.?!;:\"“”()\s–—-]|[A-Z]{2}|[a-z][A-Z]|(?<![A-Za-z'])(?:[A-Za-z]\.|[B-HJ-Z]\b|[A-Z][a-z]+ I\b)|--|"
    rf"[.?!:;]\w|\b[b-df-hj-np-tv-xz]{{2,5}}\b|\b(?i:{'|'.join(DOTTED)})[.–-]|\b(?i:{'|'.join(UNDOTTED)})\b"
)


def spoken_words(text: str) -> str:
    """Return the lower-case words of a text as spoken, separated by single spaces; apostrophes
    inside words are kept.

    Numerals, money, percentages, clock times and abbreviations become words, hyphens become spaces,
    punctuation and accents are dropped. Never raises: a text without letters or digits becomes the
    empty string.
    """
    text = _tidy(text)
    if _READ_OUT.search(text):
        try:
            text = expand(text, in_lexicon)
        except TextError:  # other scripts, or nothing to say
            latin = "".join(c for c in unicodedata.normalize("NFKD", text) if c.isascii())
            text = expand(latin, in_lexicon) if re.search(r"[A-Za-z0-9]", latin) else ""
    words = (word.strip("'") for word in re.sub(r"[^a-z']+", " ", text.lower()).split())
    return " ".join(word for word in words if word)


@functools.lru_cache(maxsize=8192)
def normalize_transcript(text: str) -> str:
    """Return the canonical reading of a reference or hypothesis, in the form in which words are
    compared; see NORMALIZER.

    This is `spoken_words`, with contractions expanded, British spellings made American, "and"
    inside numbers dropped, and apostrophes removed. May be empty; never raises.
    """
    text = re.sub(r"\bo k\b", "okay", re.sub(r"\bper cent\b", "percent", spoken_words(text)))
    words: list[str] = []
    for word in text.split():
        word = _CONTRACTIONS.get(word, word)
        for ending, expansion in _ENDINGS:
            if word.endswith(ending) and len(word) > len(ending):
                word = word[: -len(ending)] + expansion
        words.extend(_SPELLINGS.get(part, part) for part in word.split())
    around = zip(["", *words], words, [*words[1:], ""], strict=False)
    text = " ".join(
        word.replace("'", "")
        for before, word, after in around
        if not (word == "and" and before in _BEFORE_AND and after in _NUMBER_WORDS)
    )
    text = _OUR.sub(r"\1or", text)
    text = _RE.sub(r"\1er\2", text)
    text = _ISE.sub(r"\1iz\2", text)
    text = _YSE.sub(r"\1yz\2", text)
    text = _DOUBLED.sub(r"\1\2", text)
    return _AE.sub(r"\1e", text)


def _tidy(text: str) -> str:
    """Return the visible text with plain apostrophes and spaces, in lower case if all of it is in
    capitals."""
    # a narrow space may group digits
    text = without_invisible(text.translate(_APOSTROPHES))
    text = re.sub(r"[ \t\r\n]+", " ", text).strip()
    words = re.findall(r"[^\W\d_]{2,}", text)
    return text.lower() if len(words) > 2 and all(word.isupper() for word in words) else text


# --- other readings -------------------------------------------------------------------------------

_MONTH = rf"(?P<month>(?i:{'|'.join(MONTHS)}|(?:{'|'.join(MONTH_SHORT)})\.?))(?![A-Za-z])"
_CAPITALS = r"(?<![A-Za-z])(?P<word>[A-Z]{2,6})(?P<tail>'?s)?(?![A-Za-z])"
_SMALL = "|".join(
    i.lower()
    for i in INITIALISMS
    if i not in "IT AM ER LED SAT LA PI PE OT EST HR POW AP ID MP".split()
)
_UNITS = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_HALF = r"(?P<half>\s?[AaPp]\.?[Mm]\b\.?)?"


def _readings_of_number(text: str) -> list[str]:
    """Return the possible readings of "1,500", "911", "2.05" or "1905"."""
    whole, _, fraction = text.partition(".")
    plain = whole.replace(",", "")
    if fraction:
        after = f" point {digits(fraction)}"
        before = {number(whole), "oh", ""} if plain in ("0", "") else {number(whole)}
        return [
            said for b in sorted(before) for said in (b + after, b + after.replace("zero", "oh"))
        ]
    readings = [digits(plain), digits(plain).replace("zero", "oh")] if "," not in whole else []
    if len(plain) > 9 or plain.startswith("0"):
        return readings
    value = int(plain)
    readings.append(cardinal(value))
    if len(plain) in (3, 4) and value % 1000:
        first, rest = divmod(value, 100)
        if len(plain) == 4:
            readings.append(f"{cardinal(first)} hundred {cardinal(rest) if rest else ''}")
        if rest and "," not in whole:
            readings += [
                f"{cardinal(first)} {zero}{cardinal(rest)}"
                for zero in (["oh ", "zero "] if rest < 10 else [""])
            ]
    return readings + [
        said.replace("one", "a", 1)
        for said in readings
        if re.match("one (?:hundred|thousand|million)", said)
    ]


def _number(m: re.Match[str]) -> list[str]:
    return _readings_of_number(m[0])


def _measure(m: re.Match[str]) -> list[str]:
    return [
        f"{said} {name}"
        for said in (m["n"], *_readings_of_number(m["n"]))
        for name in (*unit_names(m["unit"]), *_OTHER_NAMES.get(m["unit"], ()))
    ]


_OTHER_NAMES = {
    "kg": ("kilos", "K G"),
    "km": ("K M", "kays"),
    "mph": ("miles an hour",),
    "°C": ("degrees C", "degrees centigrade"),
    "°F": ("degrees F",),
    "km/h": ("kilometers an hour",),
    "GB": ("gigs",),
    "MB": ("megs",),
    "%": ("percent",),
    "lb": ("pounds",),
    "lbs": ("pounds",),
}


def _money(m: re.Match[str]) -> list[str]:
    one, many = {"$": ("dollar", "dollars"), "£": ("pound", "pounds"), "€": ("euro", "euros")}[
        m["sign"]
    ]
    amounts, cents = _readings_of_number(m["n"]), int(m["cents"] or 0)
    units = one if m["n"] == "1" else many
    if m["n"] == "1":
        amounts.append("a")
    if not cents:
        return [f"{said} {units}" for said in amounts]
    small, coins = cardinal(cents), {"£": "pence"}.get(m["sign"], "cents")
    return [
        f"{said}{after}"
        for said in amounts
        for after in (
            f" {units} {small} {coins}",
            f" {units} {small}",
            f" {'oh ' if cents < 10 else ''}{small}",
        )
    ]


def _time(m: re.Match[str]) -> list[str]:
    hour, minute, half = int(m["hour"]), int(m["minute"]), (m["half"] or "").replace(".", "")
    if hour > 24 or minute > 59:
        return []
    this, following = (cardinal((h - 1) % 12 + 1) for h in (hour, hour + 1))
    hours = cardinal(hour)
    if not minute:
        readings = [hours, f"{hours} o'clock", f"{hours} hundred", f"{hours} hundred hours"]
    else:
        readings = [
            f"{hours} {'oh ' if minute < 10 else ''}{cardinal(minute)}",
            f"{cardinal(minute)} past {this}"
            if minute <= 30
            else f"{cardinal(60 - minute)} to {following}",
        ]
        readings += {
            15: [f"{a}quarter {word} {this}" for a in ("", "a ") for word in ("past", "after")],
            30: [f"half past {this}"],
            45: [f"{a}quarter to {following}" for a in ("", "a ")],
        }.get(minute, [])
    return [said + end for said in readings for end in dict.fromkeys((half, half.lower()))]


def _day(m: re.Match[str]) -> list[str]:
    day, month = int(m["day"]), MONTH_SHORT.get(m["month"].rstrip(".").lower(), m["month"])
    if not 1 <= day <= 31:
        return []
    return [
        f"{month} {ordinal(day)}",
        f"{month} the {ordinal(day)}",
        f"the {ordinal(day)} of {month}",
        f"{ordinal(day)} of {month}",
        f"{ordinal(day)} {month}",
        f"{month} {cardinal(day)}",
        f"{cardinal(day)} {month}",
    ]


def _fraction(m: re.Match[str]) -> list[str]:
    top, bottom = int(m["top"]), int(m["bottom"])
    if not 1 <= top < bottom or bottom > 20:
        return []
    names = {2: ["half"], 4: ["quarter", "fourth"]}.get(bottom, [ordinal(bottom)])
    counts = ["one ", "a ", ""] if top == 1 else [f"{cardinal(top)} "]
    return [f"{count}{name if top == 1 else name + 's'}" for name in names for count in counts]


def _height(m: re.Match[str]) -> list[str]:
    feet, inches = cardinal(int(m[1])), cardinal(int(m[2]))
    return [f"{feet} {unit} {inches}{end}" for unit in ("feet", "foot") for end in ("", " inches")]


def _letters(m: re.Match[str]) -> list[str]:
    word, tail = m["word"], (m["tail"] or "").replace("'", "")
    return [" ".join(word.upper()) + ("'s" if tail else ""), word.lower() + tail]


def _roman(m: re.Match[str]) -> list[str]:
    value = roman(m[0])
    return [] if value is None else [cardinal(value), f"the {ordinal(value)}"]


def _full(m: re.Match[str]) -> list[str]:
    return list(FULL_FORMS[m[1].lower()])


_SPOTS: list[tuple[str, Callable[[re.Match[str]], list[str]]]] = [
    (
        r"(?<![\w.,:/$£€#'-])(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\.\d+|\d{2,})(?![\w'\"%°]|[.,:/-]\d)",
        _number,
    ),
    (rf"(?<![\w.,:/$£€#'-])(?P<n>{NUM})\s?(?P<unit>%|{_UNITS})(?![\w/'])", _measure),
    (
        r"(?P<sign>[$£€])\s?(?P<n>\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<cents>\d\d))?"
        r"(?![\w]|[.,]\d|\s?(?:[tmbr]+illion|thousand|hundred)\b)",
        _money,
    ),
    (rf"(?<![\w:.,])(?P<hour>\d{{1,2}}):(?P<minute>\d\d)(?!:?\d){_HALF}", _time),
    (rf"(?<![\w.]){_MONTH}\s(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?![\w:]|[.,/-]\d)", _day),
    (rf"(?<![\w:.,/-])(?:[Tt]he )?(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\s(?:of )?{_MONTH}", _day),
    (r"(?<![\w.,:/])(?P<top>\d{1,2})/(?P<bottom>\d{1,2})(?![\w/])", _fraction),
    (r"\b(\d)'\s?(1?\d)(?:\"|'')", _height),
    (r"(?<![\w.])[-–−](?=\.?\d)", lambda m: ["negative "]),
    (
        r"(?<![\w.])\+?\(?\d[\d() .-]{5,}\d(?![\w])",
        lambda m: [digits(m[0]), digits(m[0]).replace("zero", "oh")],
    ),
    (_CAPITALS, _letters),
    (
        rf"(?<![\w'])(?P<word>{_SMALL}|[bcdfghjklmnpqrstvwxz]{{2,5}})(?P<tail>'?s)?(?![A-Za-z'])",
        _letters,
    ),
    (
        r"(?<![A-Za-z'])(?P<word>[a-z]{1,4})(?P<tail>)(?=\d)",
        lambda m: [" ".join(m["word"].upper()) + " "],
    ),
    (r"(?<![\w'])(?:[IVXL]{2,}|[ivxl]{2,})(?![\w'])", _roman),
    (rf"(?i)(?<![\w.'])({'|'.join(FULL_FORMS)})\b\.?", _full),
    (rf"(?i)\b({'|'.join(_IS_HOSTS)})'s\b", lambda m: [f"{m[1]} has"]),
    (rf"(?i)\b({'|'.join(_HAD_HOSTS)})'d\b", lambda m: [f"{m[1]} had"]),
    (r"(?i)\b(wh\w+|how)'d\b", lambda m: [f"{m[1]} did"]),
    (r"(?i)(?<![\w'-])(?:h+m+|m+h*m+|u+h+|u+h*m+)(?![\w'-])", lambda m: [" "]),
    (r"(?<![\w-])([A-Za-z]+)-([A-Za-z]+)(?![\w-])", lambda m: [m[1] + m[2]]),
    (_APART + r"(\w+)", lambda m: [m[1].rstrip() + m[2]]),
    (
        rf"(?i)\b(dollars?|pounds?|euros?) and (?={'|'.join(sorted(_NUMBER_WORDS))})",
        lambda m: [f"{m[1]} "],
    ),
]
_RULES = [(re.compile(pattern), say) for pattern, say in _SPOTS]
_RULES_OF_WORDS = [rule for rule in _RULES if r"\d" not in rule[0].pattern]
# readings tried for one text; a transcript that repeats a number hundreds of times has more
_MOST = 100

# the words between two positions of the canonical reading, said otherwise
Arc = tuple[int, int, tuple[str, ...]]


@functools.lru_cache(maxsize=8192)
def _other_readings(text: str) -> tuple[tuple[str, ...], tuple[Arc, ...]]:
    """Return the words of the canonical reading, and the alternatives to some of them."""
    words, text = tuple(normalize_transcript(text).split()), _tidy(text)
    arcs: dict[Arc, None] = {}
    for spot in _spots(text):
        others = {tuple(normalize_transcript(other).split()): None for other in spot}
        changed = [_difference(words, other) for other in others if other != words]
        if not changed:
            continue
        # Of one spot a reading is taken whole: no two of its arcs may be combined.
        start, end = min(a for a, _, _ in changed), max(b for _, b, _ in changed)
        if start == end:  # words are only added
            start, end = (start, end + 1) if end < len(words) else (start - 1, end)
        arcs |= {(start, end, words[start:a] + said + words[b:end]): None for a, b, said in changed}
    return words, tuple(arcs)


def _spots(text: str) -> Iterator[list[str]]:
    """Return, for each place with several readings, the texts in which it is written as one of
    them."""
    rules = _RULES if re.search(r"\d", text) else _RULES_OF_WORDS
    spots = sorted(
        (m.start(), m.end(), other)
        for rule, say in rules
        for m in rule.finditer(text)
        for other in say(m)
    )
    spot: list[str] = []
    reached = 0
    for start, end, other in islice(spots, _MOST):
        if start >= reached and spot:
            yield spot
            spot = []
        spot.append(f"{text[:start]} {other} {text[end:]}")
        reached = max(reached, end)
    if spot:
        yield spot


def _difference(words: Sequence[str], others: tuple[str, ...]) -> Arc:
    """Return where and how other words differ."""
    most = min(len(words), len(others))
    start = next((i for i in range(most) if words[i] != others[i]), most)
    tail = next((i for i in range(most - start) if words[-1 - i] != others[-1 - i]), most - start)
    return start, len(words) - tail, others[start : len(others) - tail]


# --- the closest readings of two texts ------------------------------------------------------------

Edge = tuple[int, str, int]  # node before, word ("" for none), 1 if another reading begins
_ERROR = 10_000  # of a cost: errors first, then as few other readings as possible


def closest_readings(reference: str, hypothesis: str) -> tuple[str, str]:
    """Return the readings of both texts with the fewest word errors between them; the canonical
    ones if none are better.

    Words are separated by single spaces. Which of several equally good readings is taken depends on
    nothing but the two texts.
    """
    ref, hyp = normalize_transcript(reference), normalize_transcript(hypothesis)
    if ref == hyp or not ref or not hyp:
        return ref, hyp
    graphs = [_other_readings(text) for text in (reference, hypothesis)]
    if not any(arcs for _, arcs in graphs):
        return ref, hyp
    return _closest(*(_graph(words, arcs) for words, arcs in graphs))


def _graph(words: Sequence[str], arcs: Sequence[Arc]) -> list[list[Edge]]:
    """Return the edges into each node, in an order such that edges come from earlier nodes; the
    last node is the end."""
    nodes: list[list[Edge]] = []
    node_at: list[int] = []
    for position in range(len(words) + 1):
        into: list[Edge] = [(node_at[-1], words[position - 1], 0)] if position else []
        for start, end, others in arcs:
            if end != position:
                continue
            before, begins = node_at[start], 1
            for word in others[:-1]:
                nodes.append([(before, word, begins)])
                before, begins = len(nodes) - 1, 0
            into.append((before, others[-1] if others else "", begins))
        nodes.append(into)
        node_at.append(len(nodes) - 1)
    return nodes


def _closest(ref: list[list[Edge]], hyp: list[list[Edge]]) -> tuple[str, str]:
    """Return the words of the two paths, one through each graph, with the smallest Levenshtein
    distance."""
    cost: list[list[int]] = [[0] * len(hyp) for _ in ref]
    came: dict[tuple[int, int], tuple[int, int, str, str]] = {}
    for u, before_u in enumerate(ref):
        for v, before_v in enumerate(hyp):
            best = (sys.maxsize if u or v else 0, u, v, "", "")
            for a, word, begins in before_u:
                total = cost[a][v] + begins + (_ERROR if word else 0)
                if total < best[0]:
                    best = total, a, v, word, ""
                for b, hyp_word, also in before_v:
                    if word and hyp_word:
                        total = cost[a][b] + begins + also + (0 if word == hyp_word else _ERROR)
                        if total < best[0]:
                            best = total, a, b, word, hyp_word
            for b, hyp_word, begins in before_v:
                total = cost[u][b] + begins + (_ERROR if hyp_word else 0)
                if total < best[0]:
                    best = total, u, b, "", hyp_word
            cost[u][v] = best[0]
            came[u, v] = best[1:]
    said: list[str] = []
    hyp_words: list[str] = []
    at = len(ref) - 1, len(hyp) - 1
    while at != (0, 0):
        a, b, word, hyp_word = came[at]
        said.append(word)
        hyp_words.append(hyp_word)
        at = a, b
    return " ".join(filter(None, reversed(said))), " ".join(filter(None, reversed(hyp_words)))
