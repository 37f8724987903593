"""Languages: error units and normalisers, places to cut, units, and what is of another language."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcar.errors import AssetError, CheckpointError, ConfigError, TextError
from dcar.speak.phrases import phrases
from dcar.text.languages import error_rate_of, language_of
from dcar.text.mandarin import MandarinPhonemes, initial_and_final
from dcar.text.units import Characters, default_kind, units_for, units_named
from dcar.text.wer import character_errors, word_costs, word_errors

PAIRS = [
    # language, reference, hypothesis, errors, units of the reference
    ("es", "¿Qué hora es, José?", "que hora es josé", 1, 4),  # an accent is another letter
    ("es", "¿Qué hora es, José?", "Qué hora es José.", 0, 4),
    ("es", "Cuesta 1.500 euros", "cuesta mil quinientos euros", 0, 4),
    ("es", "los gatos", "los perros negros", 2, 2),
    ("fr", "un cafe\u0301", "UN CAFÉ", 0, 2),  # composed and decomposed
    ("fr", "l’eau", "l'eau", 0, 2),
    ("de", "Die Straße", "die STRASSE", 0, 2),
    ("de", "12,5 Kilometer", "zwölf Komma fünf Kilometer", 0, 4),
    ("tr", "İstanbul ılık", "istanbul ılık", 0, 2),
    ("tr", "ılık", "ilik", 1, 1),  # two letters, not capitals of one
    ("ru", "25 градусов", "двадцать пять градусов", 0, 3),
    ("hi", "हिन्दी में।", "हिन्दी में", 0, 2),  # vowel signs are kept
    ("zh", "今天天气很好。", "今天天气很好", 0, 6),
    ("zh", "今天天气很好。", "今天 天气 不好", 1, 6),
    ("zh", "漢語課", "汉语课", 0, 3),  # traditional and simplified
    ("zh", "ＡＢＣ１２", "abc十二", 0, 5),  # full width
    ("zh", "2024年有366天", "二零二四年有三百六十六天", 0, 12),
    ("zh", "我在Google工作", "我在 google 工作", 0, 11 - 1),
    ("ja", "3月", "三月", 0, 2),
    ("ko", "안녕 하세요", "안녕하세요", 0, 5),
    ("th", "น้ำดื่ม", "น้ำ ดื่ม", 0, 8),
]


@pytest.mark.parametrize(("language", "reference", "hypothesis", "errors", "units"), PAIRS)
def test_errors_in_the_units_of_a_language(language, reference, hypothesis, errors, units):
    found = word_errors(reference, hypothesis, language)
    assert (found.errors, found.reference_words) == (errors, units)
    swapped = word_errors(hypothesis, reference, language)
    assert (swapped.errors == 0) == (errors == 0)
    if language_of(language).by_characters:
        assert character_errors(reference, hypothesis, language) == found


def test_what_is_no_word_and_names_of_rates():
    for language, text in (("zh", "。！"), ("es", "¿?"), ("th", " ")):
        with pytest.raises(TextError, match="has no words"):
            word_errors(text, "x", language)
    empty = word_errors("今天好", "", "zh")
    assert (empty.deletions, empty.errors) == (3, 3)
    assert error_rate_of({"zh", "ja"}) == "CER" and error_rate_of({"en", "zh"}) == "WER/CER"
    names = [language_of(code).normalizer for code in ("en", "es", "zh")]
    assert names == ["dcar-english-3", "dcar-words-1:es", "dcar-characters-1:zh"]


def test_costs_of_characters_add_up_to_the_errors():
    costs = word_costs("今天天气好", "今天气候好", "zh")
    assert costs.sum() == word_errors("今天天气好", "今天气候好", "zh").errors == 2
    assert len(costs) == 5 and costs[0] == 0
    assert word_costs("el gato", "el perro", "es").tolist() == [0, 0, 0, 0.25, 0.25, 0.25, 0.25]


def test_codes_names_and_unknown_languages():
    assert language_of("pt-BR") == language_of("pt") and language_of("English").code == "en"
    assert language_of("yue").name and language_of("und").code == "und"
    for wrong in ("auto", "xx", "", "klingonish"):
        with pytest.raises(TextError, match=r"unknown language.*ISO 639.*fa, fr, it"):
            language_of(wrong)


def test_texts_that_are_evidently_of_another_language():
    german = "Das ist ein Haus und der Mann ist nicht hier"
    other = {
        "en": [german, "今天天气很好，我们去公园吧"],
        "es": [german, "今天天气很好", "The cat and the dog are in your house"],
        "zh": ["Hello over there", german],
        "ru": ["Guten Morgen zusammen"],
    }
    own = {
        "en": ["The cat is in the house.", "OK"],
        "es": ["El perro está en la casa con los niños", "Hola", "¿Qué tal?"],
        "zh": ["今天天气很好 OK", "我用 iPhone 打电话给他们"],
        "ru": ["Доброе утро"],
        "hi": ["हिन्दी में लिखा है"],
    }
    assert all(language_of(code).is_other(t) for code, texts in other.items() for t in texts)
    assert not any(language_of(code).is_other(t) for code, texts in own.items() for t in texts)


def _phrases(text, language, symbols=None):
    units = Characters.collected([symbols or text], [language])
    return [p.text for p in phrases(text, units, language_of(language))]


def test_cuts_without_blanks_and_with_inverted_marks():
    page = "今天天气很好，我们一起去公园散步吧。" * 80  # 1,440 characters without a blank
    cut = _phrases(page, "zh")
    assert len(cut) == 80 and set(cut) == {"今天天气很好，我们一起去公园散步吧。"}
    endless = _phrases("我们" * 400, "zh")  # no mark at all
    assert "".join(p.rstrip("。") for p in endless) == "我们" * 400
    assert all(20 <= len(p) <= 67 for p in endless)
    assert _phrases("你说：“好的。”然后呢？走吧！", "zh") == [
        "你说：“好的。”",
        "然后呢？",
        "走吧！",
    ]
    spanish = "¿Qué hora es? ¡No lo sé! El Sr. García llegó a las 3. Luego se fue."
    assert _phrases(spanish, "es") == [
        "¿Qué hora es?",
        "¡No lo sé!",
        "El Sr. García llegó a las 3. Luego se fue.",  # "3." may be an ordinal: not cut
    ]


def test_characters_are_those_of_the_corpus_and_refuse_others(tmp_path):
    units = Characters.collected(["今天天气很好", "Hello, world"], ["zh", "en"])
    assert units("今天好")[-1] == units.ids["。"] or units("今天好")[-1] == units.ids["."]
    assert units.symbols[0] == "<pad>" and 0 not in units("今天好") and units.size == 19
    assert units("He\u200bllo,  world.") == units("Hello, world.")
    with pytest.raises(TextError, match="no text of the corpus has the characters.*鱼"):
        units("鱼")
    again = Characters(**units.stored())
    assert again.name == units.name and again("Hello") == units("Hello")
    with pytest.raises(CheckpointError, match="missing or broken"):
        units_named(units.name, tmp_path)


def test_default_units_and_missing_packages(monkeypatch):
    kinds = [default_kind(code) for code in ("en", "it", "zh", "yue", "hi")]
    assert kinds == ["phonemes"] * 3 + ["characters"] * 2
    with pytest.raises(ConfigError, match=r"Japanese has no phonemes here.*units=characters"):
        units_for("ja")
    monkeypatch.setitem(sys.modules, "wetext", None)
    with pytest.raises(AssetError, match=r"wetext.*pip install '.*\[zh\]'.*units=characters"):
        MandarinPhonemes()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AssetError, match=r"pip install 'gruut\[sv\]'.*units=characters"):
        units_for("sv")


def test_italian_phonemes_numbers_and_marks():
    pytest.importorskip("gruut_lang_it")
    units, italian = units_for("it"), language_of("it")
    text = "Il gatto ha 21 pesci… Perché? Non so, «forse» domani"
    spoken = ["Il gatto ha ventuno pesci.", "Perché?", "Non so, forse domani."]
    assert [p.text for p in phrases(text, units, italian)] == spoken
    assert units("21 pesci") == units("ventuno pesci.")  # numbers in words, and a mark at the end
    symbols = [units.symbols[i] for i in units("Perché?")]
    assert "".join(symbols) == "perˈke?" and units_named(units.name) is units
    assert units.spoken(" ".join(spoken)) == " ".join(spoken)  # what is read is read alike again
    with pytest.raises(TextError, match="no word that can be pronounced in Italian"):
        units("…")
    with pytest.raises(CheckpointError, match="prepare or train it again"):
        units_named("gruut-it-00000000")


# text, as it is read, its syllables with tones
MANDARIN = [
    ("2024年有366天", "二零二四年有三百六十六天。", "er4 ling2 er4 si4 nian2 iou3 san1 bai3 liou4 shi2 liou4 tian1 ."),
    ("你好，世界！", "你好，世界！", "ni3 hao3 , shi4 jie4 !"),  # no third tone becomes a second
    ("行长 在重庆 长大", "行长在重庆长大。", "hang2 zhang3 zai4 chong2 qing4 zhang3 da4 ."),
    ("行長在銀行工作", "行長在銀行工作。", "hang2 zhang3 zai4 in2 hang2 gong1 zuo4 ."),  # phrases are simplified
    ("嗯，花儿呢？！", "嗯，花儿呢？！", "n2 , hua1 er2 ne5 ?"),
    ("吃葡萄的女儿…", "吃葡萄的女儿…", "chi1 pu2 tao2 de5 nv3 er2 ."),
    ("我在Google，涨了3.5%", "我在Google，涨了百分之三点五。", "uo3 zai4 GOOGLE, zhang3 le5 bai3 fen1 zhi1 san1 dian3 u3 ."),
    ("ＡＢＣ１２个", "ABC十二个。", "ABC shi2 er4 ge4 ."),
    ("Café de 花", "Café de 花。", "CAFE DE hua1 ."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "spoken", "syllables"), MANDARIN)
def test_mandarin_phonemes(text, spoken, syllables):
    units = units_for("zh")
    assert units.spoken(text) == spoken == units.spoken(spoken)
    read = "".join(units.symbols[i] for i in units(text))
    expected = re.sub(r"(?<=[0-9]) (?=[a-z.,?!])|(?<=,) | (?=[.?!,])", "", syllables)
    assert read == expected and units(spoken) == units(text)


def test_every_reading_of_pypinyin_is_in_the_inventory():
    from pypinyin.constants import PINYIN_DICT
    from pypinyin.contrib.tone_convert import tone_to_tone3

    units = units_for("zh")
    syllables = {
        tone_to_tone3(syllable, neutral_tone_with_five=True)
        for syllables in PINYIN_DICT.values()
        for syllable in syllables.split(",")
    }
    assert len(syllables) > 1300
    symbols = {symbol for s in syllables for symbol in initial_and_final(s)}
    assert symbols <= units.ids.keys() and len(units.ids) == units.size
    for syllable in syllables:
        assert "".join(initial_and_final(syllable))[-1] in "12345"


def test_what_mandarin_phonemes_refuse_and_keep():
    units, chinese = units_for("zh"), language_of("zh")
    for text, message in (
        ("かな", "か.*な.*not read in Mandarin"),
        ("𠮷好", "no reading of '𠮷'"),
        ("。！", "no word that can be pronounced in Mandarin"),
        ("好" * 600, "1201 phonemes, the limit is 1000"),
    ):
        with pytest.raises(TextError, match=message):
            units(text)
    text = "今天天气很好。我们去公园吧！2只猫"
    assert units.sentences(text, chinese) == ["今天天气很好。", "我们去公园吧！", "两只猫。"]
    assert pickle.loads(pickle.dumps(units))(text) == units(text)  # as workers get them
    assert units_named(units.name) is units
    with pytest.raises(CheckpointError, match="prepare or train it again"):
        units_named("pinyin-zh-00000000")


def test_no_module_outside_the_front_end_names_english():
    root = Path(__file__).parents[3]
    files = subprocess.run(
        ["git", "ls-files", "dcar", "rl", "eval", "heads", "launch"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    named = [
        f"{name}: {line.strip()}"
        for name in files
        if name.endswith(".py") and not name.startswith("dcar/text/")
        for line in (root / name).read_text(encoding="utf-8").splitlines()
        if re.search(r"text\.english|language\s*[!=]?=\s*\"en\"", line)
    ]
    assert not named
