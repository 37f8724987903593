"""Mandarin: initials, finals with their tones, and the letters of Latin words.

pypinyin (MIT) knows the readings of characters and of phrases, wetext (Apache-2.0) reads numbers,
dates and measures, OpenCC (Apache-2.0) makes traditional characters simplified. Tones are those of
the dictionary: what neighbours make of them (你好, 一个, 不是) follows from the syllables, and a
decoder learns it. Latin words become their letters, as they are written.
"""

import functools
import re
import threading
import unicodedata

from dcar.errors import AssetError, TextError
from dcar.sources.packages import pip_extra
from dcar.text.base import SymbolUnits, closed, inventory_digest, written
from dcar.text.common import FIRST, WORD_BOUNDARY, check_text, check_units, without_invisible
from dcar.text.language import simplifier

INITIALS = tuple("b p m f d t n l g k h j q x zh ch sh r z c s".split())
FINALS = tuple(
    "a ai an ang ao e ei en eng er ê i ia ian iang iao ie in ing iong iou m n ng o ong ou u ua uai "
    "uan uang uei uen ueng uo v van ve vn".split()
)
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_HAN = "\u3007\u3400-\u9fff\U00020000-\U000323af"
_PARTS = re.compile(
    rf"(?P<han>[{_HAN}]+)|(?P<latin>[A-Za-z]+)|(?P<mark>[，。？！；：、…—,?!;:]|\.(?=\s|$))"
)
_MARKS = str.maketrans("。！？，；：、…—;:", ".!?,,,,,,,,")
_OTHERS = re.compile(rf"[^\W_A-Za-z{_HAN}]")

_lock = threading.Lock()
"""Lock for wetext's automata, of which nobody says that threads may share them."""


class MandarinPhonemes(SymbolUnits):
    """Initials and finals of Mandarin, see the module; tone 5 is the neutral one."""

    languages = ("zh",)

    def __init__(self) -> None:
        try:
            import opencc  # noqa: F401
            import pypinyin  # noqa: F401
            from wetext import Normalizer
        except ImportError as missing:
            raise AssetError(
                f"phonemes of Mandarin need pypinyin, wetext and OpenCC ({missing}); run: "
                f"{pip_extra('zh')}, or set units=characters"
            ) from None
        finals = (f"{final}{tone}" for final in FINALS for tone in range(1, 6))
        self.symbols = (*FIRST, *INITIALS, *finals, *LETTERS)
        self.name = f"pinyin-zh-{inventory_digest(self.symbols)}"
        self._normalizer = Normalizer(lang="zh", operator="tn")

    def spoken(self, text: str) -> str:
        text = unicodedata.normalize("NFC", without_invisible(check_text(text)))
        # other forms of letters and digits, but not of marks: a sentence ends at a wide one
        text = re.sub(r"[^\W_]+", lambda found: unicodedata.normalize("NFKC", found[0]), text)
        text = re.sub(rf"(?<=[{_HAN}])\s+(?=[{_HAN}])", "", text)
        with _lock:
            return written(self._normalizer.normalize(text), "。")

    def __call__(self, text: str) -> list[int]:
        return list(_ids(self, text))


@functools.lru_cache(maxsize=16384)
def _ids(units: MandarinPhonemes, text: str) -> tuple[int, ...]:
    """Return the ids of a text, with a boundary beside Latin words and a mark at the end."""
    decomposed = unicodedata.normalize("NFD", simplifier().convert(units.spoken(text)))
    said = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
    if unknown := sorted(set(_OTHERS.findall(said))):
        raise TextError(
            f"{text[:40]!r}: {unknown} are not read in Mandarin; write the text without them"
        )
    symbols = list[str]()
    before = ""
    for part in _PARTS.finditer(said):
        kind = str(part.lastgroup)
        if kind == "mark":
            symbols += [part[0].translate(_MARKS)] if before not in ("", "mark") else []
        else:
            beside = before not in ("", "mark") and "latin" in (kind, before)
            symbols += [WORD_BOUNDARY] if beside else []
            symbols += _syllables(part[0]) if kind == "han" else part[0].upper()
        before = kind if symbols else ""
    if not before:
        raise TextError(f"{text[:40]!r}: no word that can be pronounced in Mandarin")
    symbols = closed(symbols)
    check_units(len(symbols), "phonemes", text)
    return tuple(units.ids[symbol] for symbol in symbols)


def _syllables(characters: str) -> list[str]:
    """Return the symbols of Chinese characters without anything between them."""
    from pypinyin import Style, lazy_pinyin
    from pypinyin.exceptions import PinyinNotFoundException

    try:
        read = lazy_pinyin(
            characters, style=Style.TONE3, errors="exception", neutral_tone_with_five=True
        )
    except PinyinNotFoundException as unknown:
        raise TextError(
            f"{characters[:40]!r}: pypinyin has no reading of {unknown.chars!r}; write it in other "
            "characters"
        ) from None
    return [symbol for syllable in read for symbol in initial_and_final(syllable)]


@functools.cache
def initial_and_final(syllable: str) -> tuple[str, ...]:
    """Return the initial, if there is one, and the final of a syllable with its tone ("zhong1")."""
    from pypinyin.contrib.tone_convert import to_finals_tone3, to_initials

    initial = to_initials(syllable, strict=True)
    final = to_finals_tone3(syllable, strict=True, neutral_tone_with_five=True)
    if not final:  # m, n and ng alone, as in 嗯, or after h
        initial, final = ("h" if syllable[0] == "h" else ""), syllable.removeprefix("h")
    return (initial, final) if initial else (final,)
