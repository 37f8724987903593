"""Word, character and phoneme error rates: one named normaliser a language, jiwer's alignment,
corpus-level totals.

Both texts of a comparison are read by the rules of their language (`dcar.text.languages`), which
make different spellings of the same spoken words equal ("20" and "twenty", "colour" and "color",
"don't" and "do not"), so that a recogniser is not penalised for its orthography. If a spelling has
several readings, the two readings with the fewest errors are compared. Languages without blanks
between words have characters for words here. The name of the normaliser is stored with every score.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jiwer
import numpy as np

from dcar.errors import TextError
from dcar.text.language import Language
from dcar.text.languages import DEFAULT, language_of


@dataclass(frozen=True)
class WordErrors:
    """Edit counts of one utterance (of words, or of characters for CER), from a minimal
    alignment."""

    substitutions: int
    deletions: int
    insertions: int
    reference_words: int

    @property
    def errors(self) -> int:
        """Sum of substitutions, deletions and insertions."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Error rate of this utterance, which may exceed 1. Callers that use it as a reward cap
        it."""
        return self.errors / self.reference_words


@dataclass(frozen=True)
class WERScore:
    """Corpus-level error rate: (S + D + I) / N summed over utterances, never a mean of rates.

    `coverage` is the share of utterances that have a transcript; the others are left out of the
    counts. An empty transcript is a transcript (all words deleted).
    """

    wer: float
    substitutions: int
    deletions: int
    insertions: int
    reference_words: int
    coverage: float


def word_errors(reference: str, hypothesis: str, language: str = DEFAULT) -> WordErrors:
    """Count the word edits between the closest readings of two texts (`Language.closest`); of
    characters in a language that is compared by them.

    `reference_words` counts the words of the canonical reading of the reference
    (`Language.canonical`), so that it is the same against every hypothesis and methods can be
    compared; the reading with the fewest errors may be a few words longer or shorter. An empty
    hypothesis has the canonical words deleted. Raises TextError if the reference has no words, or
    for an unknown language.
    """
    rules = language_of(language)
    return _errors(reference, hypothesis, rules, characters=rules.by_characters)


def word_costs(reference: str, hypothesis: str, language: str = DEFAULT) -> np.ndarray:
    """Return word errors by position: the share of every character of `Language.words(reference)`
    in the word errors [characters].

    A deleted or substituted word costs 1, spread over its letters; an inserted word costs 1 at the
    letter before it, or at the first. They add up to the word errors between the spoken words;
    `word_errors` also accepts other spellings. Raises TextError if the reference has no words.
    """
    rules = language_of(language)
    ref, hyp = rules.words(reference), rules.words(hypothesis)
    if not ref:
        raise TextError(
            f"reference {reference!r} has no words, so it has no word errors; remove the utterance"
        )
    words = rules.split(ref)
    blank = 0 if rules.by_characters else 1
    ends = np.cumsum([len(word) + blank for word in words]) - blank
    starts = ends - [len(word) for word in words]
    costs = np.zeros(len(ref))
    for chunk in jiwer.process_words(" ".join(words), " ".join(rules.split(hyp))).alignments[0]:
        if chunk.type == "insert":
            place = ends[chunk.ref_start_idx - 1] - 1 if chunk.ref_start_idx else 0
            costs[place] += chunk.hyp_end_idx - chunk.hyp_start_idx
        elif chunk.type != "equal":
            for word in range(chunk.ref_start_idx, chunk.ref_end_idx):
                costs[starts[word] : ends[word]] += 1 / len(words[word])
    return costs


def character_errors(reference: str, hypothesis: str, language: str = DEFAULT) -> WordErrors:
    """Count the character edits (blanks included) between the readings that `word_errors`
    compares; `reference_words` counts the characters of the canonical reading."""
    return _errors(reference, hypothesis, language_of(language), characters=True)


def id_errors(reference: Sequence[int], hypothesis: Sequence[int]) -> WordErrors:
    """Count the edits between two sequences of ids, phonemes for example; `reference_words`
    counts those of the reference, at least one."""
    ref, hyp = (" ".join(map(str, ids)) for ids in (reference, hypothesis))
    return _edit_counts(ref, hyp, len(reference))


def corpus_wer(errors: Sequence[WordErrors | None]) -> WERScore:
    """Sum the counts of a corpus; None represents an utterance without a transcript (it only lowers
    `coverage`).

    The rate is NaN if no utterance has a transcript. With the results of `character_errors` it is
    the CER.
    """
    present = [e for e in errors if e is not None]
    names = ("substitutions", "deletions", "insertions", "reference_words")
    totals = {name: sum(getattr(e, name) for e in present) for name in names}
    reference = totals["reference_words"]
    return WERScore(
        wer=sum(e.errors for e in present) / reference if reference else float("nan"),
        **totals,
        coverage=len(present) / len(errors) if errors else float("nan"),
    )


def _errors(reference: str, hypothesis: str, rules: Language, characters: bool) -> WordErrors:
    canonical = rules.canonical(reference)
    if not canonical:
        raise TextError(
            f"reference {reference!r} has no words, so it has no error rate; remove the utterance"
        )
    units = len(canonical) if characters else len(canonical.split())
    return _edit_counts(*rules.closest(reference, hypothesis), units, characters)


def _edit_counts(ref: str, hyp: str, units: int, characters: bool = False) -> WordErrors:
    """Count the edits between two texts as they are. units: of the reference's canonical
    reading."""
    ref_units, hyp_units = (len(text) if characters else len(text.split()) for text in (ref, hyp))
    if ref == hyp or not ref or not hyp:  # nothing to align
        same = ref == hyp
        return WordErrors(0, 0 if same else ref_units, 0 if same else hyp_units, units)
    out = jiwer.process_characters(ref, hyp) if characters else jiwer.process_words(ref, hyp)
    return WordErrors(out.substitutions, out.deletions, out.insertions, units)
