"""Units: what a decoder reads of a text.

`units_for("es")` returns phonemes (English by `dcar.text.english`, Mandarin by
`dcar.text.mandarin`, fourteen other languages by gruut), `Characters` reads any language with an
inventory that is collected from a corpus; language models bring a tokenizer of their own
(`dcar.model.backbones.causal_lm`). Corpora and models carry the name of their units, and an
inventory that was collected.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dcar.errors import AssetError, CheckpointError, ConfigError, TextError
from dcar.sources.packages import packaged_file
from dcar.text.base import SymbolUnits, closed, inventory_digest, written
from dcar.text.common import (
    FIRST,
    PHRASE_MARKS,
    WORD_BOUNDARY,
    check_text,
    check_units,
    without_invisible,
)
from dcar.text.language import Language
from dcar.text.languages import DEFAULT, WITH_PHONEMES, language_of

KINDS = ("phonemes", "characters")
TEXT_TOKENIZER = "text-tokenizer:"
"""Begins the name of units that are the tokens of a language model."""
UNITS_FILE = "text_units.json"
"""In the folder of a decoder whose inventory was collected from a corpus."""


class EnglishPhonemes(SymbolUnits):
    """American English phonemes, see `dcar.text.english.phonemes`."""

    languages = ("en",)

    def __init__(self) -> None:
        from dcar.text.english import inventory

        self.name, self.symbols = inventory.PHONEME_VERSION, inventory.PHONEMES

    def __call__(self, text: str) -> list[int]:
        from dcar.text.english.phonemes import text_to_ids

        return text_to_ids(text)

    def spoken(self, text: str) -> str:
        from dcar.text.english.phonemes import normalize_text

        return normalize_text(text)

    def sentences(self, text: str, language: Language) -> list[str]:
        read = re.split(r"(?<=[.?!])\s+", self.spoken(text))
        return [sentence.strip() for sentence in read if re.search(r"\w", sentence)]

    def length(self, text: str) -> int:
        from dcar.text.english.phonemes import phonemes_of

        return len(phonemes_of(text))


class GruutPhonemes(SymbolUnits):
    """Phonemes of another language by gruut (MIT): its lexicon, its guesses for other words, its
    reading of numbers and dates.

    The inventory consists of FIRST and all phonemes of lexicon and guesses, stress included, sorted.
    """

    def __init__(self, code: str) -> None:
        self.code, self.languages = code, (code,)
        # gruut's lexicon can only be read by the thread that opened it
        self._own = threading.local()
        module, pip = f"gruut_lang_{code}", f"pip install 'gruut[{code}]'"
        try:
            files = [
                packaged_file(module, name, None, pip) for name in ("lexicon.db", "g2p/model.crf")
            ]
        except AssetError as missing:
            raise AssetError(
                f"phonemes of {language_of(code).name} need a package of gruut ({missing}); or "
                "set units=characters"
            ) from None
        found = _lexicon_symbols(files[0]) | _guessed_symbols(files[1])
        self.symbols = (*FIRST, *sorted(found - set(FIRST)))
        self.name = f"gruut-{code}-{inventory_digest(self.symbols)}"

    def _processor(self) -> Any:
        if not hasattr(self._own, "processor"):
            from gruut.text_processor import TextProcessor

            self._own.processor = TextProcessor(default_lang=self.code)
        return self._own.processor

    def _read(self, text: str) -> list[list[tuple[str, list[str]]]]:
        """Return the words and marks of every sentence, each with its phonemes; a mark is one of
        PHRASE_MARKS and has none."""
        # the marks of other scripts, and a blank after those that gruut does not split off
        text = unicodedata.normalize("NFC", without_invisible(check_text(text))).translate(_MARKS)
        text = re.sub(r"\s*(?:\.{2,}|[—–]+(?=\s))", ", ", text)
        sentences = []
        processor = self._processor()
        graph, root = processor(text, lang=self.code)
        for sentence in processor.sentences(graph, root):
            words: list[tuple[str, list[str]]] = []
            for word in sentence.words:
                if word.is_major_break or word.is_minor_break:
                    mark = word.text if word.text in PHRASE_MARKS else ","
                    if words and words[-1][0] not in PHRASE_MARKS:
                        words.append((mark, []))
                elif word.phonemes and any(c.isalnum() for c in word.text):
                    words.append((word.text, list(word.phonemes)))
            if any(phonemes for _, phonemes in words):
                sentences.append(words)
        if not sentences:
            raise TextError(
                f"{text[:40]!r}: no word that can be pronounced in {language_of(self.code).name}"
            )
        return sentences

    def spoken(self, text: str) -> str:
        return " ".join(self.sentences(text, language_of(self.code)))

    def sentences(self, text: str, language: Language) -> list[str]:
        said = []
        for words in self._read(text):
            line = "".join(w if w in PHRASE_MARKS and not p else f" {w}" for w, p in words).strip()
            said.append(line if line[-1] in PHRASE_MARKS[1:] else f"{line.rstrip(',')}.")
        return said

    def length(self, text: str) -> int:
        return len(self(text))

    def __reduce__(self) -> Any:
        return units_for, (self.code,)

    def __call__(self, text: str) -> list[int]:
        return list(_gruut_ids(self, check_text(text)))


@functools.lru_cache(maxsize=16384)
def _gruut_ids(units: GruutPhonemes, text: str) -> tuple[int, ...]:
    """Return the ids of a text, with a boundary between words and a mark at the end."""
    ids, symbols = units.ids, list[str]()
    for words in units._read(text):
        for word, phonemes in words:
            if phonemes and symbols:
                symbols.append(WORD_BOUNDARY)
            symbols += phonemes or [word]
    symbols = closed(symbols)
    check_units(len(symbols), "phonemes", text)
    if unknown := sorted(set(symbols) - ids.keys()):
        raise TextError(
            f"{text[:40]!r}: phonemes {unknown} are not in the inventory of {units.name}"
        )
    return tuple(ids[symbol] for symbol in symbols)


_MARKS = str.maketrans("。！？、，；：؟،؛।…", ".!?,,;:?,;..")


def _lexicon_symbols(file: Path) -> set[str]:
    """Return all phonemes of one of gruut's lexicons (a second of reading for the largest)."""
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as rows:
        found: set[str] = set()
        for (phonemes,) in rows.execute("SELECT phonemes FROM word_phonemes"):
            found.update(phonemes.split())
    return found


