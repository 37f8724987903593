"""The script that speaks the starter corpus, as far as it goes without the voices."""

from __future__ import annotations

import json
import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from dcar.audio import save_audio
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
