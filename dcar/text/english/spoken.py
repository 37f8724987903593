"""Written English → spoken English: numbers, money, dates, times, units, abbreviations and
initialisms as words.

gruut can expand numbers too, but it reads "12/03" with today's year, "$5 million" as "five dollars
million", "St. Louis" as "Street Louis" and spells "THE" as three letters; a training corpus needs a
reading that is always the same. The text is therefore expanded here by explicit rules, and gruut
only pronounces words.

The result is plain: words of a-z, A-Z and apostrophes, and the phrase marks `, . ? !`. A single
capital other than "I" is a letter to be spelled ("N B A"), never the article, which is written "a".
"""

import html
import re
import unicodedata
from collections.abc import Callable

from dcar.errors import TextError
from dcar.text.common import without_invisible
from dcar.text.english import measures as ms
from dcar.text.english import quantities as q
from dcar.text.english.abbreviations import OPENERS, abbreviations
from dcar.text.english.addresses import LETTER, addresses, places
from dcar.text.english.numbers import cardinal, digits, number, ordinal, plural, whole, year
from dcar.text.english.tables import table

_LETTER_NAMES = table(
    "α: alpha, β: beta, γ: gamma, δ: delta, ε: epsilon, ζ: zeta, η: eta, θ: theta, λ: lambda, "
    "μ: mu, ν: nu, ξ: xi, π: pi, ρ: rho, σ: sigma, τ: tau, φ: phi, ς: sigma, χ: chi, ψ: psi, "
    "ω: omega"
)
_LATIN = str.maketrans(
    table(
        "æ: ae, Æ: Ae, œ: oe, Œ: Oe, ø: o, Ø: O, ß: ss, ẞ: SS, ł: l, Ł: L, đ: d, Đ: D, ð: th, Ð: Th, "
        "þ: th, Þ: Th, ı: i"
    )
)
_SIGNS = table(
    "²: squared, ³: cubed, ≥: greater than or equal to, ≤: less than or equal to, §: section, "
    "×: times, ÷: divided by, ±: plus or minus, ≈: about, ≠: is not equal to, √: square root of, "
    "∞: infinity, №: number"
)
_MARKS = str.maketrans(
    dict.fromkeys("’‘ʼ`´＇′", "'")
    | dict.fromkeys("“”„«»″", '"')
    | dict.fromkeys("‐‑‒−", "-")
    | dict.fromkeys("—―", "—")
    | dict.fromkeys("™®©", " ")
    | {"–": "–", "€": "€", "…": "...", "⁄": "/", "。": ". ", "、": ", ", "µ": "μ"}
    | {sign: f" {words} " for sign, words in _SIGNS.items()}
)
_TAG = re.compile(
    r"<!--[^<>]*-->|</?(?P<name>[a-z][\w:-]*)"
    r"(?:\s+[\w:-]+=(?:\"[^\"<>]*\"|'[^'<>]*'|[^\s<>\"']+))*\s*/?>",
    re.IGNORECASE,
)
_IN_WORDS = frozenset("a b code em font i mark q s small span strong sub sup u".split())
# A line break or tab typed as an escape; not in C:\new, nor the first letter of \nu and \tau.
_TYPED_BREAK = re.compile(
    r"(?P<path>\b[A-Za-z]:\\\S*)|\\[nrt](?![a-z])|(?<=[\w.?!,;:'\")\]])\\[nrt]"
)
INITIALISMS = frozenset(
    "US USA UK EU UN TV PC IT AI ID CEO CFO CTO PM AM HQ FBI CIA DNA RNA BBC CNN NBA NFL GDP GPS "
    "USB VIP DIY FAQ OK OT PR HR IQ MP ER ICU UFO AP PE PI EP LA DC NY ASAP MIT ETA EST LED SAT "
    "NGO AKA LAX RAF IP "
    "POW CT".split()
)
_ACRONYMS = frozenset(
    "COVID NATO NASA UNESCO UNICEF NAFTA OPEC SARS AIDS ASEAN FIFA UEFA NASDAQ FEMA OSHA BAFTA "
    "IKEA LEGO JPEG GIF "
    "JSON YAML".split()
)
_VOWELS = set("aeiouyAEIOUY")
_COUNTABLE = (
    "people|users|customers|viewers|subscribers|followers|voters|jobs|homes|households|copies|views|likes|steps|downloads|"
    "visitors|residents|inhabitants|words|tokens|parameters|hours|years|dollars|euros|pounds|barrels|tonnes|tons|workers|"
    "passengers|fans|members|patients|deaths|cases|votes"
)
_MONEY = rf"[$£€¥₹₩]\s?(?:{ms.NUM}|\.\d+)(?:\s?(?:thousand|million|billion|trillion|lakh|crore|[kKmMbB]n?))?"
_WEEKDAY = r"(?:Mon|Tue|Tues|Wed|Thu|Thur|Thurs|Fri|Sat|Sun)"

