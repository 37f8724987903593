"""Corpora that are not English: rows of several languages, phonemes of another, bad rows, and a
language model that reads Chinese from its corpus to a comparison by characters."""

import json
import logging

import numpy as np
import pytest
import soundfile as sf
import torch
from compare_worker import ToneVocoder
from tiny_backbones import SIZES
from tiny_corpora import tone, toy_prepare, toy_settings, write_manifest
from tiny_training import tiny_config

from dcar.errors import ConfigError, DataError, RewardError
from dcar.model.backbones.convert import ConvertConfig, convert
from dcar.model.backbones.lora import LoraSettings
from dcar.model.companions import language_for, text_units
from dcar.model.load import load_decoder, load_decoder_config
from dcar.prepare.columns import Split
from dcar.prepare.join import JoinConfig, join
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.prepare.retokenize import RetokenizeConfig, retokenize
from dcar.prompts.items import make_prompts
from dcar.prompts.load import load_prompts
from dcar.prompts.texts import read_texts, text_prompts
from dcar.prompts.together import check_together
from dcar.recognition.ctc import CTCRecognizer
from dcar.recognition.pretrained import MoonshineRecognizer
from dcar.sampling import SamplingConfig
from dcar.text.units import units_for
from dcar.train.car import run as train
from dcar.train.settings import BackboneTraining, TrainConfig

CHINESE = [
    "今天天气很好，我们去公园吧。",
    "你好吗？",
    "他有三只猫。",
    "我在学习中文。",
    "请坐！",
    "明天见。",
]
ENGLISH = ["The tide came in.", "How are you?"]


