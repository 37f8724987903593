"""Text to phonemes: what is written is read as a person would, always the same, or refused with
a reason."""

import hashlib
import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcar.errors import TextError
from dcar.prepare.prepared import load_prepared
from dcar.sources.shipped import shipped
from dcar.text.common import MAX_CHARACTERS, MAX_UNITS
from dcar.text.english import phonemes as text_module
from dcar.text.english.inventory import PHONEME_VERSION, PHONEMES, TEXT_VOCAB_SIZE
from dcar.text.english.numbers import cardinal, ordinal, year
from dcar.text.english.phonemes import (
    encode_phonemes,
    normalize_text,
    phonemes_of,
    text_to_ids,
)
from dcar.text.wer import word_errors


def readings() -> list:
    """(written, said) of the table beside this file, named by section."""
    rows, section = [], ""
    for line in (Path(__file__).parent / "spoken_cases.tsv").read_text().splitlines():
        if line.startswith("# "):
            section = line[2:].split(" <tab>")[0].replace(" ", "-")
        else:
            written, said = line.split("\t")
            rows.append(pytest.param(written, said, id=f"{section}: {written}"))
    return rows


@pytest.mark.parametrize(("written", "said"), readings())
def test_reading(written: str, said: str):
    assert normalize_text(written) == said


def test_the_texts_that_shipped_models_were_trained_and_scored_on_are_read_as_then():
    """The prepared corpus keeps the ids of the day it was made; a rule that changes one voids
    models and scores."""
    kept = {
        row["text"]: row["text_ids"]
        for split in ("train", "dev", "test")
        for row in load_prepared(shipped("prepared"), split).select_columns(["text", "text_ids"])
    }
    sentences = (
        (Path(text_module.__file__).parents[3] / "launch/starter/sentences.txt")
        .read_text()
        .splitlines()
    )
    assert len(kept) > 2000 and set(sentences) <= set(kept)
    assert [text for text, ids in kept.items() if text_to_ids(text) != ids] == []


@pytest.mark.parametrize(
    ("message", "texts"),
    [
        ("empty", ["", "   ", "\n", "😀🎉", "...", "-", "?!", "'", "()"]),
        (
            "letters",
            ["привет", "你好 world", "hello こんにちは", "Ελλάδα", "שלום"],
        ),  # refused, not dropped
    ],
)
def test_nothing_to_say_and_other_scripts(message, texts):
    for bad in texts:
        with pytest.raises(TextError, match=message):
            text_to_ids(bad)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        *((f"co{c}operate", "cooperate") for c in "\u00ad\u200b\u200c\u200d\u200e\u200f\u034f"),
        *((f"co{c}operate", "cooperate") for c in "\u202a\u2060\u2063\ufe0f\ufeff\U000e0001\b\x9d"),
        ("12\u2007345 people", "twelve thousand three hundred forty five people"),
        ("at 9\u202fAM", "at nine A M"),
        ("one\u2007two\u202fthree\x85four\x0bfive\x1dsix", "one two three four five six"),
        ("\x1b[1;31mthirty one \x1b[0mThe\x9b1m end", "thirty one The end"),
        ("\x1b]8;;http://x.org\x1b\\a link\x1b]8;;\x07 \x1b(Bhere\x1b", "a link here"),
    ],
)
def test_characters_that_are_not_seen_are_not_read(written, said):
    assert normalize_text(written) == said
    assert word_errors(written, said).errors == 0


def test_text_in_utf_16_is_refused():
    for text in ("Her".encode("utf-16-le").decode(), "an\0end"):
        with pytest.raises(TextError, match="NUL .*UTF-16"):
            text_to_ids(text)


def test_too_long():
    for message, ask in (
        (f"2000 characters.* {MAX_CHARACTERS}", lambda: text_to_ids("word " * 400)),
        (f"phonemes.* {MAX_UNITS}: '1234", lambda: text_to_ids("1234567890 " * 50)),
    ):
        with pytest.raises(TextError, match=message):
            ask()


def test_inventory_is_closed_and_fixed():
    assert TEXT_VOCAB_SIZE == len(set(PHONEMES)) < 128
    assert PHONEMES[:6] == ("<pad>", " ", ",", ".", "?", "!")
    # Changing order or content makes every prepared corpus and checkpoint unreadable: do it on
    # purpose.
    assert PHONEME_VERSION == "dcar-en-us-1.1-49ede24c"
    assert encode_phonemes(list(PHONEMES)) == list(range(TEXT_VOCAB_SIZE))


def test_how_numbers_are_said_does_not_change():
    """Another reading makes other phonemes of the same text, and other word errors: do it on
    purpose."""
    numbers = [
        *range(2200),
        *(7**n % 10**15 for n in range(4, 60)),
        *(10**n - 1 for n in range(4, 16)),
        *(10**n for n in range(4, 15)),
    ]
    said = "\n".join(f"{cardinal(n)} {ordinal(n)} {year(n) if n < 10_000 else ''}" for n in numbers)
    assert hashlib.sha256(said.encode()).hexdigest()[:16] == "5fbbae763871f5eb"


def test_every_phoneme_of_the_lexicon_is_in_the_inventory():
    seen = {
        p
        for roles in text_module._lexicon().values()
        for word in roles.values()
        for p in word.split()
    }
    assert {text_module._symbol(p) for p in seen} == set(PHONEMES[6:])


def test_phonemes_words_marks_and_homographs():
    def say(text: str) -> list[str]:
        return phonemes_of(normalize_text(text))

    assert "".join(say("Hello, world")) == "hɛlˈoʊ, wˈɚld."
    assert "".join(say("Is it?")) == "ˈɪz ˈɪt?"
    assert "".join(say("They record a record.")) == "ðˈeɪ ɹɪkˈɔɹd ə ɹˈɛkɚd."
    assert "".join(say("zorblax's")) == "zˈɔɹblˈæksɪz."
    assert "".join(say("plan A")).endswith("ˈeɪ.")


def test_same_ids_from_many_threads_and_a_fresh_list_each_time():
    sentences = [f"The {n}th strange zorblaxian record number {n} was read." for n in range(40)]
    serial = [encode_phonemes(phonemes_of(normalize_text(s))) for s in sentences]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text_to_ids, sentences)) == serial
    text_to_ids(sentences[0]).clear()
    assert text_to_ids(sentences[0]) == serial[0]


def _in_child(sentence: str) -> list[int]:
    return text_to_ids(sentence)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_works_in_a_forked_child_even_if_a_lock_was_held():
    expected = text_to_ids("A forked child speaks.")
    with text_module._lock, multiprocessing.get_context("fork").Pool(1) as pool:
        said = pool.apply_async(_in_child, ("A forked child speaks zorblaxian.",)).get(timeout=20)
    assert said[: len(expected) - 1] == expected[:-1]


def test_import_is_light_and_nothing_touches_the_network():
    code = """
import sys, socket
def refuse(*a, **k): raise AssertionError("network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import dcar.text.english.phonemes
assert not {"gruut", "torch", "datasets"} & set(sys.modules)
print(len(dcar.text.english.phonemes.text_to_ids("Offline, on 3/4/2024 the zorblax costs $5.")))
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert out.returncode == 0 and int(out.stdout) > 40, out.stderr