# Before compatibility forms are folded, which would write m² as "m squared".
_POWERS: list[tuple[str, str]] = [
    (r"(?<=\d)\s?(mm|cm|km|m|ft|in|mi|yd)(?:²|\^2)(?!\w)", r" sq \1"),
    (r"(?<=\d)\s?(mm|cm|km|m|ft|in|mi|yd)(?:³|\^3)(?!\w)", r" cu \1"),
    (r"m/s(?:²|\^2)(?!\w)", "m/s2"),
    (r"(?<=/)(mm|cm|km|m|ft|in|mi|yd)(?:²|\^2)(?!\w)", r"sq \1"),
    (r"(?<=/)(mm|cm|km|m|ft|in|mi|yd)(?:³|\^3)(?!\w)", r"cu \1"),
    (r"(?<=\d)(\s?)(k?)[Ω\u2126](?!\w)", r"\1\2ohm"),
    (r"(?<=\d)(\s?)M[Ω\u2126](?!\w)", r"\1Mohm"),
    (r"\bN[·⋅]m\b", "Nm"),
]
# 1 000 000: groups of three digits after spaces; one group alone may be another number unless the
# space is a narrow or a fixed one, or the group is 000.
_GROUPS = re.compile(
    r"(?<![\w.,+(/:-])(?<!\d\s)[1-9]\d{0,2}(?:(?:[\u00a0\u2006-\u200a\u202f]\d{3})+|(?:\s\d{3}){2,}|\s000)"
    r"(?![\w/:(-]|,\d|\s\(?\d)"
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")

_ELEMENTS = (
    "A[cglrstu]|B[aeir]?|C[adelorsu]?|Dy|E[ru]|F[er]?|G[ade]|H[efgo]?|I[nr]?|Kr?|L[aiu]|M[gno]|N[abdeip]?|Os?|P[abdrtu]?|"
    "R[abehu]|S[bceimnr]?|T[abeil]|U|V|W|Xe|Yb?|Z[nr]"
)
# Without a digit only salts, acids and bases: other words are made of these letters as well.
_FORMULA = (
    rf"(?=[A-Za-z]+\d|(?:Na|Li|Ca|Mg|Al|Ag|Cu|Zn|Fe|H|Cs|Rb|Ba|Pb|Ti|Si|Ga|Ni|K)(?:OH|Cl|Br|F|I|O|S|CN|As)\b)"
    rf"(?=[A-Z\d]*[a-z]|[A-Z]+\d*[A-Z]|\w*O)(?:(?:{_ELEMENTS})\d*){{2,}}"
)

_RULES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"(?<!\w)#(?=[A-Za-z])", "hashtag "),
    (r"(?<=\w)@(?=\w)", " at "),
    (rf"(?<![\w-]){_FORMULA}(?![\w-])", lambda m: _formula(m[0])),
    # options of commands, and minus between the letters of mathematics
    (
        r"(?<![\w-])--(?=[a-z])(?!(?:and|but|or|the|an?|he|she|it|they|we|you|that|which|who|in|to|of|as|for|with|not|so|"
        r"if)\s)",
        " dash dash ",
    ),
    (r"(?<![\w-])-([b-zB-HJ-Z])(?![\w'.])", lambda m: f" dash {m[1].upper()}"),
    (r"(?<![\w'])([a-z]|\d+[a-z])\s[-–]\s(?=(?:\d+|\d*[b-z])(?![\w']))", r"\1 minus "),
    (r"(?<=\([a-z])-(?=\d+\))|(?<=\b[b-z])-(?=\d+\s?[=<>])", " minus "),
    # codes, which are read digit by digit
    (
        r"\b((?:[Cc]ode|[Pp]assword|[Pp]asscode|PIN|OTP)(?:\s(?:is|was))?:?\s)(\d{5,8})(?![\w-]|[.,]\d)",
        lambda m: m[1] + digits(m[2]),
    ),
    (
        r"\b((?:[Cc]ode is|[Pp]assword(?: is)?|[Pp]asscode(?: is)?|PIN(?: is)?|OTP(?: is)?):?\s)(\d{4})(?![\w-]|[.,]\d)",
        lambda m: m[1] + digits(m[2]),
    ),
    (r"\b([Aa]rea code )(\d{3})\b", lambda m: m[1] + digits(m[2])),
    (r"\b([Tt]ext(?: \w+){0,3} to )(\d{5,6})(?![\w-]|[.,]\d)", lambda m: m[1] + digits(m[2])),
    (
        r"\b([Tt]ext )(\d{5,6})(?=\s(?:to|for|or|and|now|today)\b|[.!?,]?\s*$)",
        lambda m: m[1] + digits(m[2]),
    ),
    (r"(?<=\d)(\s?)p\.?c\.?m\b(?:\.(?=\s[a-z]))?", r"\1 per calendar month"),
    (r"(?<=\d)\s?p\.?w\b(?:\.(?=\s[a-z]))?", " per week"),
    # abbreviations with a slash
    (r"\bw/o\b", "without"),
    (r"\bw/(?=\s)", "with"),
    (r"\bc/o\b", "care of"),
    (r"\b[nN]/[aA]\b", f"N A{LETTER}"),
    (r"\b(?:TCP/IP|AC/DC|I/O)\b", lambda m: " ".join(m[0].replace("/", ""))),
    (r"\biOS\b", "I O S"),
    (r"\bmacOS\b", "mac O S"),
    (r"\bpH\b", "P H"),
    (r"\b([Tt]he )WHO\b", r"\1W H O"),
    (r"\bA\.?D\.?\s(?=\d)(1\d{3}(?!\d))?", lambda m: f"A D {year(int(m[1])) if m[1] else ''}"),
    (r"\bWW(I{1,2}|1|2)\b", lambda m: f"World War {'one' if m[1] in ('I', '1') else 'two'}"),
    (r"\bA(?=[+-](?!\w)|\s?[<>!]?=)", f"A{LETTER}"),
    (
        rf"(?<![\w-])([A-F]{LETTER}?)-(?=\s(?:grades?|average|students?|in|on|for)\b|[.,;!?]|$)",
        r"\1 minus",
    ),
    (r"\bp\.a\.|\bp\.a\b", "per annum"),
    (r"\bb/c\b", "because"),
    (r"(?<!\w)\.NET\b", "dot net"),
    (r"\b([A-GJ])#(?!\w)", rf"\1{LETTER} sharp"),
    (r"(?:\b|(?<=\d))CO(?=2\b)", " C O "),
    (
        r"\b(ISBN(?:-1[03])?):?\s(\d[\d-]{8,15}[\dX])(?![\w-])",
        lambda m: f"ISBN {', '.join(' '.join(part) for part in m[2].split('-'))}",
    ),
    # versions, before their stops become decimal points
    (r"\b[vV]\.?\s?(\d+(?:\.\d+)+)(?![\w])", lambda m: f"version {_parts(m[1])}"),
    (r"\b([Vv]ersion)\s(\d+(?:\.\d+)+)(?![\w])", lambda m: f"{m[1]} {_parts(m[2])}"),
    # powers of ten, and signs that would be lost once the number after them is in words
    (
        rf"(?<![\w.,])({ms.NUM})(?:e([+-]?\d{{1,3}})|E([+-]\d{{1,3}}))(?![\w.])",
        lambda m: f"{m[1]} times 10^{(m[2] or m[3]).replace('+', '')}",
    ),
    (r"\^\s?[-–]\s?(?=\d)", " to the power of minus "),
    (r"(?<=\w)\^\s?(?=\d)", " to the power of "),
    (r"(?<![<=>-])>=(?![=>])", " greater than or equal to "),
    (r"(?<![<=>])<=(?![=>])", " less than or equal to "),
    (r"(?:\s|(?<=[\w)\]]))!==?(?=\s?[\w\"'(\[.$£€-])", " is not equal to "),
    (r"(?<=[\w)\]\s])===?(?=[\w\"'(\[\s.-])", "="),
    (r"~\s?(?=[$£€]?\.?\d)", " about "),
    (r"(?<![<\w])>\s?(?=[$£€]?\.?\d)", " greater than "),
    (r"(?<![<\w/])(\w)>(?=\.?\d)", r"\1 greater than "),  # not the end of a tag
    (r"(?<!<)<\s?(?=[$£€]?\.?\d)", " less than "),
    (r"(?<=\d)\s?\*\s?(?=\d)", " times "),
    (r"(?<=\d)\s?x\s?(?=[\d.,]+(?:\s?x\s?[\d.,]+)*\s?=)", " times "),
    (rf"(?<![\w.,/])(?<!/\s)({ms.NUM})\s/\s(?=(?:{ms.NUM})(?!\d|[.,]\d|\s?[/%]))", ms.divided),
    (r"(?<![\w.,/])(\d+\.\d+)/(?=\d{1,3}(?:\.0)?(?![\w/]|[.,]\d))", r"\1 out of "),
    (r"(?<=\d)\s?[-–]\s?(?=\d+(?:\.\d+)?\s?=)", " minus "),
    (
        r"\b([12]\d{3}-\d\d-\d\d)T(\d\d:\d\d(?::\d\d)?)(?:\.\d+)?(Z\b|([+-])(\d\d):?00\b)?(?![\w:])",
        q.iso_timestamp,
    ),
    # telephones
    (r"(?<![\w.-])1-(8\d\d|900)-(?=[A-Z]{2})", q.toll_free),
    (r"(?<![\w+])\+\d{1,3}(?:[\s.-]?\(?\d{1,6}\)?){1,5}(?![\w-]|\.\d)", q.international),
    (r"(?<![\w.-])1[-. ]\(?\d{3}\)?[-. ]\d{3}[-. ]\d{4}(?![\w-])", q.telephone),
    (r"(?<![\w.-])0\d{4} \d{6}(?![\w-]|[.,]\d)", q.telephone),
    (r"(?<![\w.-])0\d{2,4}[ -]\d{3,4}[ -]\d{3,4}(?![\w-])", q.telephone),
    (
        r"\b([Cc]all|[Dd]ial|[Pp]hone|[Rr]ing)\s(\d11|999|112|000)\b(?![-.,]?\d)",
        lambda m: f"{m[1]} {digits(m[2])}",
    ),
    # ranges: an en dash between quantities is "to", and so is a hyphen next to a unit or a time of
    # day
    # "Jan 2020 - Mar 2021", "the 1st-3rd"
    (
        rf"\b{q.MONTH}\s+(?P<y>[12]\d{{3}})\b"
        rf"(?:\s?[-–]\s?(?=(?:{q.MONTHS_SHORT})[a-z]*\.?\s[12]\d{{3}})|(?![-–]?\d|,\d))",
        q.month_of_year,
    ),
    (r"(?i)\b(\d+(?:st|nd|rd|th))\s?[-–]\s?(?=\d+(?:st|nd|rd|th)\b)", r"\1 to "),
    (r"\b(GMT|UTC)\s?-\s?(?=\d)", r"\1 minus "),
    (rf"\b{q.MONTH}\s+(?P<d>\d{{1,2}})\s?[-–]\s?(?P<e>\d{{1,2}})(?![\w:/-]|\.\d)", q.days),
    (
        rf"(?<![\w.,:/-])(\d{{1,2}})\s?[-–]\s?(?=\d{{1,2}}\s{q.MONTH})",
        lambda m: f" the {ordinal(int(m[1]))} to " if 1 <= int(m[1]) <= 31 else m[0],
    ),
    (
        rf"([$£€¥])({ms.NUM})(?:[-–]|\s[-–]\s(?=[\d.]+\s[mbt]r?illion\b))(?=\d)",
        lambda m: f" {number(m[2])} to {m[1]}",
    ),
    (rf"([$£€¥]\s?(?:{ms.NUM})(?:[kKmMbB]n?)?)\s?-\s?(?=[$£€¥]\d)", r"\1 to "),
    (r"(?<=\d)\s?–\s?(?=[$£€¥]?\d)", " to "),
    (
        r"(\d\s?(?:[A-Za-z°%]{1,4}|[ap]\.m\.))(?:–\s?|\s–\s|(?<=[ap]m|m\.|.[%°])\s–)(?=[$£€¥]?\d)",
        r"\1 to ",
    ),
    (r"(?i)(\d:\d\d|\d\s?[ap]\.?m\.?)\s?-\s?(?=\d{1,2}(?::\d\d|\s?[ap]\.?m))", r"\1 to "),
    (r"(?i)(?<![\w.,:/-])(\d{1,2}(?::\d\d)?)\s?-\s?(?=\d{1,2}(?::\d\d)?\s?[ap]\.?m\b)", r"\1 to "),
    (r"(?i)\b(noon|midnight)\s?[-–]\s?(?=\d)", r"\1 to "),
    (r"(?i)(\d|[ap]\.?m\.?)\s?[-–]\s?(?=(?:noon|midnight)\b)", r"\1 to "),
    # any other that touches a number and nothing before it is a minus
    (r"(?:^|(?<=[\s(\[{\"'=/]))–(?=[$£€¥]?\.?\d)", "-"),
    (rf"(?<![\w.,-])({ms.NUM})-(?=(?:{ms.NUM})\s?(?:%|(?:{ms.UNIT})(?![\w/'])))", r"\1 to "),
    (rf"({ms.NUM})\s?%(?:-|\s-\s)(?=(?:{ms.NUM})\s?%)", r"\1% to "),
    (
        rf"(?<![\w.,-])({ms.NUM})-(?=(?:{ms.NUM})\s?(?:[kKmMbB]|[mbMB]n)\+?\s(?:{_COUNTABLE})\b)",
        r"\1 to ",
    ),
    (r"\b50-50\b", "fifty fifty"),
    (r"(?<![\w.,-])\d(?:-\d){2,}(?![\w-]|\.\d)", lambda m: digits(m[0])),
    (
        r"(?<![\w.,-])(?P<h>\d{1,3})\s?h\s?(?P<m>[0-5]?\d)\s?m(?:in)?(?:\s?(?P<s>[0-5]?\d)\s?s)?(?![\w/])",
        ms.duration,
    ),
    (r"(?<![\w.,-])(?P<h>)(?P<m>\d{1,3})\s?m(?:in)?\s(?P<s>[0-5]?\d)\s?s(?![\w/])", ms.duration),
    # money
    (
        r"(?<![\w.])(\d{1,3}(?:\.\d{3})*),(\d\d)(?=\s?€)|(?<=€)(\d{1,3}(?:\.\d{3})*),(\d\d)(?![\d,])"
        r"|(?<=€\s)(\d{1,3}(?:\.\d{3})*),(\d\d)(?![\d,])",
        lambda m: ".".join(part.replace(".", "") for part in m.groups() if part),
    ),
    (
        rf"({_MONEY})\s?/\s?(?P<per>{ms.PER})(?![\w/'])(?:\.(?=\s[a-z]))?",
        lambda m: f"{m[1]}{ms.per(m)}",
    ),
    (
        rf"(?<![\w.,$£€¥])(?P<n>{ms.NUM})\s?(?P<scale>[kKmMbB]|[mbMB]n)(?P<more>\+?)(?=\s(?:{_COUNTABLE})\b)",
        q.scaled,
    ),
    (r"\b(144|240|360|480|720|1080|1440|2160)p\b", lambda m: f" {year(int(m[1]))} P "),
    (rf"(?<![\w.,])(?P<n>{ms.NUM})p(?![\w/'-])", q.pence),
    (r"(?<![\w$£€¥])-(?=[$£€¥]\s?\d)", " minus "),
    (r"(?<![\w$£€¥])([$£€¥])-(?=\d)", r" minus \1"),
    (rf"(?<![\w.)])(?<!\d\s)-(?=(?:{ms.NUM}|\.\d+)\s?%)", " minus "),
    (
        rf"(?P<country>\b(?:{'|'.join(q.DOLLARS)}))?(?P<symbol>(?<![A-Za-z])R\$|[$£€¥₹₩])\s?"
        rf"(?P<amount>{ms.NUM}|\.\d+)(?:\s?(?P<scale>thousand|million|billion|trillion|lakh\b|crore\b|[kK]\b|[mM]n?\b|[bB]n?\b|T\b|tn\b))?",
        q.pieces_of_money,
    ),
    (rf"(?<=€)\s?/\s?(?P<per>{ms.PER})(?![\w/'])", ms.per),
    (rf"(?P<amount>{ms.NUM})\s?(?P<symbol>€)(?P<scale>)", q.pieces_of_money),
    (
        rf"(?:\b(?P<before>{'|'.join(q.CODES)})\s?(?P<first>{ms.NUM})(?![\w])"
        rf"|(?<![\w.,])(?P<second>{ms.NUM})\s?(?P<after>{'|'.join(q.CODES)})\b)"
        rf"(?:\s?/\s?(?P<per>{ms.PER})(?![\w/']))?",
        q.coded_money,
    ),
    (
        r"(?<![\w.,])(\d+)\s?¢",
        lambda m: f" {cardinal(int(m[1]))} cent{'' if m[1] == '1' else 's'} ",
    ),
    # dates
    (r"\b(?P<y>[12]\d{3})(?P<sign>[-/])(?P<m>\d{2})(?P=sign)(?P<d>\d{2})\b", q.iso_date),
    (
        r"(?<![\w-])(?P<a>\d{1,2})(?P<sign>-)(?P<b>\d{1,2})-(?P<y>[12]\d{3})(?![\w-])",
        q.numeric_date,
    ),
    (
        rf"(?P<before>\b(?:[Oo]n|[Uu]ntil|[Tt]ill|[Dd]ue|[Dd]ated|[Ss]ince|RSVP by|{_WEEKDAY}\w*,?)\s)"
        r"(?P<a>\d{1,2})/(?P<b>\d{1,2})(?=[,;:!?)]|\.(?!\d)|\s?$|\s[A-Z\d]|"
        r"\s(?:at|in|from|to|and|or|by|for|with|until|between|after|before|the|we|you|he|she|it|they)\b)",
        q.day_and_month,
    ),
    (
        r"(?<![\d/])(?P<a>\d{1,2})(?P<sign>/)(?P<b>\d{1,2})/(?P<y>[12]\d{3}|\d\d)(?![\d/])",
        q.numeric_date,
    ),
    (
        r"(?<![\d.])(?P<a>\d{1,2})(?P<sign>\.)(?P<b>\d{1,2})\.(?P<y>[12]\d{3})(?![\w]|\.\d)",
        q.numeric_date,
    ),
    (
        rf"\b{q.MONTH}\s+(?P<d>[0-3]?\d)(?:st|nd|rd|th)?(?![\d:.]\d|\d|,\d{{3}}\b)"
        r"(?:,?\s+(?P<y>[12]\d{3})\b)?",
        lambda m: q.date(m["month"], m["d"], m["y"]) if 1 <= int(m["d"]) <= 31 else m[0],
    ),
    (
        rf"\b(?P<the>the )?(?P<d>[0-3]?\d)(?:st|nd|rd|th)?\s+{q.MONTH}(?:,?\s+(?P<y>[12]\d{{3}})\b)?",
        lambda m: (
            f"{m['the'] or 'the '}{ordinal(int(m['d']))} of "
            f"{q.date(m['month'], '1', None).split()[0]} "
            + (f"{q.year_of_date(m['y'])} " if m["y"] else "")
            if 1 <= int(m["d"]) <= 31
            else m[0]
        ),
    ),
    (r"\b(\d{3,4})\s?(AD|BC|BCE|CE)\b", lambda m: f" {year(int(m[1]))} {' '.join(m[2])}"),
    # coordinates
    (
        rf"(?<![\w.,])(?P<degrees>{ms.NUM})°\s?(?:(?P<minute>{ms.NUM})'\s?(?:(?P<second>{ms.NUM})(?:\"|'')\s?)?)?"
        r"(?P<side>[NSEW])\b",
        ms.latitude,
    ),
    # times and ratios
    (r"((?i:\d:\d\d|\d\s?[ap]m|\d\s?[ap]\.m\.|\d:\d\d\s?[ap]\.?m\.?))\s([ECMP])T\b", r"\1 \2 T"),
    (r"(?<![\d:])(\d{1,2}):([0-5]\d):([0-5]\d)(?![\d:]|\.\d)", q.time_with_seconds),
    (r"(?<![\d:])(?P<h>\d{1,2}):(?P<min>[0-5]\d)\.(?P<part>\d{1,3})(?!\d)", q.stopwatch_time),
    (
        r"(?i)\b(?P<h>\d{1,2}):(?P<min>[0-5]\d)(?!:?\d)\s?(?P<half>[ap]\.m\.|[ap]m\b)?",
        q.time_of_day,
    ),
    (r"(?i)\b(?P<h>\d{1,2})(?P<min>)\s?(?P<half>[ap]\.m\.|[ap]m\b)", q.time_of_day),
    (r"(?<![\w:.,])(\d{1,3}):(?=\d{1,3}(?![\w:]))", r"\1 to "),
    (r"(?<![\w-])(?:\(?\d{3}\)?[-. ])?\d{3}[-.]\d{4}(?![\w-])", q.telephone),
    # years
    (r"(?<![\w/.-])((?:19|20)\d\d)/(?=(?:19|20)\d\d(?![\w/]|[.,]\d))", r"\1 to "),
    (r"(?<!\w)'(?P<t>[1-9]0)s\b", q.plural_year),
    (r"(?<!\w)'0([1-9])\b(?!')", lambda m: f" oh {cardinal(int(m[1]))} "),
    (
        r"\b(10|100|1,?000)s(?= of\b)",
        lambda m: {2: "tens", 3: "hundreds"}.get(len(m[1]), "thousands"),
    ),
    (r"\b(?P<t>[12]\d\d0|[2-9]0)'?s\b", q.plural_year),
    # parts and measures
    (r"([°\d]\s?[CF])\s?/\s?(?=\d+\s?°?[CF]\b)", r"\1 or "),
    (r"\bfl\.? ?(?=oz\b)", "fl "),
    (
        rf"({ms.NUM})(?P<unit>[\s-]?(?:fl oz|ft|mi|yds?|lbs?|oz|gal|qt|hrs?|mins?|secs?|tbsp|Tbsp|tsp|kg|km|cm|mm|ml|yrs?|"
        rf"wks?|mos?))\.(?=\s[a-z]|\s(?:{ms.NUM})\s?(?:oz|in|ft|lbs?|mins?|secs?|m|cm|mm|g|ml)\b)",
        r"\1\g<unit>",
    ),
    (r"\b(\d+) x (\d+)\s?(g|kg|ml|oz|lb)(?= [a-z]+s?\b)", r"\1 \2-\3"),
    (r"(?<![\w/.])(?P<n>(?:\d+[\s-])?\d{1,2}/\d{1,2})\"", ms.parts_of_an_inch),
    (rf"(?<![\w.,'])(?:{ms.NUM})'(?:\s?x\s?(?:{ms.NUM})'){{1,2}}(?![\w'\"])", ms.feet_by_feet),
    (rf"(?<![\w.,])({ms.NUM})x\s?/\s?(?P<per>{ms.PER})(?![\w/'])", ms.times_a_day),
    (
        rf"(?<![\w/.])(?:(?P<whole>{ms.NUM})(?:\s+|-(?=\d/\d)))?(?P<top>\d{{1,3}})/(?P<bottom>\d{{1,3}}|1,?000)"
        rf"(?P<ordinal>(?:nd|rd|th)s?)?(?![\w/])(?:[\s-]?(?P<unit>{ms.UNIT})(?![\w/']))?",
        ms.fraction_in_words,
    ),
    (
        r"(?i)\b(\d[\d,]*)(?:st|nd|rd|th)\b",
        lambda m: (
            f" {ordinal(int(m[1].replace(',', '')))} " if len(m[1]) < 16 else f" {digits(m[1])} "
        ),
    ),
    (r"\b([1-9]\d{0,2})ers\b", lambda m: f" {plural(cardinal(int(m[1])) + 'r')} "),
    (r"\b(\d{1,2})'\s?(1?\d)(?:\"|'')", ms.feet_and_inches),
    (r"(?<=\d)'\s?-\s?(?=\d+'\s[a-z])", " to "),
    (
        rf"(?<![\w.,'])({ms.NUM})'(?=\s(?:tall|high|wide|long|deep|across|thick|above|below)\b)",
        lambda m: f" {number(m[1])} {'foot' if m[1] == '1' or ms.attributive(m) else 'feet'} ",
    ),
    (r"(?<=\d)\"\s?x\s?(?=\d)", " by "),
    (rf"(?<![\w.,'])(?P<n>{ms.NUM})\"", ms.inches),
    (r"\b(sq|cu)\. ?(?=ft|in|mi|yd)", r"\1 "),
    (r"\b((?:sq|cu) (?:ft|in|mi|yd))\.(?=\s[a-z])", r"\1"),
    (rf"(?<![\w.,])(?P<n>{ms.NUM})[\s-]?in\.(?=\s[a-z])", ms.inches),
    (r"(\d)\s?ft\.?\s?(\d{1,2})\s?in\b\.?", r"\1 ft \2 inches"),
    (r"(?<=\d)(\s?(?:ft|in|mm?|cm|yd)\.?)?\s?x\s?(?=\d)", lambda m: f"{m[1] or ''} by "),
    (
        rf"(?<![\w.,(=+*/-])(?<![=+*/-]\s)({ms.NUM})x(?![\w')-]|\s?[-+=^*/])",
        lambda m: f" {number(m[1])} times ",
    ),
    (
        rf"(?<![\w.,])(?P<minus>(?<!\d)-)?(?P<n>{ms.NUM})(?P<gap>[\s-]?)(?P<unit>{ms.UNIT})(?:/(?P<per>{ms.PER}))?"
        r"(?![\w/'])",
        ms.measure,
    ),
    (rf"(?<=\d)(\s[a-z]{{3,}})/(?P<per>{ms.PER})(?![\w/'])", lambda m: f"{m[1]}{ms.per(m)}"),
    (r"(?<=\d)[\s-]?y/?o\b(?!-)", " year old"),
    (rf"({ms.NUM})\s?(?:pct|p\.c\.)(?!\w)", lambda m: f" {number(m[1])} percent "),
    (r"\b(\d{1,3}) bps\b", lambda m: f" {ms.count_of(int(m[1]), 'basis point')} "),
    (rf"({ms.NUM})\s?%", lambda m: f" {number(m[1])} percent "),
    (rf"(?:#|\b[Nn][Oo]s?\.)\s?(?={ms.NUM})", " number "),
    (r"\b(\d{1,4})\s?[-–]\s?(?=\d{1,4}\b)", r"\1 to "),
    # signs
    (r"(?<![\w.])-(?=\.?\d)", " minus "),
    (r"(?<=\w)\s>\s(?=\w)", " greater than "),
    (r"(?<=\w)\s<\s(?=\w)", " less than "),
    # Roman numerals, in contexts that show that they are numerals
    (rf"\b(?P<n>(?:{q.TITLES}) {q.NAME})\s+(?P<r>(?!I\b)[IVX]+)\b", q.regnal),
    (
        rf"(?:^|(?<=[.!?] )){q.NOT_COUNTED}(?P<n>{q.NAME})\s+(?P<r>(?=II|I[VX]|V|X)[IVX]+)"
        r"(?='s [a-z]|,? (?:was|is|had)\b)",
        q.regnal,
    ),
    (
        rf"\b{q.NOT_COUNTED}(?P<n>{q.NAME})\s+(?P<r>(?=II|I[VX]|V|X)[IVX]+)(?=,? (?:{q.DEEDS})\b)",
        q.regnal,
    ),
    (
        rf"\b(?P<n>(?i:{'|'.join(q.COUNTED)}))\s+(?P<r>[IVXLCDM]+|[ivx]{{2,}})\b(?!{LETTER})",
        q.counted,
    ),
    (rf"\b(?P<n>{'|'.join(q.REGNAL)})\s+(?P<r>(?=[VX]|II|I[VX])[IVX]{{1,5}})\b", q.regnal),
    (
        rf"\b(?P<n>(?:King|Queen|Pope|Emperor|Empress|Tsar|Czar) (?:{'|'.join(q.REGNAL)}))\s+(?P<r>I)\b",
        q.regnal,
    ),
    (rf"\b(?P<n>{'|'.join(q.REGNAL)})\s+(?P<r>I)\b(?= of\b|'s\b)", q.regnal),
    (r"\b([IVX]{1,5})(?:th|st|nd|rd)?(?=\s(?:century|centuries)\b)", q.century),
    (r"(?<![\w.'&-])[IVXLCDM]{2,}(?![\w.&-]\w|[\w&-])", q.lone_numeral),
    (r"(?<![\w.])\.(?=\d)", "0."),
    (r"(?<![\d.])\d+(?:\.\d+){2,}(?![\d.])", lambda m: " point ".join(map(whole, m[0].split(".")))),
    # letters and digits that touch are read one after the other: H2O, COVID-19, MP3
    (r"(?<![A-Za-z'])A-?(?=\d)|(?<=\d)a\b", f" A{LETTER} "),
    (r"(?<=[A-Z]\d)([A-Z]{2,})(?![a-z])", lambda m: " ".join(m[1])),
    (r"\b([Yy]ear )(10[1-9]\d)\b", lambda m: m[1] + year(int(m[2]))),
    (ms.NUM, q.year_or_number),
    (r"(?i)\be\.g\.", "for example"),
    (r"(?i)\bi\.e\.", "that is"),
    (r"\bPh\.?D\b\.?", "P H D"),
    (r"(?i)\band/or\b", "and or"),
    (r"(?<=[A-Za-z])/(?=[A-Za-z])", " or "),
    (r"\b([A-Z]{1,3})&([A-Z]{1,3})\b", lambda m: f"{' '.join(m[1])} and {' '.join(m[2])}"),
    (r"&", " and "),
    (r"%", " percent "),
    (r"\+", " plus "),
    (r"=", " equals "),
    (r"@", " at "),
]
_ORDERED = [(re.compile(pattern), replacement) for pattern, replacement in _RULES]


