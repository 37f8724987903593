"""`dcar tune-voice` on a toy speaker: really trained, really spoken; the decoder as it was stays where it is better."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from compare_worker import HOP, WORDS, LevelJudge, ToneVocoder
from tiny_data import CODES, tiny_split, write_prepared
from tiny_training import tiny_config
from tiny_vocoder import toy_config, toy_data

import eval.compare.run as comparison
import launch.tune_voice as tune
from dcar.errors import ConfigError, DataError
from dcar.model.car import CARDecoder
from dcar.model.load import load_decoder
from dcar.prepare.prepared import features
from dcar.prepare.settings import PrepareReport
from dcar.prompts.load import all_prompts, load_prompts
from dcar.speak.voice import tuned_voice
from dcar.train.car import run as train
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.training.train import run as run_vocoder
from eval.methods.registry import Models
from eval.results.store import Tools
from eval.scorers import spoken
from launch.tune_voice import (
    TuneVoiceConfig,
    choose,
    mixed_vocoders,
    on_the_way,
    tune_voice,
    tuned_vocoder,
    vocoder_config,
)
from launch.voice_verdict import advice, by_sentences, deciding, is_better, off_pace, outcome, rows_of, table

LENGTH = 6  # words, and tokens, of every sentence

RECIPE = """
init_from: {start}
model: {{text_vocab_size: 64, hidden_size: 32, num_layers: 2, num_attention_heads: 2, ffn_size: 64,
  num_prediction_heads: 3, head_blocks: 1, dropout: 0.0, bos: true, speech_position_scale: 0.3}}
