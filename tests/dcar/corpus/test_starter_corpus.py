"""The script that speaks the starter corpus, as far as it goes without the voices."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from dcar.audio import save_audio
from dcar.prompts.texts import read_texts
from dcar.text.wer import spoken_words
from launch import make_starter_corpus as script


def test_a_blend_is_the_weighted_sum_of_styles_at_its_number_of_phonemes(monkeypatch):
    styles = {name: np.random.default_rng(i).standard_normal((4, 256)) for i, name in enumerate("ab")}
    monkeypatch.setattr(script, "_styles", styles, raising=False)
    job = {"voice": "blend_0000", "ids": [1, 2], "blend": {"a": 0.25, "b": 0.75}}
    assert np.allclose(script._style(job), (0.25 * styles["a"][2] + 0.75 * styles["b"][2])[None])
    assert np.allclose(script._style({"voice": "a", "ids": [0] * 9}), styles["a"][3][None])  # past the last row


def test_mixtures_sum_to_one_and_may_lie_beyond_their_voices():
    voices, rng = list("abcdefgh"), random.Random(0)
    for _ in range(50):
        inside, beyond = script._mixture(voices, rng, away=0.0), script._mixture(voices, rng, away=0.4)
        assert sum(inside.values()) == pytest.approx(1) == sum(beyond.values())
        assert len(inside) == 3 and min(inside.values()) > 0
        assert len(beyond) == 4 and [w for w in beyond.values() if w < 0] == [min(beyond.values())]
        assert -0.4 <= min(beyond.values()) < 0


def test_a_corpus_of_training_speech_alone_is_packed(tmp_path):
    (tmp_path / "speech").mkdir()
    jobs = [{"id": f"blend_{i}", "split": "train", "voice": f"blend_{i}", "text": "A house."} for i in range(3)]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    for job in jobs[:2]:
        save_audio(tmp_path / "speech" / f"{job['id']}.ogg", np.full(2400, 0.1, np.float32), 24_000)
    with pytest.raises(SystemExit, match="1 utterances were not spoken, the first is blend_2"):
        script.pack(tmp_path, tmp_path / "corpus", partial=False)
    script.pack(tmp_path, tmp_path / "corpus", partial=True)
    assert [p.name for p in (tmp_path / "corpus").iterdir()] == ["train.parquet"]
    assert pq.read_table(tmp_path / "corpus" / "train.parquet")["speaker"].to_pylist() == ["blend_0", "blend_1"]


def test_further_sentences_are_planned_once_each_at_speeds_within_the_bounds(tmp_path, monkeypatch):
    class Hibari:
        def phonemize(self, text: str) -> list[str]:
            return list(text.lower())

    monkeypatch.setitem(sys.modules, "hibari", SimpleNamespace(Hibari=Hibari))
    texts = [f"Sentence {i}." for i in range(200)]
    (tmp_path / "more.txt").write_text("\n".join(texts) + "\n\n")
    for out in ("one", "two"):
        script.add(tmp_path / "more.txt", 7, (0.8, 1.25), tmp_path / out)
    jobs = [json.loads(line) for line in (tmp_path / "one" / "jobs.jsonl").open()]
    assert [job["text"] for job in jobs] == texts and len({job["id"] for job in jobs}) == len(texts)
    speeds = np.array([job["speed"] for job in jobs])
    assert {job["voice"] for job in jobs} == {script.FAST_VOICE} and jobs[0]["phonemes"] == "sentence 0."
    assert 0.8 <= speeds.min() < 0.82 and 1.22 < speeds.max() <= 1.25 and abs(np.log(speeds).mean()) < 0.03
    assert (tmp_path / "one" / "jobs.jsonl").read_bytes() == (tmp_path / "two" / "jobs.jsonl").read_bytes()


def test_no_further_sentence_is_one_of_the_first_nor_there_twice_and_no_short_text_is_trained_on():
    launch, short = Path(script.__file__).parent, {spoken_words(t.text) for t in read_texts("short")}
    first, more = ([spoken_words(text) for text in (launch / name).read_text().splitlines()] for name in
                   ("starter_sentences.txt", "starter_sentences_more.txt"))
    assert len(more) == len(set(more)) == 3600
    assert not set(more) & set(first) and not short & {*first, *more}