def _parts(text: str) -> str:
    """Read a version: "2.10" → "two point ten"."""
    return " point ".join(map(whole, text.split(".")))


def _formula(text: str) -> str:
    """Read a chemical formula: letters one by one, numbers as numbers."""
    return " ".join(
        part + (LETTER if part == "A" else "") for part in re.findall(r"\d+|[A-Z]", text.upper())
    )


def _disguised(m: re.Match[str], is_word: Callable[[str], bool]) -> str:
    """Return a word in which digits replace letters: "Se7en" → "Seven"."""
    for seven in "tv":
        word = m[0].translate(str.maketrans("013457", "oieas" + seven))
        if is_word(word.lower()):
            return word
    return m[0]


def _initialisms(text: str, is_word: Callable[[str], bool]) -> str:
    """Spell "U.S.A.", "IBM", "UK"; read "NASA" and a shouted "STOP" as words; distinguish the
    article "a" from the letter."""

    def dotted(m: re.Match[str]) -> str:
        ends = m[0] not in ("P.S.", "N.B.") and re.match(
            rf"[\s\"')]*$|\s+{OPENERS}", text[m.end() :]
        )
        return " ".join(m[0].replace(".", "").upper()) + ("." if ends else "")

    text = re.sub(r"(?<![\w.])(?:[A-Za-z]\.){2,}", dotted, text)
    words = [w for w in re.findall(r"[A-Za-z']+", text) if len(w) > 1]
    shouting = len(words) > 1 and all(w.isupper() for w in words)

    def capitals(m: re.Match[str]) -> str:
        word, tail = m["word"], m["tail"].lower()
        if word in _ACRONYMS:
            return word.lower() + tail
        if is_word(word.lower()) and (shouting or word not in INITIALISMS):
            return word.lower() + tail
        pronounceable = len(word) > 5 and bool(_VOWELS & set(word))
        # a plural of letters keeps an apostrophe, so that "V's" is not taken for a word
        return word.lower() + tail if pronounceable else " ".join(word) + ("'s" if tail else "")

    def consonants(m: re.Match[str]) -> str:
        return m[0] if is_word(m[0]) else " ".join(m[0].upper())

    # "pcm", but not "hmm" and "psst"
    text = re.sub(
        r"(?<![A-Za-z'])(?!\w*(\w)\1|tsk|pst|psh|nth|mhm)[b-df-hj-np-tv-xz]{2,5}(?![A-Za-z'])",
        consonants,
        text,
    )
    text = re.sub(
        r"(?<![A-Za-z'])(?P<word>[A-Z]{2,})(?P<tail>'[sS]|s|)(?![A-Za-z'])", capitals, text
    )
    # Sentence-initial "A" before a word is the article; anywhere else a lone "A" is the letter.
    return re.sub(
        r"(?:^|(?<=[.?!,] ))A(?= (?!and |or )(?:[a-z]|[A-Z][a-z']))", "a", " ".join(text.split())
    )


