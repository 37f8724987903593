"""Text → phoneme ids: spoken form (`dcar.text.spoken`), American English pronunciations (gruut), a closed inventory.

Choices, for a small TTS model:
* one symbol a phoneme, stress folded into the vowel ("ˈæ" is one symbol), so that text stays short and a vowel's
  stress can not be separated from it;
* primary stress is kept, secondary stress is written as none: vowel quality already tells the two apart, and the
  rarest secondary vowels occur some hundred times in a lexicon of 124 000 words, too few to learn from hours of speech;
* a space between words, and the phrase marks `, . ? !`; every utterance ends in one of the last three (a full stop is
  added), which tells the decoder where speech ends;
* 61 symbols in a fixed order, id 0 is padding. The version string is stored with prepared data and models.

Words come from gruut's lexicon (homographs by part of speech), possessives from their base word, everything else from
gruut's grapheme-to-phoneme model. Nothing is downloaded. gruut is imported at the first call (0.6 s).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import sqlite3
import threading
from pathlib import Path
from typing import Any

from dcar.errors import AssetError, TextError
from dcar.text import spoken

PAD, WORD_BOUNDARY = "<pad>", " "
PHRASE_MARKS = (",", ".", "?", "!")
_CONSONANTS = (
    "b", "d", "d͡ʒ", "f", "h", "j", "k", "l", "m", "n", "p", "s", "t", "t͡ʃ", "v", "w", "z", "ð", "ŋ", "ɡ", "ɹ", "ʃ", "ʒ",
    "θ",
)  # fmt: skip
_VOWELS = ("aɪ", "aʊ", "eɪ", "i", "oʊ", "u", "æ", "ɑ", "ɔ", "ɔɪ", "ə", "ɚ", "ɛ", "ɪ", "ʊ", "ʌ")
# gruut never stresses the schwa, so there is no "ˈə".
_STRESSED = tuple("ˈ" + v for v in _VOWELS if v != "ə")
PHONEMES: tuple[str, ...] = (PAD, WORD_BOUNDARY, *PHRASE_MARKS, *_CONSONANTS, *_VOWELS, *_STRESSED)
TEXT_VOCAB_SIZE = len(PHONEMES)
PHONEME_VERSION = (
    f"dcar-en-us-1.{spoken.NORMALIZATION_VERSION}-{hashlib.sha256('|'.join(PHONEMES).encode()).hexdigest()[:8]}"
)
TEXT_TOKENIZER = "text-tokenizer:"  # begins the name of an inventory that is a language model's own tokenizer
MAX_CHARACTERS = 1000
MAX_PHONEMES = 1000

_IDS = {symbol: i for i, symbol in enumerate(PHONEMES)}
_SIBILANTS = frozenset({"s", "z", "ʃ", "ʒ", "t͡ʃ", "d͡ʒ"})
_VOICELESS = frozenset({"p", "t", "k", "f", "θ"})


class _Pronouncer:
    """gruut's lexicon, part-of-speech tagger and grapheme-to-phoneme model, in memory, with a lock around the
    models."""

    def __init__(self) -> None:
        folder = _gruut_data()
        rows = sqlite3.connect(f"file:{folder / 'lexicon.db'}?mode=ro", uri=True)
        try:
            # The file has no index: one full read (0.2 s) is cheaper than a scan of 5 ms for each new word.
            self._lexicon: dict[str, dict[str, str]] = {}
            for word, phonemes, role in rows.execute(
                "SELECT word, phonemes, role FROM word_phonemes ORDER BY word, pron_order"
            ):
                self._lexicon.setdefault(word, {}).setdefault(role, phonemes)
        finally:
            rows.close()
        self._folder = folder
        self.lock = threading.Lock()
        self._tagger: Any = None
        self._guesser: Any = None

    def __contains__(self, word: str) -> bool:
        return word in self._lexicon

    def tags(self, words: list[str]) -> list[str]:
        """Penn part-of-speech tags of the words and marks of one sentence."""
        with self.lock:
            if self._tagger is None:
                from gruut.pos import PartOfSpeechTagger

                self._tagger = PartOfSpeechTagger(self._folder / "pos" / "model.crf")
            return list(self._tagger(words))

    def pronounce(self, word: str, tag: str) -> list[str]:
        """gruut phonemes of one word, with gruut's stress marks."""
        if len(word) == 1 and word.isupper():
            tag = "letter"
        found = self._find(word.lower(), tag)
        if found is None and (m := re.fullmatch(r"(.+)'s", word, re.IGNORECASE)):
            base = self.pronounce(m[1], tag)
            ending = ["ɪ", "z"] if base[-1] in _SIBILANTS else ["s"] if base[-1] in _VOICELESS else ["z"]
            return base + ending
        if found is None:
            found = self._guess(word.lower().replace("'", ""))
        if not found:
            raise TextError(f"no pronunciation for the word {word!r}; spell it as it is said")
        return found

    def _find(self, word: str, tag: str) -> list[str] | None:
        roles = self._lexicon.get(word) or self._lexicon.get(word.replace("'", ""))
        if roles is None:
            return None
        # the lexicon knows a few coarse roles; "they record" is tagged VBP, "had read" VBN
        coarse = "VBD" if tag == "VBN" else tag[:2]
        tried = (f"gruut:{tag}", f"gruut:{coarse}", "", *roles)
        return next(roles[role] for role in tried if role in roles).split()

    @functools.lru_cache(maxsize=65536)  # noqa: B019  (one pronouncer lives as long as the process)
    def _guess(self, word: str) -> list[str]:
        with self.lock:
            if self._guesser is None:
                from gruut.g2p import GraphemesToPhonemes

                self._guesser = GraphemesToPhonemes(self._folder / "g2p" / "model.crf")
            return [p for p in self._guesser(word) if p]


