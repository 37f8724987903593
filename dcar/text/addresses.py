"""E-mail addresses, addresses of the net, names of files and IP addresses as they are dictated.

"j.doe@example.org" → "J dot doe at example dot org". This comes before every other rule of `dcar.text.spoken`: stops,
slashes and hyphens of an address are said, while those of a sentence are pauses.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dcar.text.numbers import cardinal, digits, year

LETTER = "\ue000"  # behind a capital: it is a letter, whatever stands around it, never an initial or the article "a"

_SIGNS = {
    ".": "dot", "-": "dash", "_": "underscore", "+": "plus", "/": "slash", "?": "question mark", "=": "equals",
    "&": "ampersand", "%": "percent", "#": "hash", "~": "tilde", ":": "colon", "@": "at", "\\": "backslash",
}  # fmt: skip
# Ends of names that are bare of https:// or www.: those which no sentence without a space after its stop imitates.
_ENDINGS = ("com|org|net|edu|gov|info|io|ai|dev|app|co\\.uk|ac\\.uk|uk|de|fr|nl|eu|ch|jp|cn|ca|au")
_FILES = ("pdf|txt|jpe?g|png|gif|html?|csv|docx?|xlsx?|pptx?|zip|mp3|mp4|wav|flac|exe|md|js|ts|jsx|tsx|py|json|ya?ml|"
          "toml|cfg|ini|sh|cpp|rs|php|css|xml|svg|sql|log|tar|gz|rtf|odt|epub|avi|mov|mkv|ogg|bmp|tiff?|ipynb")
_WORDS = frozenset({"com", "org", "net", "gov", "info", "dev", "app", "co", "zip"})
_SPELLED = frozenset(
    "edu io ai uk eu au id faq api usa url ibm rss exe gif docx xlsx pptx de fr nl ch jp cn ca ac us".split()
)
_HOST = r"[A-Za-z0-9](?:[\w-]*[A-Za-z0-9])?"
_EMAIL = re.compile(rf"(?:\bmailto:)?(?<![\w.+-])([A-Za-z0-9](?:[\w.+-]*[A-Za-z0-9_])?@{_HOST}(?:\.{_HOST})+)")
_URL = re.compile(
    r"\b(?:(?P<scheme>(?:https?|ftp)://)(?=[A-Za-z0-9])|(?=www\.))(?P<address>[^\s<>\"()\[\]{}]*[A-Za-z0-9/=_-])"
    rf"|(?<![\w@.-])(?P<bare>(?:{_HOST}\.)+(?:{_ENDINGS})(?:(?=[\s,;.!?:'\")\]}}>]|$)|/[^\s<>\"()\[\]{{}}]*[A-Za-z0-9/]|/))"
    r"(?![\w@])",
    re.IGNORECASE,
)
_FILE = re.compile(rf"(?<![\w./@-])({_HOST}\.(?:{_FILES})(?:#\w[\w-]*)?)(?![\w@-]|\.\w)")
# ~/notes, /etc/hosts, C:\temp\a.txt: a path of one part without a home or a drive may be an alternative ("and /or")
_PATH = re.compile(r"(?<![\w./\\:~-])((?:~/|/[A-Za-z][\w-]+/)[\w./-]*\w|[A-Z]:\\(?:[\w.-]+\\)*[\w.-]*\w)(?!\w)")
_IP = re.compile(r"(?<![\w.])((?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3})(?![\w]|\.\d)")


def addresses(text: str, is_word: Callable[[str], bool]) -> str:
    """`text` with its addresses in words; `is_word` says what the lexicon knows. Single letters carry LETTER."""
    text = re.sub(r"<((?:https?://|mailto:|ftp://|[\w.+-]+@)[^\s<>]+)>", r" \1 ", text)
    text = _EMAIL.sub(lambda m: f" {_dictated(m[1], is_word)} ", text)
    text = _URL.sub(lambda m: f" {_dictated(_bare(m['address'] or m['bare']), is_word)} ", text)
    if re.search(r"(?i)(?<!\d)(?:v|version )\d+(?:\.\d+){3}", text) is None:  # 1.2.3.4 is a version there
        text = _IP.sub(lambda m: f" {' dot '.join(map(digits, m[1].split('.')))} ", text)
    text = _PATH.sub(lambda m: f" {_dictated(m[1], is_word)} ", text)
    return _FILE.sub(lambda m: f" {_dictated(m[1], is_word)} ", text)


def _bare(address: str) -> str:
    """Nobody says the slash at the end."""
    return address.removesuffix("/")


def _dictated(address: str, is_word: Callable[[str], bool]) -> str:
    said = []
    for m in re.finditer(r"(?P<port>:\d+)|(?P<letters>[A-Za-z]+)|(?P<digits>\d+)|(?P<sign>.)", address):
        if m["port"]:
            said.append(f"colon {digits(m['port'])}")
        elif m["letters"]:
            said.append(_letters(m["letters"], is_word))
        elif m["digits"]:
            said.append(_digits(m["digits"]))
        else:
            said.append(_SIGNS.get(m["sign"], ""))
    return " ".join(" ".join(said).split())


def _letters(run: str, is_word: Callable[[str], bool]) -> str:
    lower = run.lower()
    if lower not in _WORDS and (len(run) == 1 or lower in _SPELLED or not set("aeiouy") & set(lower)):
        return " ".join(c.upper() + LETTER for c in run)
    # in capitals a word would be taken for an initialism
    return run.lower() if is_word(lower) or run.isupper() else run


def _digits(run: str) -> str:
    if len(run) <= 2 and not run.startswith("0"):
        return cardinal(int(run))
    return year(int(run)) if len(run) == 4 and 1100 <= int(run) <= 2099 else digits(run)
