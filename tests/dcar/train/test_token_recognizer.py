"""Training of the recogniser of speech tokens: it learns, refuses what does not belong together."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from launched import two_processes
from tiny_data import CODES, counting, tiny_split, write_prepared
from tiny_training import SMALL, arguments, check_resumption, log_of

from dcar.cli import main
from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.prepare.columns import Split
from dcar.prepare.prepared import load_prepared
from dcar.recognition.load import load_token_recognizer
from dcar.recognition.tokens import TokenRecognizer, TokenRecognizerConfig
from dcar.train import token_recognizer
from dcar.train.token_recognizer import TokenTexts, TrainTokenRecognizerConfig, run


def phonemes(tokens: list[int]) -> list[int]:
    """A phoneme for every third code, and what is spoken there."""
    return [1 + t // 3 for t in tokens if t % 3 == 1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_prepared(
        tmp_path_factory.mktemp("data") / "prepared",
        train=24,
        dev=8,
        speech=counting,
        text=phonemes,
    )


def settings(data, out, **changes) -> dict:
    return dict(data=str(data), out=str(out), longest_span=2, **SMALL) | changes


def config_of(data, out, **changes) -> TrainTokenRecognizerConfig:
    return TrainTokenRecognizerConfig(
        **settings(data, out, **changes), model=TokenRecognizerConfig(hidden_size=16)
    )


def test_the_command_learns_and_leaves_everything_behind(data, tmp_path):
    out = tmp_path / "out"
    options = settings(data, out, max_steps=100, eval_steps=50, save_steps=50, half_weights="true")
    main(["train-recognizer", *arguments(options), "model.hidden_size=16"])
    model = load_token_recognizer(str(out))
    assert model.config.hidden_size == 16 and model.config.tokenizer == "tiny@abc"
    assert model.config.speech_vocab_size == CODES and model.hidden_code == CODES
    evaluations = log_of(out, "eval_loss")
    assert [line["step"] for line in evaluations] == [50, 100, 100]
    assert evaluations[-1]["eval_phoneme_error_rate"] < 0.1 and evaluations[-1]["eval_loss"] < 0.3
    losses = [line["loss"] for line in log_of(out, "loss")]
    assert losses[-1] < 0.2 * losses[0]
    source = json.loads((out / "provenance.json").read_text())
    assert source["checksum"] == model.checksum() and source["steps"] == 100
    assert "Token recogniser" in (out / "README.md").read_text()
    assert "hidden_size: 16" in (out / "config.yaml").read_text()


@pytest.mark.slow
def test_two_processes_evaluate_all_of_the_dev_split(data, tmp_path):
    options = settings(data, tmp_path / "two", max_steps=2, per_device_train_batch_size=3)
    two_processes("-m", "dcar.train.token_recognizer", *arguments(options), "model.hidden_size=16")
    assert json.loads((tmp_path / "two/provenance.json").read_text())["processes"] == 2
    model, dev = TokenRecognizer.from_pretrained(tmp_path / "two"), load_prepared(data, "dev")
    told = model.log_likelihood(dev["speech"], dev["text_ids"])
    symbols = [len(text) for text in dev["text_ids"]]
    assert log_of(tmp_path / "two")[-1]["eval_loss"] == pytest.approx(
        -np.dot(told, symbols) / sum(symbols), rel=1e-4
    )


def test_resumed_training_equals_one_that_never_stopped(data, tmp_path):
    check_resumption(run, partial(config_of, data), tmp_path)


def split_of(speech: list[list[int]], text_ids: list[list[int]]) -> Split:
    rows = tiny_split("train", len(speech))
    changed = {"speech": speech, "text_ids": text_ids}
    return Split.of(
        rows.map(
            lambda row, i: {name: values[i] for name, values in changed.items()}, with_indices=True
        )
    )


def test_what_training_sees_of_an_utterance_is_its_address_alone(data):
    config = config_of(data, "unused", input_corruption=0.3, longest_span=4)
    config.model.speech_vocab_size = CODES
    texts = TokenTexts(split_of([[1] * 100, [2] * 50], [[1, 2], [3]]), config, "here")
    first, again, later = (texts[e, 0]["frames"] for e in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, later)
    hidden = [int((texts[e, 0]["frames"] == CODES).sum()) for e in range(50)]
    assert min(hidden) == 1 and max(hidden) == 4  # one span in a hundred tokens
    others = np.mean([((s := texts[e, 0]["frames"]) != 1)[s < CODES].mean() for e in range(50)])
    assert others == pytest.approx(0.3 * (1 - 1 / CODES), abs=0.03)
    config.input_corruption, config.longest_span = 0.0, 0
    assert texts[0, 0]["frames"].tolist() == [1] * 100


def test_texts_that_do_not_fit_into_their_tokens_are_left_out_or_refused(data, caplog):
    config = config_of(data, "unused")
    speech = [[1, 2], *[[1, 2, 3]] * 40]  # two alike need a token between them
    texts = TokenTexts(split_of(speech, [[1, 1]] * 41), config, "here")
    assert "here: 1 utterances" in caplog.text
    assert len(texts) == 40 and texts.frames[0] == [1, 2, 3] and list(texts.lengths) == [3] * 40
    with pytest.raises(DataError, match="here: 3 of 43 "):
        TokenTexts(split_of([*speech, *[[1, 2]] * 2], [[1, 1]] * 43), config, "here")


def test_what_does_not_belong_together_is_refused(data, tmp_path):
    out = tmp_path / "out"
    run(config_of(data, out, max_steps=2, save_steps=1))
    other = write_prepared(
        tmp_path / "other", train=12, checksum="xyz", speech=counting, text=phonemes
    )
    with pytest.raises(CheckpointError, match="tiny@abc.*tiny@xyz.*resume_from_checkpoint=never"):
        run(config_of(other, out, max_steps=4))
    info = json.loads((other / "prepared.json").read_text())
    info["phonemes"]["version"] = "text-tokenizer:abc"
    (other / "prepared.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match="other: .*mode=retokenize"):
        run(config_of(other, tmp_path / "x"))
    with pytest.raises(ConfigError, match="input_corruption"):
        config_of(data, out, input_corruption=1.0)


def test_evaluation_is_in_float32_whatever_the_training_computes_in(data, tmp_path):
    model = run(config_of(data, tmp_path / "out", bf16=True))
    last = log_of(tmp_path / "out", "eval_loss")[-1]
    dev = TokenTexts(
        token_recognizer.load_split(str(data), "dev"), config_of(data, "unused"), "dev"
    )
    told = torch.tensor(model.log_likelihood(dev.frames, dev.texts)) * torch.tensor(
        [len(t) for t in dev.texts]
    )
    assert last["eval_loss"] == pytest.approx(
        -float(told.sum()) / sum(map(len, dev.texts)), rel=1e-5
    )
    assert isinstance(model, TokenRecognizer) and model.output.weight.dtype == torch.float32