prompt_tokens: 3
batch_size: 8
max_steps: {steps}
learning_rate: {rate}
warmup_steps: 2
eval_steps: {every}
save_steps: 1000
spoken: {{sentences: {sentences}, chunk: 2, sampling: {{temperature: 0.4, max_tokens: 12}}}}
"""


def says(split: str, count: int, seed: int) -> datasets.Dataset:
    """Sentences of six neighbouring words, whose first phoneme says where they begin."""
    rng = np.random.default_rng([seed, count])
    rows = []
    for row in tiny_split(split, count, speakers=1):
        start = int(rng.integers(CODES))
        tokens = [(start + t) % CODES for t in range(LENGTH)]
        rows.append({**row, "speech": tokens, "text": " ".join(WORDS[t] for t in tokens),
                     "text_ids": [tokens[0] + 1, 20, 21], "duration": LENGTH / 50})
    return datasets.Dataset.from_list(rows, features=features(CODES))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = write_prepared(tmp_path_factory.mktemp("data") / "prepared")
    info = json.loads((folder / "prepared.json").read_text())
    for split, count in (("train", 48), ("dev", 12), ("test", 20)):
        shutil.rmtree(folder / split, ignore_errors=True)
        says(split, count, 3).save_to_disk(str(folder / split))
        info["counts"][split] = {"utterances": count}
    (folder / "prepared.json").write_text(json.dumps(info))
    return folder


@pytest.fixture(scope="module")
def untrained(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("untrained")
    train(tiny_config(data, folder, model={"dropout": 0.0}, max_steps=1, learning_rate=1e-6))
    return folder


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(tiny_config(data, folder, model={"dropout": 0.0}, max_steps=60, batch_size=8, prompt_tokens=3,
                      learning_rate=1e-2))
    return folder


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    """The judge of the training reads levels."""
    def load(cls, settings, model, data, prompt_tokens, seed):
        items = load_prompts(data, "dev", model, prompt_tokens, seed, settings.sentences)
        return cls(settings, items, ToneVocoder(), LevelJudge(), seed)

    monkeypatch.setattr(spoken.SpokenJudge, "load", classmethod(load))


def tools(compared) -> Tools:
    decoder = load_decoder(compared.decoder)
    items = all_prompts(compared.data, compared.split, decoder, compared.prompt_tokens, 0)
    return Tools(items, Models(decoder), ToneVocoder(), LevelJudge())


def config(folder: Path, data: Path, start: Path, steps: int = 60, rate: float = 1e-2, sentences: int = 6,
           every: int = 60, vocoder_recipe: str = "", **changes) -> TuneVoiceConfig:
    folder.mkdir(exist_ok=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(start=start, steps=steps, rate=rate, sentences=sentences, every=every))
    return TuneVoiceConfig(data=str(data), recipe=str(recipe), out=str(folder / "voice"), resamples=200, seeds=[0],
                           vocoder_recipe=vocoder_recipe, **{"vocoder_shares": [1.0], **changes})


def test_a_tuned_decoder_that_is_better_is_recommended(data, untrained, tmp_path):
    settings = config(tmp_path, data, untrained, temperatures=[0.8], shares=[0.1, 1.0])
    found = tune_voice(settings, tools)
    [step] = found["steps"]
    assert step["better"] and found["recommended"] == str(tmp_path / "voice" / "work" / "car") and found["share"] == 1
    assert [t["share"] for t in found["tried"]] == [0, 0.1, 1] and found["tried"][2]["wer"] < found["tried"][0]["wer"]
    row = step["rows"][0]
    assert row["method"] == "car-2@t0.4" and row["tuned"] < row["start"] and row["difference_ci"][1] < 0
    assert step["rows"][1]["method"] == "car-2@t0.8" and row["sentences"] == 20
    assert found["bounds"] == {"ground truth resynthesised": {"wer": 0.0, "similarity": None}}
    assert "Take the tuned decoder" in table(found)
    assert json.loads((tmp_path / "voice" / "voice.json").read_text()) == json.loads(json.dumps(found))
    speaks = tuned_voice(tmp_path / "voice")  # as dcar speak --voice reads it
    assert (speaks.decoder, speaks.method) == (str(tmp_path / "voice" / "decoder"), "car-2")
    assert load_decoder(speaks.decoder).checksum() == load_decoder(found["recommended"]).checksum()
    assert speaks.prompt.tokens and (tmp_path / "voice/vocoder/config.json").exists()
    assert {p.name for p in (tmp_path / "voice").iterdir()} == {"decoder", "vocoder", "work", "voice.json",
                                                                "tune_voice.yaml"}
    again = tune_voice(settings, tools)  # everything is there: nothing is trained or spoken
    assert again["steps"] == found["steps"]
    with pytest.raises(ConfigError, match=r"work was begun with other settings of the decoder's training .*made_of"):
        tune_voice(replace(settings, training=["learning_rate=1e-3"]), tools)
    more = shutil.copytree(data, tmp_path / "more")
    info = json.loads((more / "prepared.json").read_text())
    (more / "prepared.json").write_text(json.dumps({**info, "checked": 1}))
    with pytest.raises(ConfigError, match="begun with other recordings"):  # which no longer are those it was made of
        tune_voice(replace(settings, data=str(more)), tools)


def test_the_decoder_as_it_was_stays_where_no_step_is_better(data, trained, tmp_path):
    found = tune_voice(config(tmp_path, data, trained, steps=4, rate=1.0, every=2), tools)
    assert found["recommended"] == str(trained) and found["recommended_vocoder"] == "starter"
    assert "dev sentences chose it" in table(found) and not found["steps"] and found["start_rows"]
    assert not found["tried"]
    kept = CARDecoder.from_pretrained(tmp_path / "voice" / "work" / "car")
    assert kept.checksum() == load_decoder(trained).checksum()


def test_a_tuned_decoder_that_is_worse_on_dev_goes_no_further(data, trained, tmp_path):
    found = tune_voice(config(tmp_path, data, trained, steps=4, rate=1.0, sentences=0, every=1000, shares=[1.0]), tools)
    assert found["recommended"] == found["tuned"] == str(trained) and found["share"] == 0
    assert found["tried"][1]["wer"] > found["tried"][0]["wer"] and "0% of the way" in table(found)


def test_mixtures_lie_between_the_two(data, untrained, trained, tmp_path, monkeypatch):
    """Their weights are on the line, each is a decoder that can be loaded, and all of the way is the tuned one itself.
    The tuned decoder is read once for all of them."""
    settings = config(tmp_path, data, untrained, shares=[0.25, 1.0, 0.5])
    read: list[str] = []
    with monkeypatch.context() as watched:
        watched.setattr(tune, "load_decoder", lambda folder: read.append(str(folder)) or load_decoder(folder))
        folders = on_the_way(settings, str(untrained), load_decoder(untrained), str(trained))
    assert read == [str(trained)] and list(folders) == [0.25, 1.0, 0.5] and folders[1.0] == str(trained)
    first, last = (load_decoder(f).state_dict() for f in (untrained, trained))
    for share in (0.25, 0.5):
        for name, tensor in load_decoder(folders[share]).state_dict().items():
            torch.testing.assert_close(tensor, (1 - share) * first[name] + share * last[name])
        told = json.loads((Path(folders[share]) / "provenance.json").read_text())["mixture"]
        assert told == {"start": str(untrained), "tuned": str(trained), "share": share}


def test_what_speaks_and_hears_is_loaded_once_for_all_comparisons(data, untrained, tmp_path, monkeypatch):
    """Seven comparisons, five decoders, two splits: one vocoder, one judge, one similarity, and what the tools of a
    user find is what tools loaded for each comparison find."""
    loaded: list[str] = []

    class Vocoder(ToneVocoder):
        vocab_size = CODES

        def check_tokenizer(self, identity):
            assert identity == "tiny@abc"

    for name, part in (("vocoder_for", Vocoder()), ("load_recognizer", LevelJudge()),
                       ("load_similarity", lambda wave, rate, speaker: float(wave.mean()))):
        monkeypatch.setattr(comparison, name, lambda *a, n=name, p=part, **k: loaded.append(n) or p)
    monkeypatch.setattr(comparison, "corpus_recordings", lambda data: lambda name: (np.zeros(HOP, np.float32), 24_000))
    found = tune_voice(config(tmp_path / "once", data, untrained, shares=[0.1, 0.5, 1.0]))
    assert sorted(loaded) == ["load_recognizer", "load_similarity", "vocoder_for"]
    each = tune_voice(config(tmp_path / "each", data, untrained, shares=[0.1, 0.5, 1.0]),
                      lambda compared: comparison.load_tools(compared, "cpu"))
    assert len(loaded) > 9 and found["share"] == each["share"] == 1
    assert [t["wer"] for t in found["tried"]] == [t["wer"] for t in each["tried"]] and found["steps"] == each["steps"]


class Hoarse(ToneVocoder):
    """Says the same words louder, or with `drops` one word in so many of another."""

    def __init__(self, drops: int = 0):
        self.drops = drops

    def synthesize(self, token_lists, speaker):
        said = [[(t + 1) % CODES if self.drops and i % self.drops == 0 else t for i, t in enumerate(tokens)]
                for tokens in token_lists]
        return super().synthesize(said, speaker)


@pytest.fixture
def listened(monkeypatch, data):
    """Tools of a user whose vocoder is already tuned, by what the similarity of a voice is (decoder's folder, vocoder,
    split, wave), and a list of what they were asked to speak."""
    monkeypatch.setattr(tune, "tuned_vocoder", lambda recipe, folder: {str(data): "tuned"}[folder])

    def made(similarity, drops: int = 0):
        asked: list[tuple[str, str, str]] = []

        def told(compared) -> Tools:
            asked.append(what := (Path(compared.decoder).name, compared.vocoder, compared.split))
            return replace(tools(compared), vocoder=Hoarse(drops if what[1] == "tuned" else 0),
                           identity={"vocoder": what[1]}, similarity=lambda wave, *_: similarity(*what, wave))

        return told, asked

    return made


@pytest.mark.parametrize("drops", [0, 2])
def test_a_tuned_vocoder_is_taken_where_it_is_nearer_and_loses_no_words(data, trained, tmp_path, listened, drops):
    """Its records are like those of the first vocoder but for words and similarity; dev sentences choose it or not."""
    told, _ = listened(lambda decoder, vocoder, split, wave:
                       0.8 + 0.001 * float(wave.mean()) if vocoder == "tuned" else 0.7, drops)
    settings = config(tmp_path, data, trained, steps=4, rate=1.0, every=2, vocoder_recipe="vocoder_voice")
    found = tune_voice(settings, told)
    assert [(t["share"], t["vocoder_share"]) for t in found["tried"]] == [(0, 0), (0, 1)]
    if drops:
        assert not found["vocoder_share"] and found["recommended_vocoder"] == "starter"
        return
    [step] = found["steps"]
    assert step["better"] and found["vocoder_share"] and found["share"] == 0
    assert (found["recommended"], found["recommended_vocoder"]) == (str(trained), "tuned")
    assert step["advice"].startswith("Take the tuned vocoder, nearer to the voice at no more")
    shown = table(found)
    assert "dev, vocoder 100% of the way, decoder 0%: " in shown and shown.count("← chosen") == 1


def test_decoders_speak_through_the_vocoder_that_dev_chose(data, untrained, tmp_path, listened):
    told, asked = listened(lambda decoder, vocoder, *_: 0.7 + 0.1 * (vocoder == "tuned") + 0.1 * (decoder == "car"))
    settings = config(tmp_path, data, untrained, shares=[0.1, 1.0], vocoder_recipe="vocoder_voice", close=1.0)
    found = tune_voice(settings, told)
    first = untrained.name
    assert asked[:4] == [(first, "starter", "dev"), (first, "tuned", "dev"), ("car_0.1", "tuned", "dev"),
                         ("car", "tuned", "dev")]
    assert asked[4:] == [(first, "starter", "test"), (first, "tuned", "test"), ("car", "tuned", "test")]
    assert [(step["tuned"], step["better"]) for step in found["steps"]] == [("vocoder", True), ("decoder", True)]
    assert found["recommended"] == str(tmp_path / "voice" / "work" / "car") and found["recommended_vocoder"] == "tuned"
    shown = table(found)
    assert "held out, tuned vocoder" in shown and "held out, tuned decoder" in shown


def test_what_the_vocoder_lost_is_not_laid_to_the_decoder(data, untrained, tmp_path, listened):
    """Dev sentences took a vocoder that held-out ones refuse: the decoder is then heard through the one before."""
    told, asked = listened(lambda decoder, vocoder, split, wave:
                           0.7 if vocoder == "starter" else 0.6 if split == "test" else 0.8)
    settings = config(tmp_path, data, untrained, shares=[1.0], vocoder_recipe="vocoder_voice", close=1.0)
    found = tune_voice(settings, told)
    assert asked[3:] == [(untrained.name, "starter", "test"), (untrained.name, "tuned", "test"),
                         ("car", "starter", "test")]
    assert [(step["tuned"], step["better"]) for step in found["steps"]] == [("vocoder", False), ("decoder", True)]
    assert "Leave the tuned vocoder, which is farther from the voice" in table(found)
    assert found["recommended"] == str(tmp_path / "voice" / "work" / "car")
    assert found["recommended_vocoder"] == "starter"


def test_the_vocoder_is_really_trained_from_the_one_that_speaks(tmp_path, data):
    """By its recipe, on a pack; the one of another project stays."""
    toy_data(tmp_path)
    first = run_vocoder(toy_config(tmp_path, max_steps=2))
    (tmp_path / "work").mkdir()
    (tmp_path / "pack.safetensors").rename(tmp_path / "work" / "pack.safetensors")
    recipe = tmp_path / "vocoder.yaml"
    recipe.write_text("{renderer_every: 0, max_steps: 3, acoustic_batch_size: 2, acoustic_tokens: 20}")
    settings = TuneVoiceConfig(data=str(data), out=str(tmp_path), vocoder_recipe=str(recipe),
                               vocoder_training=["max_steps=4"])
    found = vocoder_config(settings, str(first))
    assert (found.max_steps, found.init_from, found.out) == (4, str(first), str(tmp_path / "work" / "vocoder"))
    before, after = (TokenVocoder.from_pretrained(f) for f in (first, tuned_vocoder(found, "not read")))
    assert after.config == before.config
    mixed = mixed_vocoders(replace(settings, vocoder_shares=[0.25, 1.0]), str(first), found.out + "/export")
    assert mixed == {0.25: str(tmp_path / "work" / "vocoder_0.25"), 1.0: found.out + "/export"}
    weights = [v.state_dict() for v in (before, TokenVocoder.from_pretrained(mixed[0.25]), after)]
    for name, start in weights[0].items():
        assert torch.allclose(weights[1][name], 0.75 * start + 0.25 * weights[2][name], atol=1e-3), name
    for name, tensor in before.renderer.state_dict().items():
        assert torch.equal(after.renderer.state_dict()[name], tensor), name
    assert not torch.equal(after.acoustic.embedding.weight, before.acoustic.embedding.weight)
    assert vocoder_config(settings, "cosyvoice:models") is None
    assert vocoder_config(TuneVoiceConfig(data=str(data), vocoder_recipe=""), "starter") is None


def test_the_fewest_errors_are_chosen_and_of_nearly_equals_the_nearest_voice():
    tried = [{"share": s, "wer": w, "similarity": v} for s, w, v in (
        (0.0, 0.100, 0.70), (0.5, 0.062, 0.73), (0.75, 0.058, 0.72), (1.0, 0.080, 0.76))]
    assert choose(tried, 0.0) == 2 and choose(tried, 0.01) == 1 and choose(tried, 0.05) == 3
    assert choose([{**t, "similarity": None} for t in tried], 0.01) == 1  # the first, where nothing tells


def said(errors: dict[str, int], similarity: float | None, text: str = "The tide came in.") -> list[dict]:
    return [{"id": name, "text": text, "words": [n, 0, 0, 4], "duration": 1.0, "reference_duration": 2.0,
             **({} if similarity is None else {"speaker_similarity": similarity + 0.001 * i})}
            for i, (name, n) in enumerate(errors.items())]


def test_texts_of_several_sentences_do_not_decide():
    one, several = said({"a": 1}, None), said({"b": 3}, None, "The tide came in. It went out.")
    assert by_sentences([*one, *several]) == (one, several) and deciding([*one, *several]) == one
    rows = rows_of({"car-5": [*one, *several]}, None, ["car-5"], 100)
    assert [(row["texts"], row["start"]) for row in rows] == [("one sentence", 0.25), ("several sentences", 0.75)]
    [row] = rows_of({"car-5": several}, None, ["car-5"], 100)  # no text has one sentence: these decide, and say so
    assert deciding(several) == several and row["texts"] == "several sentences"


def test_a_nearer_voice_decides_where_words_are_equal():
    names = [f"u{i}" for i in range(30)]
    before, after = said(dict.fromkeys(names, 1), 0.7), said(dict.fromkeys(names, 1), 0.72)
    row = outcome(before, after, 200)
    assert row["nearer"] == pytest.approx(0.02) and row["start_length"] == 0.5 and row["sentences"] == 30
    assert row["off_pace_ci"] == [0, 0]
    for change, better, told in (
            ({}, True, "Take the tuned vocoder, nearer to the voice at no more than 3 points"),
            ({"off_pace_ci": [0.01, 0.02]}, False, "Leave the tuned vocoder, which is farther from its pace"),
            ({"difference_ci": [-0.01, 0.04]}, False,  # words may have suffered
             "nearer to the voice, but it may make more than 3 points more word errors"),
            ({"nearer_ci": [-0.001, 0.03]}, False, "which is better in nothing beyond chance"),
            ({"difference_ci": [0.01, 0.04]}, False, "Leave the tuned vocoder, which makes more word errors")):
        found = {**row, **change}
        assert is_better(found, 0.03) == better and told in advice(found, "vocoder", 0.03)
    assert not is_better(outcome(said(dict.fromkeys(names, 1), None), said(dict.fromkeys(names, 1), None), 200), 0.03)


def test_a_nearer_pace_decides_too():
    """Of recordings of 2 s: 1 s before, 1.5 s after. A longer one than the recording is no nearer, a silent one far."""
    names = [f"u{i}" for i in range(30)]
    before = said(dict.fromkeys(names, 1), 0.7)
    row = outcome(before, [{**r, "duration": 1.5} for r in before], 200)
    assert row["off_pace"] == pytest.approx(math.log(2 / 1.5) - math.log(2)) and row["tuned_length"] == 0.75
    assert is_better(row, 0.03) and "nearer to its pace at no more" in advice(row, "decoder", 0.03)
    assert "0.75 of the recordings' length instead of 0.50" in advice(row, "decoder", 0.03)
    assert not is_better({**row, "nearer_ci": [-0.02, -0.01]}, 0.03)  # another voice
    assert not is_better({**row, "difference_ci": [0.0, 0.031]}, 0.03)
    assert not is_better(outcome(before, [{**r, "duration": 4.0} for r in before], 200), 0.03)
    assert off_pace({"duration": 0.0, "reference_duration": 2.0}) == pytest.approx(math.log(10))


def test_a_difference_within_chance_says_what_could_have_been_seen():
    row = {"start": 0.2, "tuned": 0.18, "difference": -0.02, "difference_ci": [-0.06, 0.02], "detectable": 0.057,
           "sentences": 64, "nearer_ci": None, "off_pace_ci": [-0.01, 0.01], "start_length": 0.8, "tuned_length": 0.8}
    said = advice(row, "decoder", 0.03)
    assert "better in nothing beyond chance" in said and "5.7 points" in said and "few" not in said
    assert "12 sentences are few" in advice({**row, "sentences": 12}, "decoder", 0.03)


def test_stages_are_named_and_counted(tmp_path, capsys):
    stage = tune.Stages(TuneVoiceConfig(data="x", vocoder_recipe="", shares=[0.5, 1.0]))
    stage("train")
    stage("speak")
    stage.done()
    assert capsys.readouterr().err.splitlines() == ["[1 of 7] train", "[2 of 7] speak"]


@pytest.mark.parametrize(("first", "kind"), [("s1|Hello.", "ljspeech"), ("file,text", "folder"), ("", "folder")])
def test_recordings_are_read_as_they_lie_there(tmp_path, monkeypatch, first, kind, caplog):
    asked = []

    def prepare(settings):
        asked.append((settings.corpus, settings.out, settings.transcribe))
        return PrepareReport([], {"train": {"utterances": 2, "seconds": 4, "speakers": 2, "tokens": 200}}, None, 2)

    monkeypatch.setattr(tune, "prepare", prepare)
    if first:
        (tmp_path / "metadata.csv").write_text(first)
    made = tune.prepared_recordings(TuneVoiceConfig(recordings=str(tmp_path), out="v", transcribe="whisper-base"))
    assert asked == [(kind, made, "whisper-base")] and made == "v/work/prepared"
    assert "recordings of 2 speakers" in caplog.text


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"data": ""}, ConfigError, "one of the two"), ({"shares": []}, ConfigError, "shares"),
    ({"split": "dev"}, ConfigError, "split=dev"),
    ({"recipe": "finetune_started"}, ConfigError, "finetune_started: no such file.*did you mean finetune_starter"),
    ({"vocoder_recipe": "vocoder_voices"}, ConfigError, "vocoder_voices: no such file.*did you mean vocoder_voice"),
    ({"recipe": "car_starter"}, ConfigError, "trains from scratch"),
    ({"split": "other"}, DataError, "nothing in split other"),
])
def test_what_cannot_be_tuned_is_refused(data, tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        tune_voice(TuneVoiceConfig(**{"data": str(data), "out": str(tmp_path / "voice"), **settings}))
