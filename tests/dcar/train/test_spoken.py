"""The best step of a training by what it says."""

import json
from pathlib import Path

import pytest
import torch
from tiny_data import tiny_vocoder
from tiny_training import log_of, tiny_config

from dcar.errors import CheckpointError
from dcar.model.car import CARDecoder
from dcar.prompts.load import load_prompts
from dcar.sampling import SamplingConfig
from dcar.train import spoken
from dcar.train.car import run
from dcar.train.settings import SpokenSettings
from dcar.train.spoken import RECORD, SpokenJudge

ERRORS = {"rising": [3, 4, 5, 6], "between": [6, 5, 3, 4]}


@pytest.fixture(scope="module")
def start(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    run(tiny_config(data, folder, max_steps=2))
    return folder


class Scripted:
    """Says of the n-th decoder that it is asked about what stands in the script; keeps their
    weights."""

    def __init__(self, script: list[int]):
        self.script, self.seen = list(script), []

    def __call__(self, model):
        self.seen.append({name: t.clone() for name, t in model.state_dict().items()})
        return [self.script[len(self.seen) - 1], 0], [10, 10]


def scripted(monkeypatch, script: list[int]) -> Scripted:
    judge = Scripted(script)
    monkeypatch.setattr(spoken.SpokenJudge, "load", classmethod(lambda cls, *a: judge))
    return judge


def config(data, start, out, **changes):
    return tiny_config(
        data,
        out,
        init_from=str(start),
        eval_steps=2,
        save_steps=2,
        spoken=SpokenSettings(sentences=2),
        **changes,
    )


@pytest.mark.parametrize(("name", "best"), [("rising", 0), ("between", 4)])
def test_the_step_of_fewest_word_errors_is_written(name, best, data, start, tmp_path, monkeypatch):
    judge = scripted(monkeypatch, ERRORS[name])
    trained = run(config(data, start, tmp_path))
    assert len(judge.seen) == 4  # steps 0, 2, 4, 6, each once
    assert all(
        torch.equal(t, judge.seen[best // 2][name]) for name, t in trained.state_dict().items()
    )
    # nothing that was tried is better: the decoder that training started from, bit for bit
    if not best:
        assert trained.checksum() == CARDecoder.from_pretrained(start).checksum()
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["best"] == best and sorted(map(int, record["steps"])) == [0, 2, 4, 6]
    assert [line["eval_spoken_wer"] for line in log_of(tmp_path, "eval_spoken_wer")] == [
        e / 20 for e in ERRORS[name]
    ]
    assert json.loads((tmp_path / "provenance.json").read_text())["steps"] == best
    assert [p.name for p in tmp_path.glob("best-*")] == [f"best-{best}.safetensors"]


def test_a_resumed_run_ends_in_the_same_step_and_judges_none_twice(
    data, start, tmp_path, monkeypatch
):
    scripted(monkeypatch, ERRORS["between"])
    whole = run(config(data, start, tmp_path / "whole"))
    # and then it is cut off, behind the checkpoint of step 4
    first = scripted(monkeypatch, ERRORS["between"][:3])
    with pytest.raises(IndexError):
        run(config(data, start, tmp_path / "parts"))
    assert len(first.seen) == 4
    second = scripted(monkeypatch, ERRORS["between"][3:])
    parts = run(config(data, start, tmp_path / "parts"))
    assert len(second.seen) == 1 and parts.checksum() == whole.checksum()
    # finished: nothing is judged
    assert run(config(data, start, tmp_path / "parts")).checksum() == whole.checksum()
    (tmp_path / "parts" / RECORD).write_text("{")
    with pytest.raises(CheckpointError, match="spoken.json: .*resume_from_checkpoint=never"):
        run(config(data, start, tmp_path / "parts"))


def test_the_judge_hears_what_the_decoder_says(data, start):
    """The same decoder is judged alike twice, its training mode stays, and an empty transcript
    deletes every word."""

    class Deaf:
        name = "deaf"

        def transcribe(self, waves, sample_rate):
            return ["" for _ in waves]

    model = CARDecoder.from_pretrained(start).train()
    items = load_prompts(str(data), "dev", model, 5, 0, 3)
    settings = SpokenSettings(sentences=3, chunk=9, sampling=SamplingConfig(max_tokens=20))
    judge = SpokenJudge(settings, items, tiny_vocoder(), Deaf())
    assert judge(model) == judge(model) == ([3, 3, 3], [3, 3, 3])
    assert model.training
