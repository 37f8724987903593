"""Normaliser cases and error counts against jiwer on fixed pairs."""

import math
import re
from pathlib import Path

import jiwer
import pytest

from dcar.errors import TextError
from dcar.prompts.texts import read_texts
from dcar.text.english import readings
from dcar.text.english.phonemes import normalize_text
from dcar.text.english.readings import closest_readings, normalize_transcript, spoken_words
from dcar.text.wer import character_errors, corpus_wer, word_costs, word_errors

PAIRS = [
    ("the cat sat on the mat", "the cat sat on the mat"),
    ("the cat sat on the mat", "a cat sat the mat today"),
    ("one two three", "three two one"),
    ("please wipe your boots", "please white boots now please"),
    ("a b c d", "x y"),
    ("hello", "hello hello hello"),
]


@pytest.mark.parametrize(("reference", "hypothesis"), PAIRS)
def test_counts_equal_jiwer(reference, hypothesis):
    ours, theirs = word_errors(reference, hypothesis), jiwer.process_words(reference, hypothesis)
    for kind in ("substitutions", "deletions", "insertions"):
        assert getattr(ours, kind) == getattr(theirs, kind)
    assert ours.rate == pytest.approx(theirs.wer)
    assert character_errors(reference, hypothesis).rate == pytest.approx(
        jiwer.cer(reference, hypothesis)
    )


def test_corpus_rate_is_of_sums_not_a_mean():
    references, heard = map(list, zip(*PAIRS, strict=True))
    score = corpus_wer([word_errors(*pair) for pair in PAIRS])
    assert score.wer == pytest.approx(jiwer.wer(references, heard))
    assert score.reference_words == sum(len(r.split()) for r in references)
    cer = corpus_wer([character_errors(*pair) for pair in PAIRS])
    assert cer.wer == pytest.approx(jiwer.cer(references, heard))


def test_missing_and_empty_transcripts_differ():
    errors = [word_errors("one two", "one two"), word_errors("three four", ""), None]
    score = corpus_wer(errors)
    assert score.coverage == pytest.approx(2 / 3)
    assert (score.deletions, score.reference_words) == (2, 4)
    assert math.isnan(corpus_wer([None]).wer)


def test_empty_reference_is_an_error():
    with pytest.raises(TextError, match="reference '…"):
        word_errors("… !", "anything")


def sound_alikes(kind: str) -> list[list[str]]:
    """Pairs of the table next to this file: "=" sound alike, "!" do not."""
    rows = [
        line.split("\t")
        for line in (Path(__file__).parent / "sound_alikes.tsv").read_text().splitlines()
    ]
    return [row[1:] for row in rows if row[0] == kind]


def test_spellings_cost_nothing_where_they_sound_alike_and_only_there():
    alike, different = sound_alikes("="), sound_alikes("!")
    assert len(alike) > 200 and len(different) > 50
    both_ways = [pair for one, other in alike for pair in ((one, other), (other, one))]
    assert [pair for pair in both_ways if word_errors(*pair).errors] == []
    assert [
        pair
        for pair in different
        if not (word_errors(*pair).errors and word_errors(*pair[::-1]).errors)
    ] == []


def test_a_reference_counts_the_same_words_against_every_hypothesis():
    for reference, hypotheses in (
        ("at 11:00", ("at 11", "at eleven", "at eleven hundred hours", "no", "", "x y z")),
        ("she's gone", ("she has gone", "shes gone")),
        ("1,500", ("fifteen hundred", "15")),
    ):
        words = normalize_transcript(reference).split()
        assert {word_errors(reference, heard).reference_words for heard in hypotheses} == {
            len(words)
        }
        assert {character_errors(reference, heard).reference_words for heard in hypotheses} == {
            len(" ".join(words))
        }
        assert word_errors(reference, "").deletions == len(words)


def test_of_several_readings_the_nearest_is_compared():
    assert (
        closest_readings("flight 217 to Rome", "flight to seventeen to rome")[0]
        == "flight two seventeen to rome"
    )
    assert (
        closest_readings("at 11:00 on May 5", "at eleven hundred on the fifth of may")
        == ("at eleven hundred on the fifth of may",) * 2
    )
    assert word_errors("Call 911.", "call nine one two").errors == 1
    assert word_errors("the FBI", "the f b eye").errors == 1
    assert closest_readings("it is 5", "at is five")[0] == "it is five"
    assert word_errors("Um.", "uh").errors == 0 and word_errors("um, no", "").deletions == 2


def test_no_two_numbers_sound_alike():
    called: dict[str, int] = {}
    for number in (*range(3000), *range(3000, 100_000, 97)):
        for written in {str(number), f"{number:,}"}:
            for said in readings._readings_of_number(written):
                assert called.setdefault(normalize_transcript(said), number) == number


def test_every_row_of_the_readings_is_compared_as_it_is_spoken():
    """`spoken_words` reads plain words without the rules of speech; it must know which words are
    plain."""
    rows = [
        line.split("\t")
        for line in (Path(__file__).parent / "spoken_cases.tsv").read_text().splitlines()
        if not line.startswith("# ")
    ]
    said = [re.sub(r"[^a-z' ]+", "", said.lower()) for _, said in rows]
    assert [spoken_words(written) for written, _ in rows] == [
        " ".join(w.strip("'") for w in s.split()) for s in said
    ]


@pytest.mark.parametrize("name", ["hard", "thousand"])
def test_a_perfect_transcript_of_our_texts_costs_nothing(name):
    for text in read_texts(name):
        said = normalize_text(text.text)
        assert (
            word_errors(text.text, said).errors == word_errors(said.lower(), text.text).errors == 0
        )


def test_other_words_are_left_alone():
    for text in (
        "four hours of our tour",
        "cats and dogs",
        "five and six",
        "metro centers",
        "hundred and counting",
    ):
        assert normalize_transcript(text) == text


@pytest.mark.parametrize(
    "text", ["", "¿?…", "'''", "- -", "$", "12345678901234567890", "0:99 7%%", "1:23:45", "²½"]
)
def test_normaliser_never_raises_and_is_idempotent(text: str):
    once = normalize_transcript(text)
    assert normalize_transcript(once) == once


def test_spoken_words_keep_contractions_for_acoustic_targets():
    assert spoken_words("Don’t stop—it's 7!") == "don't stop it's seven"


@pytest.mark.parametrize(
    ("heard", "wrong"),
    [
        ("the cat sat", {}),
        ("the hat sat", {"cat": 1}),
        ("cat sat", {"the": 1}),
        ("", {"the": 1, "cat": 1, "sat": 1}),
        ("The CAT, sat!", {}),
    ],
)
def test_words_that_are_wrong_cost_one_each_spread_over_their_letters(heard, wrong):
    costs = word_costs("The cat sat.", heard)
    assert len(costs) == len("the cat sat") and costs[3] == costs[7] == 0
    for word, place in (("the", 0), ("cat", 4), ("sat", 8)):
        assert costs[place : place + 3] == pytest.approx([wrong.get(word, 0) / 3] * 3)
    assert costs.sum() == pytest.approx(word_errors("The cat sat.", heard).errors)


def test_words_that_nobody_said_cost_at_the_letter_before_them():
    assert word_costs("a cat", "a big fat cat").tolist() == [2, 0, 0, 0, 0]
    assert word_costs("a cat", "oh a cat it is").tolist() == [1, 0, 0, 0, 2]
    with pytest.raises(TextError, match="reference '…"):
        word_costs("…", "a")