def write_mixed(folder, chinese=CHINESE, **row):
    rows = [
        {"text": text, "language": language, "speaker": f"s{i % 2}", "split": split, **row}
        for split in ("train", "dev", "test")
        for i, (text, language) in enumerate(
            [(t, "zh") for t in chinese] + [(t, "English") for t in ENGLISH] * (split == "train")
        )
    ]
    rows = [row | {"id": f"u{i}"} for i, row in enumerate(rows)]
    return write_manifest(
        folder, rows, [tone(1.0 + i / 10, 150 + 20 * i) for i in range(len(rows))]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_corpus_of_two_languages_has_their_characters(stream, tmp_path, caplog):
    manifest = write_mixed(tmp_path)
    prompt = {"prompt_audio": "1.wav", "prompt_text": "你坐！"}
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    lines[0] |= prompt
    manifest.write_text("\n".join(map(json.dumps, lines)))
    config = dict(corpus="jsonl", language="zh", units="characters", stream=stream)
    toy_prepare(toy_settings(manifest, tmp_path / "out", **config))
    info, rows = prepared_info(tmp_path / "out"), load_prepared(tmp_path / "out", "train")
    assert info.languages == ("en", "zh") and info.phonemes.startswith("characters-en+zh-")
    assert rows["language"] == ["zh"] * 6 + ["en"] * 2
    units = info.units
    assert [rows[i]["text_ids"] for i in range(8)] == [units(t) for t in CHINESE + ENGLISH]
    assert rows[0]["prompt_text_ids"] == units("你坐！")
    assert "".join(units.symbols[i] for i in rows[6]["text_ids"]) == ENGLISH[0]
    assert units.symbols[1:6] == (" ", ",", ".", "?", "!") and "do not look like" not in caplog.text
    joined = join(JoinConfig([str(tmp_path / "out")], str(tmp_path / "joined"), share=1.0))
    texts = load_prepared(joined, "train")["text"]
    assert any(
        "。你好吗？" in t or "。他有" in t or "！" in t[:-1] for t in texts
    )  # without a blank
    assert prepared_info(joined).units.name == units.name


def test_characters_that_no_training_text_has_are_named(tmp_path, caplog):
    manifest = write_mixed(tmp_path)
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    rows[-1] |= {"split": "dev", "text": f"{ENGLISH[0]} ẞç"}
    manifest.write_text("\n".join(map(json.dumps, rows)))
    settings = dict(corpus="jsonl", language="zh", units="characters")
    toy_prepare(toy_settings(manifest, tmp_path / "out", **settings))
    (said,) = [r.getMessage() for r in caplog.records if "no training text" in r.getMessage()]
    assert "the characters ç ẞ, so" in said


def test_rows_in_a_language_that_is_not_read_are_bad(tmp_path):
    rows = [{"language": "zh"}, {"language": "klingonish"}, {"language": " "}, {"language": "en"}]
    rows = [row | {"split": "train"} for row in rows]
    manifest = write_manifest(tmp_path, rows, [tone(1.0)])
    report = toy_prepare(toy_settings(manifest, "", corpus="jsonl", validate=True))
    found = {p.id: p.message for p in report.problems}
    assert found.keys() == {"u0", "u1", "u2"}
    assert "the corpus is read as en: set language=zh, or units=characters" in found["u0"]
    assert "unknown language 'klingonish'" in found["u1"] and "is empty" in found["u2"]
    for settings, words in (
        ({"language": "ja", "units": "phonemes"}, "Japanese has no phonemes here"),
        ({"units": "letters"}, "units"),
    ):
        with pytest.raises(ConfigError, match=words):
            toy_prepare(toy_settings(manifest, tmp_path / "o", corpus="jsonl", **settings))


@pytest.mark.parametrize("stream", [False, True])
def test_rows_that_look_like_another_language_are_named(stream, tmp_path, caplog):
    german = "Das ist ein Haus und der Mann ist nicht hier."
    rows = [{"text": t, "split": "train"} for t in ["The tide came in.", german, german, german]]
    manifest = write_manifest(tmp_path, rows, [tone(1.0)] * 4)
    settings = toy_settings(manifest, tmp_path / "o", corpus="jsonl", stream=stream)
    with caplog.at_level(logging.WARNING):
        toy_prepare(settings)
    assert "3 rows do not look like English, in which they are read" in caplog.text
    assert f"m.jsonl:2: {german[:40]!r}" in caplog.text
    assert load_prepared(tmp_path / "o", "train").num_rows == 4  # named, not refused


def test_seed_tts_eval_in_chinese(tmp_path):
    """test-zh is a corpus of phonemes; hard-zh, which has no recordings, a list of texts."""
    for name in ("prompt-wavs/a.wav", "wavs/a-1.wav", "wavs/a-2.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        sf.write(tmp_path / name, tone(1.5), 24000)
    prompt = f"{CHINESE[0]}|prompt-wavs/a.wav"
    (tmp_path / "meta.lst").write_text(
        "".join(f"a-{i}|{prompt}|{CHINESE[i]}\n" for i in (1, 2)), encoding="utf-8"
    )
    lines = [f"h-1|{prompt}|{CHINESE[2]}", f"h-2|{prompt}|{CHINESE[1]}|"]
    hard = tmp_path / "hardcase.lst"
    hard.write_text("\n".join(lines), encoding="utf-8")
    settings = dict(corpus="seed-tts-eval", language="zh", filter_seconds=[])
    toy_prepare(toy_settings(tmp_path / "meta.lst", tmp_path / "out", **settings))
    info, rows = prepared_info(tmp_path / "out"), load_prepared(tmp_path / "out", "test")
    assert info.languages == ("zh",) and rows["text"] == CHINESE[1:3]
    assert info.phonemes == units_for("zh").name and rows["text_ids"][0] == info.units("你好吗？")
    assert rows["prompt_text_ids"] == [info.units(CHINESE[0])] * 2

    items = make_prompts(Split.of(rows), 25, seed=0, bos=True)
    spoken = text_prompts(read_texts(hard, info.units, "zh"), items)
    assert [item.text for item in spoken] == [CHINESE[2], CHINESE[1]]
    assert {item.speaker for item in spoken} == {"a"} and {i.language for i in spoken} == {"zh"}
    hard.write_text("\n".join([*lines, "h-3|a text"]), encoding="utf-8")
    with pytest.raises(DataError, match=r"hardcase.lst:3: expected id\|prompt text"):
        read_texts(hard, info.units, "zh")


def test_phonemes_of_another_language_and_a_decoder_that_learns_them(tmp_path, caplog):
    pytest.importorskip("gruut_lang_it")
    texts = ["Il gatto dorme.", "Ho 21 anni.", "Dove vai?", "Perché no!", "Buona notte.", "Ciao."]
    rows = [{"text": t, "split": s} for s in ("train", "dev") for t in texts]
    manifest = write_manifest(tmp_path, rows, [tone(1.0 + i / 10) for i in range(len(rows))])
    toy_prepare(toy_settings(manifest, tmp_path / "it", corpus="jsonl", language="it"))
    english = write_manifest(
        tmp_path / "e", [{"split": s} for s in ("train", "dev")] * 3, [tone(1.0)]
    )
    toy_prepare(toy_settings(english, tmp_path / "en", corpus="jsonl"))
    info, units = prepared_info(tmp_path / "it"), units_for("it")
    assert (info.phonemes, info.languages) == (units.name, ("it",))
    assert load_prepared(tmp_path / "it", "train")[1]["text_ids"] == units("Ho ventuno anni.")

    first = train(
        tiny_config(
            tmp_path / "en", tmp_path / "car", {"speech_vocab_size": 64, "text_vocab_size": 64}
        )
    )
    shape = {"speech_vocab_size": 64, "text_vocab_size": 85}
    with caplog.at_level(logging.INFO):
        train(tiny_config(tmp_path / "it", tmp_path / "car_it", shape, init_from=str(tmp_path / "car"), max_steps=1, learning_rate=1e-9))  # fmt: skip
    shared = set(units.symbols) & set(units_for().symbols)
    assert f"{len(shared)} of 85 symbols keep their embeddings" in caplog.text
    own = load_decoder(tmp_path / "car_it")
    assert own.config.languages == ("it",) and own.config.phonemes == units.name
    for symbol in shared:
        old = first.text_embedding.weight[units_for().ids[symbol]]
        assert torch.allclose(own.text_embedding.weight[units.ids[symbol]], old, atol=1e-4)
    assert text_units(tmp_path / "car_it") is units
    assert language_for(units, own.config) == "it"
    with pytest.raises(ConfigError, match="not trained on Chinese, but on it"):
        language_for(units, own.config, "zh")
    with pytest.raises(DataError, match="text ids of dcar-en-us"):
        check_together(own, prepared_info(tmp_path / "en"), "en")


class CharacterCTC(CTCRecognizer):
    """Recogniser of a few characters: the level of a frame says which."""

    name, blank = "levels", 0

    def __init__(self, alphabet):
        self._alphabet, self.asked = alphabet, []

    @property
    def alphabet(self):
        return self._alphabet

    def _log_probs(self, waves, sample_rate):
        for i, wave in enumerate(waves):
            levels = np.abs(wave[: len(wave) // 320 * 320]).reshape(-1, 320).mean(1) * 20
            best = torch.from_numpy(levels.round().astype(np.int64) % len(self._alphabet)) + 1
            likely = torch.full((len(best), len(self._alphabet) + 1), 0.1)
            likely[torch.arange(len(best)), best] = 5.0
            self.asked.append(self.language)
            yield i, likely.log_softmax(-1)

    def spell(self, symbols):
        return "".join(self._alphabet[s - 1] for s in symbols)

    def symbols(self, text):
        return [self._alphabet.index(c) + 1 for c in text]


def test_a_language_model_reads_chinese_from_the_corpus_to_the_comparison(tmp_path):
    """Convert -> prepare (two languages) -> train -> DCPO -> export -> compare."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from dcar.methods import load_models
    from eval.compare.config import CompareConfig
    from eval.compare.run import run as compare
    from eval.compare.tools import Tools
    from rl.config import DCPOConfig
    from rl.export import ExportConfig, export
    from rl.train import run as train_policy

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CHINESE + ENGLISH, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet)
    )
    published = tmp_path / "published"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.save_pretrained(str(published))
    torch.manual_seed(0)
    shape = AutoConfig.for_model("qwen2", vocab_size=len(tokenizer), **SIZES)
    AutoModelForCausalLM.from_config(shape).save_pretrained(str(published))
    host, data = tmp_path / "host", tmp_path / "own"
    settings = dict(heads=3, head_blocks=1, bos=True, speech_vocab_size=64)
    convert(ConvertConfig("causal-lm", str(published), str(host), **settings))
    units = text_units(host)
    assert tokenizer.decode(units("今天 OK 12.")) == "今天 OK 12."  # as it is written
    with pytest.raises(Exception, match="is a mark of the model"):
        units("你好<|end|>")

    settings = dict(corpus="jsonl", language="zh", units="characters")
    toy_prepare(toy_settings(write_mixed(tmp_path), tmp_path / "p", **settings))
    retokenize(RetokenizeConfig(str(tmp_path / "p"), str(host), str(data)))
    rows = load_prepared(data, "train")
    assert rows[0]["text_ids"] == units(CHINESE[0]) and rows["language"][-1] == "en"
    decoder = train(
        TrainConfig(
            data=str(data),
            out=str(tmp_path / "car"),
            backbone=BackboneTraining(str(host), "lora", LoraSettings(4, 8.0, target_modules=["q_proj"])),
            prompt_tokens=5,
            per_device_train_batch_size=4,
            max_steps=3,
            warmup_steps=1,
            logging_steps=1,
            eval_steps=3,
            save_steps=3,
        )
    )  # fmt: skip
    assert decoder.config.languages == ("en", "zh")
    assert text_units(tmp_path / "car").name == units.name
    assert language_for(units, load_decoder_config(tmp_path / "car"), "zh") == "zh"
    with pytest.raises(ConfigError, match=r"the decoder speaks en \(English\), zh \(Chinese\)"):
        language_for(units, decoder.config)
    with pytest.raises(ConfigError, match="not trained on Spanish"):
        language_for(units, decoder.config, "es")

    items = load_prompts(str(data), "train", decoder, 5, 0)
    assert sorted({item.language for item in items}) == ["en", "zh"]
    every = sorted(set("".join(CHINESE)) | set("abcdefghijklmnopqrstuvwxyz' "))
    judge, vocoder = CharacterCTC(every), ToneVocoder()

    def dcpo(out, recognizer, rewards):
        return train_policy(
            DCPOConfig(
                output_dir=str(out),
                max_reward_wer=100.0,
                use_cpu=True,
                disable_tqdm=True,
                num_generations=4,
                per_device_train_batch_size=8,
                num_train_epochs=1,
                chunk_range=[2, 3],
                policy_width=16,
                policy_heads=2,
                max_completion_length=30,
                decoder=str(tmp_path / "car"),
                data=str(data),
                reward_funcs=rewards,
            ),
            vocoder=vocoder,
            recognizer=recognizer,
            train_dataset=items[:8],
            eval_dataset=items[:2],
        )

    with pytest.raises(RewardError, match="does not know .* characters of 10 of 10 texts"):
        dcpo(tmp_path / "bad", CharacterCTC(["x"]), ["log_likelihood"])
    with pytest.raises(ConfigError, match=r"moonshine.* transcribes English, not Chinese"):
        dcpo(tmp_path / "bad", MoonshineRecognizer.__new__(MoonshineRecognizer), ["wer"])
    dcpo(tmp_path / "dcpo", judge, ["wer", "log_likelihood"])
    assert set(judge.asked) == {"en", "zh"}
    policy = export(
        ExportConfig(str(tmp_path / "dcpo"), str(tmp_path / "policy"), str(tmp_path / "car"))
    )

    test = load_prompts(str(data), "test", decoder, 5, 0)
    tools = Tools(
        {"split": {0: test}},
        load_models(str(tmp_path / "car"), "", [str(policy)]),
        vocoder,
        judge,
        identity={"v": "tone"},
    )
    out = tmp_path / "compare"
    result = compare(
        CompareConfig(
            methods=["car-1", "car-3", "dcar"],
            seeds=[0],
            batch_size=2,
            resamples=100,
            timing_utterances=1,
            sampling=SamplingConfig(max_tokens=30),
            audio_utterances=1,
            references=False,
            device="cpu",
            out=str(out),
        ),
        tools,
    )
    assert result.normalizer == "dcar-characters-1:zh"
    rows = {row.method: row for row in result.first.rows}
    assert {row.error_rate for row in rows.values()} == {"CER"} and rows["dcar"].n == len(test)
    letters = sum(len(t.translate(dict.fromkeys(map(ord, "，。？！")))) for t in CHINESE)
    assert rows["car-1"].errors.reference_words == letters
    table, page = (out / "compare.txt").read_text(), (out / "report.html").read_text()
    assert "CER %" in table and "WER %" not in table
    assert "characters wrong" in page and "words wrong" not in page
    assert "per 100 characters of the text" in page
    assert result.first.samples[0].text in page and result.first.samples[0].language == "zh"