def _gruut_data() -> Path:
    for package in ("gruut", "gruut_lang_en"):
        if importlib.util.find_spec(package) is None:
            raise AssetError(f"the phoneme package {package} is not installed; run: pip install 'gruut==2.4.0'")
    spec = importlib.util.find_spec("gruut_lang_en")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    missing = [f for f in ("lexicon.db", "pos/model.crf", "g2p/model.crf") if not (folder / f).is_file()]
    if missing:
        raise AssetError(f"{folder}: {', '.join(missing)} missing; run: pip install --force-reinstall gruut_lang_en")
    return folder


_pronouncer_lock = threading.Lock()
_pronouncer: _Pronouncer | None = None


def _shared_pronouncer() -> _Pronouncer:
    global _pronouncer
    with _pronouncer_lock:
        if _pronouncer is None:
            _pronouncer = _Pronouncer()
        return _pronouncer


def in_lexicon(word: str) -> bool:
    """Whether the lexicon has a lower-case word; other words get a predicted pronunciation."""
    return word in _shared_pronouncer()


def _forget_locks() -> None:
    """A forked child may inherit a lock that another thread of the parent held: give it fresh ones."""
    global _pronouncer_lock
    _pronouncer_lock = threading.Lock()
    if _pronouncer is not None:
        _pronouncer.lock = threading.Lock()


def _check(text: str, max_characters: int) -> str:
    if not isinstance(text, str):
        raise TextError(f"text must be a string, got {type(text).__name__}")
    if not text.strip():
        raise TextError("text is empty; give at least one English word")
    if len(text) > max_characters:
        raise TextError(
            f"text has {len(text)} characters, the limit is {max_characters}: {text[:40]!r}…; split it into sentences"
        )
    return text


def normalize_text(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Spoken form of `text`: numbers, dates, money, abbreviations as words; marks `, . ? !` (see `dcar.text.spoken`).

    Raises TextError for empty or unspeakable text, for other scripts, and beyond `max_characters`.
    """
    return spoken.expand(_check(text, max_characters), _shared_pronouncer().__contains__)


class Phonemizer:
    """Text → list of symbols of PHONEMES; thread-safe; raises TextError (what is wrong and how to repair it)."""

    def __init__(self, max_characters: int = MAX_CHARACTERS, max_phonemes: int = MAX_PHONEMES) -> None:
        self.max_characters = max_characters
        self.max_phonemes = max_phonemes

    def __call__(self, text: str) -> list[str]:
        symbols = self.phonemize_normalized(normalize_text(text, self.max_characters))
        if len(symbols) > self.max_phonemes:
            raise TextError(f"text has {len(symbols)} phonemes, the limit is {self.max_phonemes}: {text[:40]!r}…; "
                            "split it into sentences")
        return symbols

    def phonemize_normalized(self, spoken_text: str) -> list[str]:
        """Phonemes of text that `normalize_text` returned."""
        pronouncer = _shared_pronouncer()
        symbols: list[str] = []
        for sentence in re.findall(r"[^.?!]+[.?!]?", spoken_text):
            tokens = re.findall(r"[A-Za-z']+|[,.?!]", sentence)
            for token, tag in zip(tokens, pronouncer.tags(tokens), strict=True):
                if token in PHRASE_MARKS:
                    symbols.append(token)
                    continue
                if symbols:
                    symbols.append(WORD_BOUNDARY)
                symbols += [_symbol(p) for p in pronouncer.pronounce(token, tag)]
        if symbols[-1] not in ".?!":
            symbols.append(".")
        return symbols


def _symbol(gruut_phoneme: str) -> str:
    symbol = gruut_phoneme.replace("ˌ", "")
    symbol = {"ˈə": "ˈʌ", "g": "ɡ", "r": "ɹ"}.get(symbol, symbol)
    if symbol not in _IDS:
        raise TextError(f"gruut gave the phoneme {gruut_phoneme!r}, which is not in the inventory {PHONEME_VERSION}")
    return symbol


def encode_phonemes(phonemes: list[str]) -> list[int]:
    """Ids in PHONEMES; raises TextError naming a symbol that is not in the inventory."""
    try:
        return [_IDS[p] for p in phonemes]
    except KeyError as error:
        raise TextError(f"phoneme {error.args[0]!r} is not in the inventory {PHONEME_VERSION}") from None


@functools.lru_cache(maxsize=16384)
def _cached_ids(text: str) -> tuple[int, ...]:
    return tuple(encode_phonemes(Phonemizer()(text)))


def text_to_ids(text: str) -> list[int]:
    """Phoneme ids of `text` (a fresh list; results are cached). Raises TextError."""
    return list(_cached_ids(_check(text, MAX_CHARACTERS)))


os.register_at_fork(after_in_child=_forget_locks)
