"""Texts laid along tokens: phonemes are found where they were spoken, and nothing is said where
they cannot be."""

import itertools

import numpy as np

from dcar.text.english.phonemes import text_to_ids
from dcar.text.units import units_for
from dcar.tokens.alignment import PhonemeAligner, phoneme_states

TEXTS = ["the cat sat", "a dog ran", "we sat on a mat", "the dog sat", "no cat ran on", "we ran"]


def spoken(text: str, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """A made-up speaker says phoneme p as the code p, for two to five tokens; codes, and where
    each phoneme begins."""
    codes, starts = [], []
    for state in phoneme_states(text_to_ids(text)).tolist():
        starts.append(len(codes))
        codes += [state] * int(rng.integers(2, 6))
    return codes, starts


def test_phonemes_are_found_where_they_were_spoken():
    rng = np.random.default_rng(0)
    said = [spoken(text, rng) for text in TEXTS]
    aligner = PhonemeAligner.fit(
        [codes for codes, _ in said], TEXTS, vocab_size=61, units=units_for()
    )
    codes, starts = said[0]
    spans = aligner.align(codes, TEXTS[0])
    assert [s.phoneme for s in spans if s.phoneme] == ["ð", "ə", "k", "ˈæ", "t", "s", "ˈæ", "t"]
    assert [s.start for s in spans] == starts and spans[-1].end == len(codes)
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))


def test_marks_are_silence():
    codes, _ = spoken("the cat sat", np.random.default_rng(0))
    aligner = PhonemeAligner.fit([codes], ["the cat sat"], vocab_size=61, units=units_for())
    names = [s.phoneme for s in aligner.align(codes, "the cat, sat.")]
    assert names == ["", "ð", "ə", "k", "ˈæ", "t", "", "s", "ˈæ", "t", ""]


def test_what_cannot_be_laid_along_is_left_out():
    codes, _ = spoken("the cat sat", np.random.default_rng(0))
    assert PhonemeAligner.fit([[1, 2]], ["the cat sat"], 61, units_for()) is None
    assert PhonemeAligner.fit([codes], ["你好"], 61, units_for()) is None
    aligner = PhonemeAligner.fit([codes, [1]], ["the cat sat", "the"], 61, units_for())
    assert aligner.align([1, 2], "the cat sat") == [] and aligner.align(codes, "…") == []