def _guessed_symbols(file: Path) -> set[str]:
    """Return all phonemes that a model of gruut can guess, which are its labels."""
    import pycrfsuite

    tagger = pycrfsuite.Tagger()
    tagger.open(str(file))
    labels = (base64.b64decode(label).decode() for label in tagger.labels())
    return {symbol for label in labels for symbol in label.split("|") if symbol != "_"}


class Characters(SymbolUnits):
    """Characters of a corpus' texts (NFC), for any language. Texts end in a mark, as with phonemes;
    numbers stay digits."""

    def __init__(self, symbols: Sequence[str], languages: Sequence[str]) -> None:
        self.symbols, self.languages = tuple(symbols), tuple(languages)
        self.name = f"characters-{'+'.join(languages)}-{inventory_digest(symbols)}"

    def stored(self) -> dict[str, list[str]]:
        """Return what a file keeps of it, the arguments of its class."""
        return {"symbols": list(self.symbols), "languages": list(self.languages)}

    @classmethod
    def collected(cls, texts: Iterable[str], languages: Sequence[str]) -> Characters:
        """Return the units with all characters of `texts`, sorted."""
        found = {c for text in texts for c in written(text, "")}
        return cls((*FIRST, *sorted((found | {"。"}) - set(FIRST))), sorted(languages))

    def spoken(self, text: str) -> str:
        return written(check_text(text), language_of(self.languages[0]).full_stop)

    def __call__(self, text: str) -> list[int]:
        written, ids = self.spoken(text), self.ids
        if unknown := sorted(set(written) - ids.keys()):
            raise TextError(
                f"{text[:40]!r}: no text of the corpus has the characters {unknown}; write it "
                "without them"
            )
        return [ids[c] for c in written]


def units_for(language: str = DEFAULT) -> SymbolUnits:
    """Return the phonemes of a language. Raises TextError for an unknown language, ConfigError for
    one without phonemes and AssetError if its package is missing, which name what to do."""
    return _phonemes_of(language_of(language).code)


@functools.cache
def _phonemes_of(code: str) -> SymbolUnits:
    if code == "en":
        return EnglishPhonemes()
    if code == "zh":
        from dcar.text.mandarin import MandarinPhonemes

        return MandarinPhonemes()
    if code not in WITH_PHONEMES:
        raise ConfigError(
            f"language={code}: {language_of(code).name} has no phonemes here, only "
            f"{', '.join(WITH_PHONEMES)} have; set units=characters, or convert a language "
            "model, which reads text by its own tokenizer"
        )
    return GruutPhonemes(code)


def default_kind(language: str) -> str:
    """Return the kind of units of a language: phonemes where it has them, else characters."""
    return "phonemes" if language_of(language).code in WITH_PHONEMES else "characters"


def is_phonemes(name: str) -> bool:
    """Return True for the name of an inventory of phonemes."""
    return not name.startswith((TEXT_TOKENIZER, "characters-"))


def units_named(name: str, folder: str | Path | None = None) -> SymbolUnits:
    """Return the units that a corpus or model carries the name of.

    folder: that of a decoder, with its inventory of characters. Raises CheckpointError if the
    file is missing, or if this version or an installed package has other units.
    """
    if name.startswith("characters-"):
        file = Path(folder or "") / UNITS_FILE
        try:
            units: SymbolUnits = Characters(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{file}: the inventory of {name} is missing or broken ({error}); copy the folder "
                "again from its origin"
            ) from error
    else:
        others = name.startswith(("gruut-", "pinyin-"))
        units = units_for(name.split("-")[1] if others else DEFAULT)
    if units.name != name:
        raise CheckpointError(
            f"{folder or 'the model'}: its texts are read as {name}, but this version and the "
            f"installed packages have {units.name}; prepare or train it again"
        )
    return units