def _without_markup(text: str) -> str:
    """Return the text with blanks for typed escapes and tags, and nothing for tags within words.
    A single tag is left: it may be what is talked about."""
    text = _TYPED_BREAK.sub(lambda m: m["path"] or " ", text)
    if not re.search(r"(?i)</[a-z]|<br\b|/>", text):
        return text
    return _TAG.sub(lambda m: "" if (m["name"] or "").lower() in _IN_WORDS else " ", text)


def _fold(text: str) -> str:
    """Convert compatibility forms, accents and other scripts' digits to ASCII, and a lone Greek
    letter to its name.

    Raises TextError if letters remain that have no English phonemes: leaving words out would be a
    wrong reading.
    """
    for _ in range(2):  # text from web pages may have been escaped twice
        text = re.sub(
            r"&(?:#\d{1,7}|#[xX][\da-fA-F]{1,6}|[A-Za-z]{2,8}\d?);",
            lambda m: html.unescape(m[0]),
            text,
        )
    text = _without_markup(without_invisible(text))
    for pattern, replacement in _POWERS:
        text = re.sub(pattern, replacement, text)
    text = _GROUPS.sub(lambda m: re.sub(r"\s", ",", m[0]), text)
    # 10⁸ would fold to 108; a raised 2 or 3 alone is "squared" and "cubed" below
    text = re.sub(
        r"(?<=\d)(?![¹²³](?![⁰¹²³⁴-⁹]))([⁺⁻]?[⁰¹²³⁴-⁹]+)",
        lambda m: f"^{m[1].translate(_RAISED)}",
        text,
    )
    text = re.sub(r"(?<=[\w.,;!?\"])¹(?![⁰¹²³⁴-⁹])", "", text)  # a footnote
    text = re.sub("[¼-¾⅐-⅞]", lambda m: f" {unicodedata.normalize('NFKC', m[0])}", text)
    folded = (
        unicodedata.normalize("NFKC", text.translate(_MARKS)).replace("⁄", "/").translate(_LATIN)
    )
    folded = re.sub(r"μ(?=[mgL]\b)", "u", folded)  # 10 μm, 5 μg: found again in the table of units
    folded = re.sub(
        r"(?<![\u0370-\u03ff])[\u0370-\u03ff](?![\u0370-\u03ff])",
        lambda m: f" {_LETTER_NAMES[m[0].lower()]} " if m[0].lower() in _LETTER_NAMES else m[0],
        folded,
    )
    out = "".join(map(_ascii, folded))
    if foreign := sorted({c for c in out if c.isalpha() and not c.isascii()}):
        shown = repr(text if len(text) <= 60 else text[:57] + "...")
        raise TextError(
            f"the text contains letters without English phonemes ({' '.join(foreign[:8])}): "
            f"{shown}; transliterate them or remove the utterance"
        )
    return out


