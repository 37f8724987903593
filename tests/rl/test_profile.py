"""The guidance profile: rows, range, intervals, files."""

import json

import pytest
from toy_training import Deaf, Listener
from toy_world import ToyDecoder, ToyRecognizer, ToyVocoder, toy_items

from dcar.errors import CheckpointError, ConfigError, RewardError
from dcar.sampling import SamplingConfig
from rl import profile as guidance

SAMPLING = SamplingConfig()


@pytest.fixture(scope="module")
def measured():
    return guidance.profile(
        ToyDecoder(), toy_items(60), ToyVocoder(), ToyRecognizer(), SAMPLING, seeds=2
    )


def test_profile_measures_every_chunk_size(measured):
    """The toy world's known curve: CAR-1 is perfect, every further token a pass costs words."""
    rows = measured.rows
    assert [r.k for r in rows] == [1, 2, 3, 4] and measured.range == [1, 2]
    assert [r.wer for r in rows] == pytest.approx([0.0, 0.39, 0.57, 0.643], abs=0.05)
    assert [r.tokens_per_pass for r in rows] == pytest.approx([0.95, 1.87, 2.76, 3.61], abs=0.08)
    words = 2 * sum(len(i.text.split()) for i in toy_items(60))
    for r in rows:
        assert r.N == words and r.wer == pytest.approx((r.S + r.D + r.I) / words)
        assert r.ci[0] <= r.wer <= r.ci[1] and r.ci[1] - r.ci[0] < 0.15
    assert measured.recognizer == "toy" and measured.utterances == 60


def test_at_equal_wer_the_faster_size_is_taken():
    result = guidance.profile(
        ToyDecoder(), toy_items(5), ToyVocoder(), Deaf(), SAMPLING, range_size=2, sizes=[1, 3, 4]
    )
    assert result.range == [3, 4]


def test_seeds_of_an_utterance_stay_together_in_its_interval():
    """Who hears the same in every seed learns nothing about other utterances by listening again."""
    once, again = (
        guidance.profile(
            ToyDecoder(),
            toy_items(20),
            ToyVocoder(),
            Deaf(),
            SAMPLING,
            sizes=[1],
            seeds=seeds,
            range_size=1,
        ).rows[0]
        for seeds in (1, 4)
    )
    assert again.N == 4 * once.N and again.ci == once.ci and once.ci[0] < once.wer < once.ci[1]


def test_profile_refuses_nonsense(tmp_path):
    with pytest.raises(ConfigError, match="range_size 5"):
        guidance.profile(
            ToyDecoder(), toy_items(2), ToyVocoder(), ToyRecognizer(), SAMPLING, range_size=5
        )
    with pytest.raises(RewardError, match="CAR-1: .*the toy vocoder broke"):
        guidance.profile(
            ToyDecoder(), toy_items(4), ToyVocoder(lambda t: True), ToyRecognizer(), SAMPLING
        )
    with pytest.raises(CheckpointError, match="nowhere"):
        guidance.main([f"decoder={tmp_path}/nowhere", f"out={tmp_path}/out"])


def settings_of(files) -> list[str]:
    return [
        f"decoder={files / 'base'}",
        f"data={files / 'data'}",
        f"vocoder={files / 'vocoder'}",
        "prompt_tokens=5",
        "max_tokens=20",
    ]


def test_command_writes_json(files, monkeypatch, capsys):
    monkeypatch.setattr(guidance, "load_recognizer", lambda name, device: Listener())
    guidance.main([*settings_of(files), f"out={files / 'profile'}", "range_size=3"])
    result = json.loads((files / "profile" / "profile.json").read_text())
    assert (
        len(result["rows"]) == 4
        and len(result["range"]) == 3
        and len(result["base_checksum"]) == 64
    )
    assert "guidance range:" in capsys.readouterr().out
