"""The script that speaks the starter corpus, as far as it goes without the voices."""

import hashlib
import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from dcar.corpus.read import load_corpus
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.prompts.texts import read_texts
from dcar.sources.shipped import shipped
from dcar.text.english.readings import spoken_words
from launch.starter import make_corpus as script


class Hibari:
    """Stand-in for hibari-tts: letters are phonemes, speech is a tone of 0.05 s a letter."""

    def __init__(self, voice: str = ""):
        pass

    def phonemize(self, text: str) -> list[str]:
        return list(text.lower())

    def from_phonemes(self, phonemes: str, speed: float, seed: int) -> np.ndarray:
        return 0.3 * np.sin(np.arange(round(1200 * len(phonemes) / speed)) / 10).astype(np.float32)


class Session:
    """Stand-in for Kokoro-82M in onnxruntime: as Hibari, as loud as the style says."""

    def __init__(self, model, options, providers):
        pass

    def run(self, outputs, feed) -> list[np.ndarray]:
        [[length]], [speed] = [feed["tokens"].shape[1:]], feed["speed"]
        return [feed["style"][0, 0] * Hibari().from_phonemes(" " * (length - 2), speed, 0)[None]]


def test_sentences_become_a_corpus_and_its_first_utterances_of_every_voice(tmp_path, monkeypatch):
    """plan, speak, pack and trim as commands, on 60 sentences; the two networks are stand-ins."""
    monkeypatch.setitem(sys.modules, "hibari", SimpleNamespace(Hibari=Hibari))
    monkeypatch.setitem(
        sys.modules,
        "onnxruntime",
        SimpleNamespace(SessionOptions=SimpleNamespace, InferenceSession=Session),
    )
    for name in ("DEV_PER_VOICE", "TEST_PER_VOICE", "TRAIN_PER_VOICE"):
        monkeypatch.setattr(script, name, 1)
    names = (*script.UNSEEN_VOICES, script.FAST_VOICE, *(f"am_{i}" for i in range(23)))
    (tmp_path / "voices").mkdir()
    for name in names:
        np.full((40, 256), 1 + names.index(name) / 28, np.float32).tofile(
            tmp_path / "voices" / f"{name}.bin"
        )
    (tmp_path / "vocab.json").write_text(
        json.dumps({"vocab": {c: i for i, c in enumerate("abcdefghijklmnop ")}})
    )
    (tmp_path / "model.onnx").write_bytes(b"weights")
    sentences = [f"a {a} b {b}" for a in "abcdef" for b in "abcdefghij"]
    (tmp_path / "sentences.txt").write_text("\n".join(sentences))
    work, corpus = tmp_path / "work", tmp_path / "corpus"
    speak = ["speak", f"work={work}", f"model={tmp_path / 'model.onnx'}", "processes=1"]
    script.main(
        [
            "plan",
            f"sentences={tmp_path / 'sentences.txt'}",
            f"voices={tmp_path / 'voices'}",
            f"vocabulary={tmp_path / 'vocab.json'}",
            f"out={work}",
        ]
    )
    with pytest.raises(SystemExit, match="Kokoro-82M"):
        script.main(speak)
    monkeypatch.setattr(script, "MODEL_SHA256_PREFIX", hashlib.sha256(b"weights").hexdigest()[:8])
    script.main(speak)
    script.main(["pack", f"work={work}", f"out={corpus}"])
    script.main(["trim", f"corpus={corpus}", "each=2", f"out={tmp_path / 'trimmed'}"])

    tables = {
        split: pq.read_table(corpus / f"{split}.parquet") for split in ("train", "dev", "test")
    }
    assert sorted(
        text for table in tables.values() for text in table["text"].to_pylist()
    ) == sorted(sentences)
    assert sorted(tables["test"]["speaker"].to_pylist()) == sorted(script.UNSEEN_VOICES)
    assert sorted(tables["dev"]["speaker"].to_pylist()) == sorted(
        set(names) - set(script.UNSEEN_VOICES)
    )
    assert tables["train"]["speaker"].to_pylist().count(script.FAST_VOICE) == 60 - 4 - 24 - 23
    for utterance in load_corpus("starter", corpus, "test"):
        wave, _ = utterance.load()
        assert utterance.duration == pytest.approx(0.05 * 7, abs=0.01)
        assert np.abs(wave).max() == pytest.approx(
            0.3 * (1 + names.index(utterance.speaker) / 28), rel=0.2
        )

    whole, kept = (
        pq.read_table(folder / "train.parquet").to_pylist()
        for folder in (corpus, tmp_path / "trimmed")
    )
    fast = [row for row in whole if row["speaker"] == script.FAST_VOICE]
    assert kept == [row for row in whole if row not in fast[2:]] and len(kept) == 23 + 2
    for split in ("dev", "test"):
        assert pq.read_table(tmp_path / "trimmed" / f"{split}.parquet").equals(tables[split])


