"""Normaliser cases and error counts against jiwer on fixed pairs."""

import math

import jiwer
import pytest

from dcar.errors import TextError
from dcar.text.wer import (
    NORMALIZER,
    character_errors,
    corpus_wer,
    normalize_transcript,
    score_corpus,
    spoken_words,
    word_costs,
    word_errors,
)

PAIRS = [
    ("the cat sat on the mat", "the cat sat on the mat"), ("the cat sat on the mat", "a cat sat the mat today"),
    ("one two three", "three two one"), ("please wipe your boots", "please white boots now please"),
    ("a b c d", "x y"), ("hello", "hello hello hello")]


@pytest.mark.parametrize(("reference", "hypothesis"), PAIRS)
def test_counts_equal_jiwer(reference, hypothesis):
    ours, theirs = word_errors(reference, hypothesis), jiwer.process_words(reference, hypothesis)
    for kind in ("substitutions", "deletions", "insertions"):
        assert getattr(ours, kind) == getattr(theirs, kind)
    assert ours.rate == pytest.approx(theirs.wer)
    assert character_errors(reference, hypothesis).rate == pytest.approx(jiwer.cer(reference, hypothesis))


def test_corpus_rate_is_of_sums_not_a_mean():
    score = score_corpus([r for r, _ in PAIRS], [h for _, h in PAIRS])
    assert score.wer == pytest.approx(jiwer.wer([r for r, _ in PAIRS], [h for _, h in PAIRS]))
    assert score.normalizer == NORMALIZER
    assert score.reference_words == sum(len(r.split()) for r, _ in PAIRS)
    assert [u.errors for u in score.utterances if u] == [word_errors(*pair).errors for pair in PAIRS]
    cer = corpus_wer([character_errors(*pair) for pair in PAIRS])
    assert cer.wer == pytest.approx(jiwer.cer([r for r, _ in PAIRS], [h for _, h in PAIRS]))


def test_missing_and_empty_transcripts_differ():
    score = score_corpus(["one two", "three four", "five"], ["one two", "", None])
    assert score.coverage == pytest.approx(2 / 3)
    assert (score.deletions, score.reference_words, score.empty) == (2, 4, 1)
    assert score.utterances[2] is None
    assert math.isnan(corpus_wer([None]).wer)


def test_empty_reference_is_an_error():
    with pytest.raises(TextError, match="no words"):
        word_errors("… !", "anything")


@pytest.mark.parametrize(("one", "other"), [
    ("20 apples", "twenty apples"),
    ("1,234 steps", "one thousand two hundred and thirty-four steps"),
    ("two hundred and five", "205"),
    ("in 1905 and 2021", "in nineteen oh five and twenty twenty-one"),
    ("the 1990s", "the nineteen nineties"),
    ("the 21st", "the twenty-first"),
    ("3.14", "three point one four"),
    ("$5.50", "five dollars fifty cents"),
    ("£1", "one pound"),
    ("$1,250", "one thousand two hundred fifty dollars"),
    ("1,000.5", "one thousand point five"),
    ("50%", "fifty per cent"),
    ("at 3:05 p.m.", "at three oh five PM"),
    ("10 o'clock", "ten o’clock"),
    ("Don't, won't; can't!", "do not will not cannot"),
    ("They're here. It's ours. I'm in.", "they are here it is ours i am in"),
    ("My favourite coloured grey theatre", "my favorite colored gray theater"),
    ("organised, analysing, travelling", "organized analyzing traveling"),
    ("OK, alright", "okay all right"),
    ("Mr. Smith & Dr. Jones", "mister smith and doctor jones"),
    ("well-known café", "well known cafe"),
    ("John's dog", "Johns dog"),
])
def test_spellings_of_the_same_speech_are_equal(one: str, other: str):
    assert normalize_transcript(one) == normalize_transcript(other)


def test_other_words_are_left_alone():
    for text in ("four hours of our tour", "cats and dogs", "five and six", "metro centers", "hundred and counting"):
        assert normalize_transcript(text) == text


@pytest.mark.parametrize("text", ["", "¿?…", "'''", "- -", "$", "12345678901234567890", "0:99 7%%", "1:23:45", "²½"])
def test_normaliser_never_raises_and_is_idempotent(text: str):
    once = normalize_transcript(text)
    assert normalize_transcript(once) == once


def test_spoken_words_keep_contractions_for_acoustic_targets():
    assert spoken_words("Don’t stop—it's 7!") == "don't stop it's seven"


@pytest.mark.parametrize(("heard", "wrong"), [
    ("the cat sat", {}), ("the hat sat", {"cat": 1}), ("cat sat", {"the": 1}), ("", {"the": 1, "cat": 1, "sat": 1}),
    ("The CAT, sat!", {}),
])
def test_words_that_are_wrong_cost_one_each_spread_over_their_letters(heard, wrong):
    costs = word_costs("The cat sat.", heard)
    assert len(costs) == len("the cat sat") and costs[3] == costs[7] == 0
    for word, place in (("the", 0), ("cat", 4), ("sat", 8)):
        assert costs[place : place + 3] == pytest.approx([wrong.get(word, 0) / 3] * 3)
    assert costs.sum() == pytest.approx(word_errors("The cat sat.", heard).errors)


def test_words_that_nobody_said_cost_at_the_letter_before_them():
    assert word_costs("a cat", "a big fat cat").tolist() == [2, 0, 0, 0, 0]
    assert word_costs("a cat", "oh a cat it is").tolist() == [1, 0, 0, 0, 2]
    with pytest.raises(TextError, match="no words"):
        word_costs("…", "a")
