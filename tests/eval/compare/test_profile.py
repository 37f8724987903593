"""The guidance profile: rows, range, intervals, files, and resuming."""

import json
from dataclasses import replace

import pytest
from compare_worker import LevelJudge, tiny_tools, transcribed
from toy_training import Deaf
from toy_world import ToyDecoder, ToyRecognizer, ToyVocoder, toy_items

from dcar.errors import CheckpointError, ConfigError, RewardError
from dcar.methods import Models
from dcar.sampling import SamplingConfig
from eval.compare.profile import Profile, ProfileConfig, main, run
from eval.compare.tools import Tools
from rl.config import DCPOConfig
from rl.policies import guidance_range


class TableDecoder(ToyDecoder):
    """The decoder of the toy world, which has a checksum as others do."""

    def checksum(self) -> str:
        return "toy"


def toy_tools(count: int, recognizer=None, vocoder=None) -> Tools:
    models = Models(TableDecoder())
    return Tools(
        {"split": {0: toy_items(count)}},
        models,
        vocoder or ToyVocoder(),
        recognizer or ToyRecognizer(),
    )


def measure(out, tools: Tools, **settings) -> Profile:
    return run(ProfileConfig(out=str(out), device="cpu", **settings), tools)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return measure(tmp_path_factory.mktemp("profile"), toy_tools(60), seeds=2)


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
    assert measured.wer_of_recordings == 0


def test_at_equal_wer_the_faster_size_is_taken(tmp_path):
    noisy = dict(max_reward_wer=100.0, sizes=[1, 3, 4])
    assert measure(tmp_path, toy_tools(5, Deaf()), **noisy).range == [3, 4]


def test_seeds_of_an_utterance_stay_together_in_its_interval(tmp_path):
    """Who hears the same in every seed learns nothing about other utterances by listening again."""
    once, again = (
        measure(
            tmp_path / str(seeds),
            toy_tools(20, Deaf()),
            sizes=[1],
            seeds=seeds,
            range_size=1,
            max_reward_wer=100.0,
        ).rows[0]
        for seeds in (1, 4)
    )
    assert again.N == 4 * once.N and again.ci == once.ci and once.ci[0] < once.wer < once.ci[1]


def test_profile_refuses_nonsense(tmp_path):
    with pytest.raises(ConfigError, match="range_size 5"):
        measure(tmp_path, toy_tools(2), range_size=5)
    # before any size but the first is decoded
    deaf = Deaf()
    with pytest.raises(RewardError, match="as a reward it would be noise"):
        measure(tmp_path, toy_tools(4, deaf))
    assert deaf.heard == 2 * 4
    with pytest.raises(RuntimeError, match="the toy vocoder broke"):
        measure(tmp_path / "broken", toy_tools(4, vocoder=ToyVocoder(lambda tokens: True)))
    with pytest.raises(CheckpointError, match="nowhere"):
        main([f"decoder={tmp_path}/nowhere", "data=starter", f"out={tmp_path}/out"])


SHORT = SamplingConfig(max_tokens=20, max_tokens_per_text_unit=4)


def test_an_interrupted_profile_resumes(tmp_path):
    """Ctrl-C loses nothing, further sizes cost only what is new, and DCPO reads the range."""
    config = dict(sizes=[1, 2], batch_size=3, sampling=SHORT, seed=0)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "out", tiny_tools(LevelJudge(fail_after=15)), **config)
    judge = LevelJudge()
    profile = measure(tmp_path / "out", tiny_tools(judge), **config)
    assert judge.calls == 3 * 6 - 15  # recordings, two sizes
    judge = LevelJudge()
    more = measure(tmp_path / "out", tiny_tools(judge), **{**config, "sizes": [1, 2, 3]})
    assert judge.calls == 6 and more.rows[:2] == profile.rows
    whole = measure(tmp_path / "whole", tiny_tools(), **{**config, "sizes": [1, 2, 3]})
    assert replace(whole, provenance={}) == replace(more, provenance={})
    written = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert written["range"] == more.range and len(written["base_checksum"]) == 64
    dcpo = DCPOConfig(str(tmp_path), use_cpu=True, guidance=str(tmp_path / "out" / "profile.json"))
    assert guidance_range(dcpo, tiny_tools().models.decoder.checksum()) == more.range


def test_command_writes_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("eval.compare.profile.load_tools", lambda *_: tiny_tools())
    main([f"out={tmp_path}", "range_size=2", "sizes=[1,2,3]", "max_tokens=20", "device=cpu"])
    result = json.loads((tmp_path / "profile.json").read_text())
    assert len(result["rows"]) == 3
    assert len(result["range"]) == 2
    assert len(result["base_checksum"]) == 64
    assert "guidance range:" in capsys.readouterr().out


def test_the_records_are_those_of_a_comparison(tmp_path):
    measure(tmp_path, tiny_tools(), sizes=[1, 2], batch_size=3, sampling=SHORT)
    methods = dict(methods=["car-1", "car-2"], scorers=[])
    assert transcribed(tmp_path, replace(tiny_tools(), scorers={}), **methods) == 0