def test_the_corpus_that_ships_is_what_its_card_says_and_is_prepared_whole():
    rows = (
        pq.read_table(shipped("corpus") / "train.parquet")
        .select(["id", "text", "speaker"])
        .to_pylist()
    )
    lines = []
    hours = utterances = 0
    for split in ("train", "dev", "test"):
        table = pq.read_table(
            shipped("corpus") / f"{split}.parquet", columns=["duration", "speaker"]
        )
        seconds = sum(table["duration"].to_pylist())
        lines.append(f"| {split} | {len(table)} | {seconds / 3600:.2f} |")
        hours, utterances = hours + seconds / 3600, utterances + len(table)
    card = (shipped("corpus") / "README.md").read_text()
    assert all(line in card for line in (*lines, f"| all | {utterances} | {hours:.2f} | 28 |"))
    voices = Counter(row["speaker"] for row in rows)
    assert (
        len(voices) == 24
        and set(voices.values()) == {8}
        and not set(voices) & set(script.UNSEEN_VOICES)
    )
    prepared = load_prepared("starter", "train")
    known = dict(
        zip(prepared["id"], zip(prepared["text"], prepared["speaker"], strict=True), strict=True)
    )
    assert all(known[row["id"]] == (row["text"], row["speaker"]) for row in rows)
    order = [name for name in prepared["id"] if name in {row["id"] for row in rows}]
    # the first of every voice, in the order of the whole corpus
    assert [row["id"] for row in rows] == order
    assert len(known) == 5478 and prepared_info("starter").counts["train"]["seconds"] / 3600 > 6


def test_a_blend_is_the_weighted_sum_of_styles_at_its_number_of_phonemes(monkeypatch):
    styles = {
        name: np.random.default_rng(i).standard_normal((4, 256)) for i, name in enumerate("ab")
    }
    monkeypatch.setattr(script, "_styles", styles, raising=False)
    job = {"voice": "blend_0000", "ids": [1, 2], "blend": {"a": 0.25, "b": 0.75}}
    assert np.allclose(script._style(job), (0.25 * styles["a"][2] + 0.75 * styles["b"][2])[None])
    # past the last row
    assert np.allclose(script._style({"voice": "a", "ids": [0] * 9}), styles["a"][3][None])


def test_mixtures_sum_to_one_and_may_lie_beyond_their_voices():
    voices, rng = list("abcdefgh"), random.Random(0)
    for _ in range(50):
        inside = script._mixture(voices, rng, away=0.0)
        beyond = script._mixture(voices, rng, away=0.4)
        assert sum(inside.values()) == pytest.approx(1) == sum(beyond.values())
        assert len(inside) == 3 and min(inside.values()) > 0
        assert len(beyond) == 4 and [w for w in beyond.values() if w < 0] == [min(beyond.values())]
        assert -0.4 <= min(beyond.values()) < 0


