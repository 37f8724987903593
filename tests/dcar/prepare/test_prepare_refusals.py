"""Settings, prepared folders, tokenizers and encoders with which nothing can be prepared or read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_corpora import toy_prepare, toy_settings
from tiny_data import ToyLayers, ToyTokenizer, write_prepared

from dcar.errors import ConfigError, DataError
from dcar.prepare.join import JoinConfig, join
from dcar.prepare.prepared import load_prepared, residual_of
from dcar.prepare.run import PrepareConfig
from dcar.prepare.shards import check_tokens


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"splits": ()}, "splits"),
        ({"splits": ("dev", "dev")}, "splits"),
        ({"speeds": ()}, "speeds"),
        ({"speeds": (1, 1.0)}, "speeds"),
        ({"min_seconds": 5, "max_seconds": 1}, "min_seconds"),
        ({"dev_fraction": 0.6, "test_fraction": 0.5}, "dev_fraction"),
        ({"filter_seconds": (20.0, 3.0)}, "filter_seconds"),
        ({"shard_size": 0}, "shard_size"),
        # was once ignored: every speaker got copies
        ({"stream": True, "limit": 2}, "stream=false"),
        ({"stream": True, "validate": True}, "stream=false"),
        ({"stream": True, "recognizer": "any"}, "stream=false"),
    ],
)
def test_settings(changes, word):
    with pytest.raises(ConfigError, match=word):
        PrepareConfig(out="x", **changes)


def test_places(corpus, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "thesis.tex").write_text("years of work")
    (tmp_path / "f").write_text("")
    for place, words in (("p", "p: .*prepared.json"), ("f", "f: ")):
        with pytest.raises(DataError, match=words):
            toy_prepare(toy_settings(corpus, tmp_path / place))


@pytest.mark.parametrize(
    ("tokens", "rate", "words"),
    [
        (np.array([], np.int64), 50, "toy .*1.00 s"),
        (np.full(50, 64), 50, r"64…64 .* 0…63"),
        (np.full(50, -1), 50, "-1.* 0…63"),
        (np.full(30, 3), 50, "30 tokens .*50 Hz"),
        (np.full(50, 3), 25, "50 tokens .*25 Hz"),
    ],
)
def test_tokens(tokens, rate, words, monkeypatch):
    monkeypatch.setattr(ToyTokenizer, "rate_hz", rate)
    assert check_tokens(np.full(rate, 3), 1.0, ToyTokenizer(), "a.wav").tolist() == [3] * rate
    with pytest.raises(DataError, match=f"a.wav: .*{words}"):
        check_tokens(tokens, 1.0, ToyTokenizer(), "a.wav")


def one_code(code: int):
    return lambda self, waves, rate: [
        np.stack([codes, np.full_like(codes, code)]) for codes in self.encode(waves, rate)
    ]


@pytest.mark.parametrize(
    ("part", "name", "wrong", "words"),
    [
        (ToyTokenizer, "_codes", lambda self, wave: np.full(-(-len(wave) // 320), 64), "tokens 64"),
        (ToyLayers, "encode_layers", one_code(64), "outside .*0…63"),
        (ToyLayers, "encode_layers", one_code(-1), "outside .*0…63"),
    ],
)
def test_a_tokenizer_or_encoder_that_misbehaves(
    part, name, wrong, words, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(part, name, wrong)
    tokenizer = part() if part is ToyLayers else None
    settings = toy_settings(corpus, tmp_path / "p", residual=part is ToyLayers)
    with pytest.raises(DataError, match=words):
        toy_prepare(settings, tokenizer)
    assert not (tmp_path / "p").exists()


def test_residual_layers(corpus, tmp_path, monkeypatch):
    settings = toy_settings(corpus, tmp_path / "p", residual=True)
    with pytest.raises(ConfigError, match="residual: "):
        toy_prepare(settings)
    monkeypatch.setattr(ToyLayers, "layers", 1)
    with pytest.raises(ConfigError, match="residual: "):
        toy_prepare(settings, ToyLayers())
    with pytest.raises(DataError, match="a: .*residual=true"):
        residual_of({"id": "a", "speech": [1, 2, 3]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({name: None}, f"prepared.json .*{name}")
            for name in ("phonemes", "tokenizer", "counts")
        ),
        ("[]", "prepared.json"),
        ("{", "prepared.json"),
        (b"caf\xe9", "prepared.json"),
        ({"format_version": 99}, "version 99"),
        ({"format_version": 2}, "prepare again"),
        ({"phonemes": {"version": "other", "size": 60}}, "other"),
        ({"files": {}}, "prepare again"),
    ],
)
def test_what_prepared_json_says(changes: Any, words: str, corpus: Path, tmp_path):
    out = tmp_path / "p"
    toy_prepare(toy_settings(corpus, out))
    info = json.loads((out / "prepared.json").read_text())
    if isinstance(changes, dict):
        info = {k: v for k, v in {**info, **changes}.items() if v is not None}
        changes = json.dumps(info)
    (out / "prepared.json").write_bytes(changes if isinstance(changes, bytes) else changes.encode())
    with pytest.raises(DataError, match=words):
        load_prepared(out, "dev")
    if "prepare again" in words:
        toy_prepare(toy_settings(corpus, out))  # made again
        assert load_prepared(out, "train").num_rows == 10


def test_folders_and_splits_that_are_not_there(tmp_path):
    data = write_prepared(tmp_path / "data")
    for folder, split, words in (
        (tmp_path, "dev", "prepared.json.*dcar prepare"),
        (data, "x", "'x'"),
    ):
        with pytest.raises(DataError, match=words):
            load_prepared(folder, split)


def test_what_cannot_be_joined(tmp_path, monkeypatch):
    data, out = str(write_prepared(tmp_path / "data")), str(tmp_path / "out")
    other = str(write_prepared(tmp_path / "third", checksum="other"))
    for ask, error, words in (
        (lambda: join(JoinConfig([data], data)), DataError, "data: .*out"),
        (lambda: join(JoinConfig([data, data], out)), DataError, "8 .*train0"),
        (lambda: join(JoinConfig([data, other], out)), DataError, "tiny@other.*tiny@abc"),
        (lambda: JoinConfig(share=-0.1), ConfigError, "share"),
        (lambda: JoinConfig([]), ConfigError, "data="),
    ):
        with pytest.raises(error, match=words):
            ask()
    about = json.loads((tmp_path / "data" / "prepared.json").read_text())
    about["phonemes"]["version"] = "text-tokenizer:other"
    (tmp_path / "data" / "prepared.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="mode=retokenize"):
        join(JoinConfig([data], out))
