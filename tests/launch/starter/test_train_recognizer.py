"""Training of the recogniser on an encoder's states: it learns, resumes, keeps what the encoder
said, refuses."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_corpora import write_manifest
from tiny_training import SMALL, log_of

from dcar.errors import AudioError, CheckpointError, ConfigError, DataError, TextError
from dcar.recognition.encoder import EncoderRecognizer, EncoderRecognizerConfig
from dcar.recognition.load import load_recognizer
from launch.starter import train_recognizer
from launch.starter.train_recognizer import (
    StateTexts,
    TrainEncoderRecognizerConfig,
    load_recordings,
    run,
)

RATE = 16_000
PITCH = {"a": 220.0, "b": 700.0, " ": 0.0}


def spoken(text: str) -> np.ndarray:
    """A fifth of a second of a tone for every letter, of silence between words and letters."""
    time = np.arange(RATE // 5) / RATE
    parts = [np.r_[0.3 * np.sin(2 * np.pi * PITCH[c] * time), np.zeros(RATE // 10)] for c in text]
    return np.concatenate(parts).astype(np.float32)


def write_spoken(folder, name: str, count: int, seed: int):
    rng = np.random.default_rng(seed)
    texts = [
        " ".join("".join(rng.choice(["a", "b"], rng.integers(1, 4))) for _ in range(2))
        for _ in range(count)
    ]
    return write_manifest(
        folder / name,
        [{"text": t} for t in texts],
        [spoken(t) for t in texts],
        name=f"{name}.jsonl",
    )


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """Manifests to train on and to validate; what the encoder says of a recording is kept for
    all tests."""
    folder, said, hears = tmp_path_factory.mktemp("speech"), {}, train_recognizer.encoder_states

    def kept(encoder, waves, rate):
        for wave in waves:
            if wave.tobytes() not in said:
                [said[wave.tobytes()]] = hears(encoder, [wave], rate)
        return [said[wave.tobytes()] for wave in waves]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_recognizer, "encoder_states", kept)
        yield write_spoken(folder, "train", 24, 0), write_spoken(folder, "dev", 6, 1)


def settings(speech, out, **changes) -> dict:
    train, dev = map(str, speech)
    return (
        dict(
            train_manifest=train,
            dev_manifest=dev,
            out=str(out),
            longest_span=2,
            bf16=False,
            half_weights=False,
            **SMALL,
        )
        | changes
    )


def config_of(speech, out, **changes) -> TrainEncoderRecognizerConfig:
    return TrainEncoderRecognizerConfig(
        **settings(speech, out, **changes), model=EncoderRecognizerConfig(hidden_size=16)
    )


def test_a_run_learns_and_leaves_everything_behind(speech, tmp_path):
    out = tmp_path / "ear"
    config = config_of(speech, out, max_steps=120, eval_steps=60, save_steps=60, half_weights=True)
    run(replace(config, model=EncoderRecognizerConfig(hidden_size=16, dilations=(1, 2))))
    ear = load_recognizer(f"encoder:{out}")
    assert isinstance(ear, EncoderRecognizer) and ear.config.hidden_size == 16
    assert ear.transcribe([spoken("ab b"), spoken("b aab")], RATE) == ["ab b", "b aab"]
    evaluations = log_of(out, "eval_loss")
    assert [line["step"] for line in evaluations] == [60, 120, 120]
    assert evaluations[-1]["eval_wer"] < 0.1 and evaluations[-1]["eval_loss"] < 0.3
    source = json.loads((out / "provenance.json").read_text())
    assert source["checksum"] == ear.checksum() and source["data"]["train_utterances"] == 24
    assert "24 utterances, `train.jsonl`" in (out / "README.md").read_text()
    assert not (out / "states").exists()  # a hundred times the size of the model


def test_resumed_training_equals_one_that_never_stopped_and_the_encoder_hears_once(
    speech, tmp_path, monkeypatch
):
    whole, out = run(config_of(speech, tmp_path / "whole")), tmp_path / "halves"
    monkeypatch.setattr(train_recognizer, "SHARD", 10)
    monkeypatch.setattr(train_recognizer.shutil, "rmtree", lambda folder: None)
    run(config_of(speech, out))
    assert len(list((out / "states").glob("*.npy"))) == 3 + 1
    for name in ("model.safetensors", "log.jsonl"):
        (out / name).unlink()
    shutil.move(out / "checkpoint-8", tmp_path / "gone")
    sorted((out / "states").glob("*.npy"))[1].unlink()
    heard = []
    hears = train_recognizer.encoder_states

    def counted(encoder, waves, rate):
        heard.extend(waves)
        return hears(encoder, waves, rate)

    monkeypatch.setattr(train_recognizer, "encoder_states", counted)
    assert run(config_of(speech, out)).checksum() == whole.checksum()
    assert 0 < len(heard) <= 10
    assert run(config_of(speech, tmp_path / "other", seed=1)).checksum() != whole.checksum()


def test_what_training_sees_of_an_utterance_is_its_address_alone(speech, tmp_path):
    config = config_of(speech, tmp_path, dropout=0.25, longest_span=4)
    recordings = load_recordings(speech[0])[:2]
    kept = [np.ones((100, 512), np.float16), np.ones((50, 512), np.float16)]
    texts = StateTexts(recordings, kept, config)
    first, again, later = (texts[e, 0]["frames"] for e in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, later) and kept[0].all()
    assert (
        "".join(" abcdefghijklmnopqrstuvwxyz'"[s - 1] for s in texts[0, 0]["text"])
        == recordings[0].text
    )
    seen = np.stack([texts[e, 0]["frames"] for e in range(60)])
    spans = (seen == 0).all(-1).sum(-1)
    assert spans.min() == 1 and spans.max() == 4  # one span in a hundred states
    # the rest grows by what is hidden
    assert seen[(seen != 0).any(-1)].mean() == pytest.approx(1.0, abs=0.01)
    assert (seen[(seen != 0).any(-1)] == 0).mean() == pytest.approx(0.25, abs=0.01)


def test_what_does_not_belong_together_is_refused(speech, tmp_path, monkeypatch):
    out, recordings = tmp_path / "out", load_recordings(speech[1])
    run(config_of(speech, out, max_steps=2, save_steps=1))
    small_alphabet = replace(config_of(speech, out), model=EncoderRecognizerConfig(alphabet="ab"))
    for error, message, ask in (
        (
            CheckpointError,
            "another recogniser.*resume_from_checkpoint=never",
            lambda: run(TrainEncoderRecognizerConfig(**settings(speech, out))),
        ),
        (
            DataError,
            "absent.jsonl",
            lambda: run(config_of((tmp_path / "absent.jsonl", speech[1]), tmp_path / "x")),
        ),
        (TextError, r"\[' '\]", lambda: StateTexts(recordings, [], small_alphabet)),
        (ConfigError, "dropout", lambda: config_of(speech, out, dropout=1.0)),
    ):
        with pytest.raises(error, match=message):
            ask()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="multi_gpu.yaml.*FSDP"):
        run(config_of(speech, tmp_path / "y"))
    assert torch.is_grad_enabled()


def test_rows_that_cannot_be_trained_on(speech, caplog):
    good = json.loads(speech[0].read_text().splitlines()[0]) | {"text": "a"}
    fast = good | {"text": "far too many words for a second and a half of audio " * 4}
    path = speech[0].with_name("fast.jsonl")
    path.write_text("\n".join([json.dumps(good)] * 20 + [json.dumps(fast)]))
    assert len(load_recordings(path)) == 20
    assert "fast.jsonl:21" in caplog.text
    for bad, error, message in (
        (good | {"text": "…"}, DataError, r"fast\.jsonl:1: .*'…'"),
        (good | {"audio": "no.wav"}, AudioError, r"fast\.jsonl:1: .*no\.wav"),
        ({"text": "a"}, DataError, r"fast\.jsonl:1: .*id, audio, speaker"),
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(error, match=message):
            load_recordings(path)
