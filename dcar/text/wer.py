"""Word, character and phoneme error rates: one named normaliser, jiwer's alignment, corpus-level totals.

The normaliser makes different spellings of the same spoken words equal ("20" and "twenty", "colour" and "color",
"don't" and "do not"), so that a recogniser is not punished for its orthography. Its name is stored with every score.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jiwer
import numpy as np

from dcar.errors import TextError
from dcar.text.numbers import cardinal, digits, ordinal, plural, whole, year

NORMALIZER = "dcar-english-1"

_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "`": "'", "´": "'"})
_CURRENCY = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent")}
_TITLES = {"mr": "mister", "mrs": "missus", "dr": "doctor", "vs": "versus", "etc": "et cetera"}
_NUMBER_WORDS = set(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety first second third fourth fifth sixth "
    "seventh eighth ninth tenth eleventh twelfth".split()
)
_BEFORE_AND = {"hundred", "thousand", "million"}
# "is" after these is far commoner than the possessive or "has"; both sides of a comparison get the same reading.
_IS_HOSTS = "he she it that this there here what where who how when why everything everyone nothing something".split()
_CONTRACTIONS = {
    "can't": "can not", "cannot": "can not", "won't": "will not", "shan't": "shall not", "ain't": "is not",
    "let's": "let us", "i'm": "i am", "y'all": "you all", "o'clock": "o clock", "gonna": "going to", "wanna": "want to",
    "gotta": "got to",
} | {f"{host}'s": f"{host} is" for host in _IS_HOSTS}
_ENDINGS = (("n't", " not"), ("'re", " are"), ("'ve", " have"), ("'ll", " will"))
_SPELLINGS = {
    "ok": "okay", "okey": "okay", "alright": "all right", "grey": "gray", "greys": "grays", "greyer": "grayer",
    "mum": "mom", "plough": "plow", "ploughs": "plows", "ploughed": "plowed", "ploughing": "plowing", "tyre": "tire",
    "tyres": "tires", "cheque": "check", "cheques": "checks", "programme": "program", "programmes": "programs",
    "cosy": "cozy", "cosier": "cozier", "mould": "mold", "moulds": "molds", "mouldy": "moldy", "moustache": "mustache",
    "pyjamas": "pajamas", "kerb": "curb", "defence": "defense", "offence": "offense", "licence": "license",
    "licences": "licenses", "practise": "practice", "practised": "practiced", "practising": "practicing",
    "sceptical": "skeptical", "sceptic": "skeptic", "ageing": "aging", "jewellery": "jewelry", "woollen": "woolen",
    "storey": "story", "storeys": "stories", "draught": "draft", "draughty": "drafty", "skilful": "skillful",
    "fulfil": "fulfill", "enrol": "enroll", "instalment": "installment", "wilful": "willful", "catalogue": "catalog",
    "dialogue": "dialog", "analogue": "analog", "axe": "ax", "doughnut": "donut", "doughnuts": "donuts",
    "whisky": "whiskey", "yoghurt": "yogurt", "towards": "toward", "afterwards": "afterward", "learnt": "learned",
    "burnt": "burned", "spelt": "spelled", "spilt": "spilled", "per cent": "percent", "manoeuvre": "maneuver",
}
_OUR = re.compile(
    r"\b((?:un|mis|dis)?(?:arb|ard|arm|behavi|cand|clam|col|discol|endeav|fav|ferv|flav|harb|hon|hum|lab|neighb|od|parl|"
    r"ranc|rig|rum|sav|splend|succ|tum|val|vap|vig))our(?=(?:s|ed|ing|ite|ites|able|ably|ful|fully|less|er|ers|ly|y|"
    r"hood|hoods|al)?\b)"
)
_RE = re.compile(r"\b(cent|theat|met|lit|fib|somb|spect|meag|lust|calib|kilomet|centimet|millimet)re(s|d)?\b")
_ISE = re.compile(
    r"\b(apolog|author|categor|central|character|civil|computer|critic|emphas|empathi|energ|equal|familiar|final|general|"
    r"harmon|hospital|ideal|individual|local|maxim|memor|minim|mobil|modern|neutral|normal|optim|organ|real|recogn|"
    r"revolution|special|stabil|standard|summar|symbol|sympath|symbol|util|visual|capital|fertil|general|material|"
    r"jeopard|monopol|patron|scrutin|victim|bapt|cauter|crystall)is(e|ed|es|er|ers|ing|ation|ations)\b"
)
_YSE = re.compile(r"\b(anal|paral|catal)ys(e|ed|es|er|ers|ing)\b")
_DOUBLED = re.compile(
    r"\b(travel|cancel|label|model|signal|level|fuel|marvel|quarrel|counsel|jewel|channel|tunnel|shovel|funnel)"
    r"l(ed|ing|er|ers|ous)\b"
)


@dataclass(frozen=True)
class WordErrors:
    """Edit counts of one utterance (of words, or of characters for CER), from a minimal alignment."""

    substitutions: int
    deletions: int
    insertions: int
    reference_words: int
    empty_hypothesis: bool = False

    @property
    def errors(self) -> int:
        """substitutions + deletions + insertions"""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Error rate of this utterance; it may exceed 1. The caller caps it where it is a reward."""
        return self.errors / self.reference_words