def test_further_sentences_are_planned_once_each_at_speeds_within_the_bounds(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hibari", SimpleNamespace(Hibari=Hibari))
    texts = [f"Sentence {i}." for i in range(200)]
    (tmp_path / "more.txt").write_text("\n".join(texts) + "\n\n")
    for out in ("one", "two"):
        script.main(
            ["add", f"sentences={tmp_path / 'more.txt'}", "seed=7", f"out={tmp_path / out}"]
        )
    jobs = [json.loads(line) for line in (tmp_path / "one" / "jobs.jsonl").open()]
    assert [job["text"] for job in jobs] == texts and len({job["id"] for job in jobs}) == len(texts)
    speeds = np.array([job["speed"] for job in jobs])
    assert {job["voice"] for job in jobs} == {script.FAST_VOICE} and jobs[0][
        "phonemes"
    ] == "sentence 0."
    assert (
        0.8 <= speeds.min() < 0.82
        and 1.22 < speeds.max() <= 1.25
        and abs(np.log(speeds).mean()) < 0.03
    )
    assert (tmp_path / "one" / "jobs.jsonl").read_bytes() == (
        tmp_path / "two" / "jobs.jsonl"
    ).read_bytes()


def test_a_foreign_corpus_has_every_sentence_in_several_voices_and_in_one_split(
    tmp_path, monkeypatch
):
    def espeak(command, text):
        assert command[:3] == ["espeak-ng", "-v", "it"] and not set(",.") & set(command[-1])
        return command[-1].lower().replace("z", "t^s") + "\n"

    monkeypatch.setattr(script.subprocess, "check_output", espeak)
    monkeypatch.setattr(script, "FOREIGN_TEST", 3)
    monkeypatch.setattr(script, "FOREIGN_DEV", 2)
    voices = script.CorpusConfig("add", "x").readers
    (tmp_path / "voices").mkdir()
    for voice in voices:
        np.zeros((40, 256), np.float32).tofile(tmp_path / "voices" / f"{voice}.bin")
    (tmp_path / "vocab.json").write_text(
        json.dumps({"vocab": {"a": 1, "ʦ": 2, ",": 3, ".": 4, " ": 5}})
    )
    texts = [f"Za, {i} a." for i in range(12)]
    (tmp_path / "it.txt").write_text("\n".join(texts))
    script.main(
        [
            "foreign",
            f"sentences={tmp_path / 'it.txt'}",
            f"voices={tmp_path / 'voices'}",
            f"vocabulary={tmp_path / 'vocab.json'}",
            "each=2",
            f"out={tmp_path / 'out'}",
        ]
    )
    jobs = script.jobs_of(str(tmp_path / "out"))
    assert Counter(job["text"] for job in jobs) == dict.fromkeys(texts, 2)
    assert Counter(job["voice"] for job in jobs) == dict.fromkeys(voices, 6)
    assert Counter(job["split"] for job in jobs) == {"test": 6, "dev": 4, "train": 14}
    assert all(len({j["split"] for j in jobs if j["text"] == text}) == 1 for text in texts)
    assert len({job["id"] for job in jobs}) == 24
    # Kokoro's symbols, with the punctuation that espeak-ng drops
    assert jobs[0]["phonemes"] == jobs[0]["text"].lower().replace("z", "ʦ")
    assert jobs[0]["ids"] == [2, 1, 3, 5, 5, 1, 4]


def test_mandarin_is_planned_by_the_phonemes_that_kokoro_was_trained_on(tmp_path, monkeypatch):
    reader = SimpleNamespace(
        ZHG2P=lambda: lambda text: (text.replace("你", "a").replace("。", "."), None)
    )
    monkeypatch.setitem(sys.modules, "misaki", SimpleNamespace(zh=reader))
    monkeypatch.setitem(sys.modules, "misaki.zh", reader)
    monkeypatch.setattr(script, "FOREIGN_TEST", 1)
    monkeypatch.setattr(script, "FOREIGN_DEV", 1)
    np.zeros((40, 256), np.float32).tofile(tmp_path / "zf.bin")
    (tmp_path / "vocab.json").write_text(json.dumps({"vocab": {"a": 1, ".": 4}}))
    (tmp_path / "zh.txt").write_text("你。\n你你。\n你你你。\n", encoding="utf-8")
    script.main(
        f"foreign sentences={tmp_path / 'zh.txt'} voices={tmp_path} vocabulary={tmp_path / 'vocab.json'} "
        f"language=zh readers=[zf] out={tmp_path / 'out'}".split()
    )
    jobs = script.jobs_of(str(tmp_path / "out"))
    assert sorted(job["ids"] for job in jobs) == [[1, 1, 1, 4], [1, 1, 4], [1, 4]]
    assert {(job["split"], job["id"][:6]) for job in jobs} == {
        (split, "zf_zh_") for split in ("test", "dev", "train")
    }


def test_no_further_sentence_is_one_of_the_first_nor_there_twice_and_no_short_text_is_trained_on():
    launch = Path(script.__file__).parent
    short = {spoken_words(t.text) for t in read_texts("short")}
    first, more = (
        [spoken_words(text) for text in (launch / name).read_text().splitlines()]
        for name in ("sentences.txt", "sentences_more.txt")
    )
    assert len(more) == len(set(more)) == 3600
    assert not set(more) & set(first) and not short & {*first, *more}