def unread_signs(text: str) -> list[str]:
    """Return the signs of a text that are left out because they have no reading, such as emojis,
    each once."""
    return [
        c
        for c in dict.fromkeys(text)
        if not c.isascii()
        and (unicodedata.category(c).startswith("S") or c in "‰‱")
        and ord(c) not in _MARKS
        and _ascii(c) == " "
        and not re.search(r"\w", unicodedata.normalize("NFKC", c))
    ]


def _ascii(c: str) -> str:
    """Return a character as ASCII if it is a digit or an accented letter; signs without a
    reading become spaces."""
    if c.isascii() or c in "–—£€¥₹₩¢°":
        return c
    if (value := unicodedata.decimal(c, None)) is not None:
        return str(value)
    if c.isalpha():
        base = "".join(b for b in unicodedata.normalize("NFD", c) if not unicodedata.combining(b))
        return base if base.isascii() else c
    return "" if unicodedata.combining(c) else " "


def _phrase_marks(text: str) -> str:
    """Keep apostrophes inside words and the marks `, . ? !`; every other sign becomes a pause or
    a space."""
    text = re.sub(r"\s*\.{2,}\s*$", ".", text)
    text = re.sub(r"\.{2,}|\s-+\s|--+|\s*[–—]\s*|[:;()\[\]{}]", " , ", text)
    text = re.sub(r"(?<![A-Za-z])'|'(?![A-Za-z])", " ", text)
    text = re.sub(r"[^A-Za-z',.?! ]+", " ", text)

    # of several marks the strongest
    text = re.sub(
        r"\s*[,.?!][\s,.?!]*", lambda m: next(mark for mark in "?!.," if mark in m[0]) + " ", text
    )
    text = re.sub(r"^[\s,.?!]+", "", text)
    return re.sub(r",\s*$", "", " ".join(text.split()))


def expand(text: str, is_word: Callable[[str], bool]) -> str:
    """Return the spoken form of `text`: words of letters and apostrophes, phrase marks `, . ? !`,
    single spaces.

    `is_word(lower-case word)` tests whether the pronunciation lexicon contains a word; it decides
    whether capitals are an initialism. Raises TextError if the text contains nothing speakable or
    is in another script.
    """
    # addresses first, then abbreviations: the rules below write letters with stops of their own
    # ("five P M. He left")
    text = abbreviations(
        places(" ".join(addresses(" ".join(_fold(text).split()), is_word).split()))
    )
    text = re.sub(
        r"(?<!\w)(?=\w{4})[A-Za-z]+[013457]+[a-z]+(?!\w)", lambda m: _disguised(m, is_word), text
    )
    for pattern, replacement in _ORDERED:
        text = pattern.sub(replacement, text)
    text = _phrase_marks(_initialisms(" ".join(text.split()), is_word))
    if not re.search("[A-Za-z]", text):
        raise TextError(
            "text is empty or has no letter or digit that can be spoken; give at least one "
            "English word"
        )
    return text