@dataclass(frozen=True)
class WERScore:
    """Corpus-level error rate: (S + D + I) / N summed over utterances, never a mean of rates.

    `coverage` is the share of utterances that had a transcript at all; the others are left out of the counts.
    An empty transcript is a transcript (all words deleted); `empty` counts them. `utterances` keeps the counts of
    each utterance, None where there was no transcript, for bootstrap intervals and paired tests.
    """

    wer: float
    substitutions: int
    deletions: int
    insertions: int
    reference_words: int
    coverage: float
    empty: int
    normalizer: str
    utterances: tuple[WordErrors | None, ...]


def spoken_words(text: str) -> str:
    """Lower-case words as they are spoken, separated by single spaces; apostrophes inside words are kept.

    Numerals, money, percentages and clock times become words, hyphens become spaces, punctuation is dropped and
    accents are removed. Never raises: what has no letters or digits becomes the empty string.
    """
    text = unicodedata.normalize("NFKC", text).translate(_APOSTROPHES).lower()
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text)
    text = re.sub(r"([$£€])\s?(\d+(?:,\d{3})*)(?:\.(\d\d))?\b( hundred| thousand| million| billion| trillion)?", _money,
                  text)
    text = re.sub(r"(\d)\s?%", r"\1 percent", text)
    text = re.sub(r"\b(\d{1,3}(?:,\d{3})+)(?:\.(\d+))?\b",
                  lambda m: f" {_spell(m[1].replace(',', ''), cardinal)} {'point ' + digits(m[2]) if m[2] else ''} ",
                  text)
    text = re.sub(r"\b(\d{1,2}):(\d\d)\b", _clock, text)
    text = re.sub(r"\b(\d+)(st|nd|rd|th)\b", lambda m: f" {_spell(m[1], ordinal)} ", text)
    text = re.sub(r"\b(\d{3})0'?s\b", lambda m: f" {plural(year(int(m[1] + '0')))} ", text)
    text = re.sub(r"\b(\d0)'?s\b", lambda m: f" {plural(cardinal(int(m[1])))} ", text)
    text = re.sub(r"(\d+)\.(\d+)", lambda m: f" {_whole(m[1])} point {digits(m[2])} ", text)
    text = re.sub(r"\d+", lambda m: f" {_whole(m[0])} ", text)
    text = re.sub(r"\s*&\s*", " and ", text)
    text = re.sub(r"\bo'\s?clock\b", "o'clock", text)
    text = re.sub(r"[^a-z']+", " ", text)
    words = (word.strip("'") for word in text.split())
    return " ".join(word for word in words if word)


def normalize_transcript(text: str) -> str:
    """Text of a reference or hypothesis in the form in which words are compared; see NORMALIZER.

    `spoken_words`, then contractions expanded, British spellings made American, titles written out, "and" inside
    numbers dropped, and apostrophes removed. May be empty; never raises.
    """
    text = re.sub(r"\bper cent\b", "percent", spoken_words(text))
    words: list[str] = []
    for word in text.split():
        word = _CONTRACTIONS.get(word, word)
        for ending, expansion in _ENDINGS:
            if word.endswith(ending) and len(word) > len(ending):
                word = word[: -len(ending)] + expansion
        word = _TITLES.get(word, word)
        words.extend(_SPELLINGS.get(part, part) for part in word.split())
    around = zip(["", *words], words, [*words[1:], ""], strict=False)
    text = " ".join(word.replace("'", "") for before, word, after in around
                    if not (word == "and" and before in _BEFORE_AND and after in _NUMBER_WORDS))
    text = _OUR.sub(r"\1or", text)
    text = _RE.sub(r"\1er\2", text)
    text = _ISE.sub(r"\1iz\2", text)
    text = _YSE.sub(r"\1yz\2", text)
    return _DOUBLED.sub(r"\1\2", text)


def word_errors(reference: str, hypothesis: str) -> WordErrors:
    """Word edit counts between the normalised texts. Raises TextError if the reference has no words."""
    return _edit_counts(*_normalized(reference, hypothesis))


