"""Phoneme inventory: symbols, their ids, and the version that prepared corpora and models carry.

Choices, for a small TTS model:
* one symbol per phoneme, with stress folded into the vowel ("ˈæ" is one symbol), so that text stays
  short
  and a vowel's stress cannot be separated from it;
* primary stress is kept, secondary stress is written as none: vowel quality already distinguishes
  the
  two, and the rarest secondary vowels occur some hundred times in a lexicon of 124 000 words, too
  few to learn from hours of speech;
* a space between words, and the phrase marks `, . ? !`; every utterance ends in one of the last
  three (a full stop is added), which shows the decoder where speech ends;
* 61 symbols in a fixed order, id 0 is padding. The version string is stored with prepared data and
  models.
"""

import hashlib

from dcar.text.common import FIRST

NORMALIZATION_VERSION = "1"  # of the rules in `dcar.text.english.spoken`
_CONSONANTS = "b d d͡ʒ f h j k l m n p s t t͡ʃ v w z ð ŋ ɡ ɹ ʃ ʒ θ".split()
_VOWELS = ("aɪ", "aʊ", "eɪ", "i", "oʊ", "u", "æ", "ɑ", "ɔ", "ɔɪ", "ə", "ɚ", "ɛ", "ɪ", "ʊ", "ʌ")
# gruut never stresses the schwa, so there is no "ˈə".
_STRESSED = tuple("ˈ" + v for v in _VOWELS if v != "ə")
PHONEMES: tuple[str, ...] = (*FIRST, *_CONSONANTS, *_VOWELS, *_STRESSED)
TEXT_VOCAB_SIZE = len(PHONEMES)
PHONEME_VERSION = f"dcar-en-us-1.{NORMALIZATION_VERSION}-{hashlib.sha256('|'.join(PHONEMES).encode()).hexdigest()[:8]}"
