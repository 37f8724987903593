"""Phonemes: spoken form of a text (`dcar.text.english.spoken`), American English pronunciations (gruut),
ids of a closed inventory (`dcar.text.english.inventory`).

Words come from gruut's lexicon (homographs by part of speech), possessives from their base word,
everything else from gruut's grapheme-to-phoneme model. Nothing is downloaded. gruut is imported at
the first call (0.6 s).
"""

import contextlib
import functools
import os
import re
import sqlite3
import threading
from pathlib import Path
from typing import Any

from dcar.errors import TextError
from dcar.sources.packages import package_dir, packaged_file
from dcar.text.common import PHRASE_MARKS, WORD_BOUNDARY, check_text, check_units
from dcar.text.english import spoken
from dcar.text.english.inventory import PHONEMES

_IDS = {symbol: i for i, symbol in enumerate(PHONEMES)}
_SIBILANTS = frozenset({"s", "z", "ʃ", "ʒ", "t͡ʃ", "d͡ʒ"})
_VOICELESS = frozenset({"p", "t", "k", "f", "θ"})


_lock = threading.Lock()
"""Lock for gruut's models, which serve one thread at a time."""


def _gruut_file(name: str) -> Path:
    """Return the path of a file of gruut's English models. Raises AssetError if it, or gruut, is
    missing."""
    package_dir("gruut", "pip install 'gruut==2.4.0'")
    return packaged_file("gruut_lang_en", name, None, "pip install --force-reinstall gruut_lang_en")


@functools.cache
def _lexicon() -> dict[str, dict[str, str]]:
    """Return the lexicon: lower-case word -> role -> phonemes separated by spaces."""
    words: dict[str, dict[str, str]] = {}
    file = f"file:{_gruut_file('lexicon.db')}?mode=ro"
    with contextlib.closing(sqlite3.connect(file, uri=True)) as rows:
        # The file has no index: one full read (0.2 s) is cheaper than a scan of 5 ms for each new
        # word.
        for word, phonemes, role in rows.execute(
            "SELECT word, phonemes, role FROM word_phonemes ORDER BY word, pron_order"
        ):
            words.setdefault(word, {}).setdefault(role, phonemes)
    return words


@functools.cache
def _tagger() -> Any:
    from gruut.pos import PartOfSpeechTagger

    return PartOfSpeechTagger(_gruut_file("pos/model.crf"))


@functools.cache
def _guesser() -> Any:
    from gruut.g2p import GraphemesToPhonemes

    return GraphemesToPhonemes(_gruut_file("g2p/model.crf"))


def _tags(words: list[str]) -> list[str]:
    """Return the Penn part-of-speech tags of the words and marks of one sentence."""
    with _lock:
        return list(_tagger()(words))


@functools.lru_cache(maxsize=65536)
def _guess(word: str) -> list[str]:
    with _lock:
        return [p for p in _guesser()(word) if p]


def _find(word: str, tag: str) -> list[str] | None:
    roles = _lexicon().get(word) or _lexicon().get(word.replace("'", ""))
    if roles is None:
        return None
    # the lexicon knows a few coarse roles; "they record" is tagged VBP, "had read" VBN
    coarse = "VBD" if tag == "VBN" else tag[:2]
    tried = (f"gruut:{tag}", f"gruut:{coarse}", "", *roles)
    return next(roles[role] for role in tried if role in roles).split()


def _pronounce(word: str, tag: str) -> list[str]:
    """Return gruut's phonemes of one word, with gruut's stress marks."""
    if len(word) == 1 and word.isupper():
        tag = "letter"
    phonemes = _find(word.lower(), tag)
    if phonemes is None and (m := re.fullmatch(r"(.+)'s", word, re.IGNORECASE)):
        base = _pronounce(m[1], tag)
        if base[-1] in _SIBILANTS:
            return [*base, "ɪ", "z"]
        return [*base, "s" if base[-1] in _VOICELESS else "z"]
    if phonemes is None:
        phonemes = _guess(word.lower().replace("'", ""))
    if not phonemes:
        raise TextError(f"no pronunciation for the word {word!r}; spell it as it is pronounced")
    return phonemes


def in_lexicon(word: str) -> bool:
    """Return whether the lexicon has a lower-case word; other words get a predicted
    pronunciation."""
    return word in _lexicon()


def _forget_lock() -> None:
    """Replace the lock in a forked child, which may inherit one that another thread of the
    parent held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def normalize_text(text: str) -> str:
    """Return the spoken form of `text`: numbers, dates, money, abbreviations as words; marks `, . ?
    !` (see `dcar.text.english.spoken`).

    Raises TextError for empty or unspeakable text, for other scripts, and for more than
    MAX_CHARACTERS.
    """
    return spoken.expand(check_text(text), in_lexicon)


def phonemes_of(spoken_text: str) -> list[str]:
    """Return symbols of PHONEMES for text that `normalize_text` returned. Thread-safe. Raises
    TextError for a word without a pronunciation."""
    symbols: list[str] = []
    for sentence in re.findall(r"[^.?!]+[.?!]?", spoken_text):
        tokens = re.findall(r"[A-Za-z']+|[,.?!]", sentence)
        for token, tag in zip(tokens, _tags(tokens), strict=True):
            if token in PHRASE_MARKS:
                symbols.append(token)
                continue
            if symbols:
                symbols.append(WORD_BOUNDARY)
            symbols += [_symbol(p) for p in _pronounce(token, tag)]
    if symbols[-1] not in ".?!":
        symbols.append(".")
    return symbols


def _symbol(gruut_phoneme: str) -> str:
    symbol = gruut_phoneme.replace("ˌ", "")
    return {"ˈə": "ˈʌ", "g": "ɡ", "r": "ɹ"}.get(symbol, symbol)


def encode_phonemes(phonemes: list[str]) -> list[int]:
    """Return the ids of phonemes in PHONEMES."""
    return [_IDS[p] for p in phonemes]


@functools.lru_cache(maxsize=16384)
def _cached_ids(text: str) -> tuple[int, ...]:
    symbols = phonemes_of(normalize_text(text))
    check_units(len(symbols), "phonemes", text)
    return tuple(encode_phonemes(symbols))


def text_to_ids(text: str) -> list[int]:
    """Return the phoneme ids of `text` (a fresh list; results are cached). Raises TextError that
    says what is wrong and how to repair it."""
    return list(_cached_ids(check_text(text)))