def word_costs(reference: str, hypothesis: str) -> np.ndarray:
    """Word errors by position: the share of every character of `spoken_words(reference)` in the word errors
    [characters].

    A deleted or substituted word costs 1, spread over its letters; an inserted word costs 1 at the
    letter before it, or at the first. They add up to the word errors between the spoken words; `word_errors` also
    accepts other spellings. Raises TextError if the reference has no words.
    """
    ref, hyp = spoken_words(reference), spoken_words(hypothesis)
    if not ref:
        raise TextError(f"reference {reference!r} has no words, so it has no word errors; remove the utterance")
    words = ref.split()
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    starts = ends - [len(word) for word in words]
    costs = np.zeros(len(ref))
    for chunk in jiwer.process_words(ref, hyp).alignments[0]:
        if chunk.type == "insert":
            place = ends[chunk.ref_start_idx - 1] - 1 if chunk.ref_start_idx else 0
            costs[place] += chunk.hyp_end_idx - chunk.hyp_start_idx
        elif chunk.type != "equal":
            for word in range(chunk.ref_start_idx, chunk.ref_end_idx):
                costs[starts[word] : ends[word]] += 1 / len(words[word])
    return costs


def character_errors(reference: str, hypothesis: str) -> WordErrors:
    """Character edit counts (spaces included) between the normalised texts; `reference_words` counts characters."""
    return _edit_counts(*_normalized(reference, hypothesis), characters=True)


def id_errors(reference: Sequence[int], hypothesis: Sequence[int]) -> WordErrors:
    """Edit counts between two sequences of ids, phonemes for example; `reference_words` counts those of the reference,
    at least one."""
    return _edit_counts(" ".join(map(str, reference)), " ".join(map(str, hypothesis)))


def corpus_wer(errors: Sequence[WordErrors | None]) -> WERScore:
    """Sum the counts of a corpus; None stands for an utterance without a transcript (it lowers `coverage` only).

    The rate is NaN if no utterance has a transcript. With the results of `character_errors` it is the CER.
    """
    present = [e for e in errors if e is not None]
    names = ("substitutions", "deletions", "insertions", "reference_words")
    totals = {name: sum(getattr(e, name) for e in present) for name in names}
    reference = totals["reference_words"]
    return WERScore(wer=sum(e.errors for e in present) / reference if reference else float("nan"), **totals,
                    coverage=len(present) / len(errors) if errors else float("nan"),
                    empty=sum(e.empty_hypothesis for e in present), normalizer=NORMALIZER, utterances=tuple(errors))


def score_corpus(references: Sequence[str], hypotheses: Sequence[str | None]) -> WERScore:
    """Corpus WER of paired texts; a None hypothesis means that no transcript could be made."""
    pairs = zip(references, hypotheses, strict=True)
    return corpus_wer([None if hyp is None else word_errors(ref, hyp) for ref, hyp in pairs])


def _normalized(reference: str, hypothesis: str) -> tuple[str, str]:
    ref, hyp = normalize_transcript(reference), normalize_transcript(hypothesis)
    if not ref:
        raise TextError(f"reference {reference!r} has no words, so it has no error rate; remove the utterance")
    return ref, hyp


def _edit_counts(ref: str, hyp: str, characters: bool = False) -> WordErrors:
    """Edit counts of two texts as they are, the reference not empty."""
    units = len(ref) if characters else len(ref.split())
    if not hyp:
        return WordErrors(0, units, 0, units, empty_hypothesis=True)
    out = jiwer.process_characters(ref, hyp) if characters else jiwer.process_words(ref, hyp)
    return WordErrors(out.substitutions, out.deletions, out.insertions, units)


def _spell(number: str, speak: Callable[[int], str]) -> str:
    return speak(int(number)) if len(number) <= 15 else digits(number)


def _whole(number: str) -> str:
    """A whole number; four digits from 1100 to 2099 are read as a year."""
    is_year = len(number) == 4 and 1100 <= int(number) <= 2099
    return year(int(number)) if is_year else whole(number)


def _money(match: re.Match[str]) -> str:
    unit, small = _CURRENCY[match[1]]
    amount, cents, scale = match[2].replace(",", ""), match[3], match[4] or ""
    if scale:
        return f" {_spell(amount, cardinal)}{f' point {digits(cents)}' if cents else ''}{scale} {unit}s "
    words = f" {_spell(amount, cardinal)} {unit}{'' if amount == '1' else 's'} "
    if cents and int(cents):
        words += f"{cardinal(int(cents))} {small if int(cents) == 1 else {'penny': 'pence'}.get(small, small + 's')} "
    return words


def _clock(match: re.Match[str]) -> str:
    hour, minute = int(match[1]), int(match[2])
    if minute == 0:
        return f" {cardinal(hour)} o'clock "
    return f" {cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)} "
