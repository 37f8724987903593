"""Residual layers in prepared corpora: the columns, what carries them, and what refuses or drops
them."""

import json

import numpy as np
import pytest
from tiny_codecs import save_codec
from tiny_corpora import toy_prepare, toy_settings, write_manifest
from tiny_data import ToyEncoder, ToyLayers
from tones import chirp

from dcar.errors import ConfigError, DataError
from dcar.prepare.join import JoinConfig, join
from dcar.prepare.prepared import (
    COLUMNS,
    RESIDUAL_COLUMNS,
    load_prepared,
    load_split,
    prepared_info,
    residual_of,
    without_residual,
)
from dcar.prepare.run import run
from dcar.tokens.load import load_tokenizer


def test_every_row_has_all_layers(corpus, tmp_path):
    out = tmp_path / "p"
    toy_prepare(toy_settings(corpus, tmp_path / "plain"))
    toy_prepare(toy_settings(corpus, out, residual=True), ToyLayers())
    assert prepared_info(out)["tokenizer"]["layers"] == 3
    rows, plain = load_prepared(out, "train"), load_prepared(tmp_path / "plain", "train")
    assert set(rows.column_names) == {*COLUMNS, *RESIDUAL_COLUMNS}
    assert without_residual(rows).to_list() == plain.to_list()
    assert without_residual(plain) is plain
    for row in rows:
        speech = np.array(row["speech"])
        np.testing.assert_array_equal(residual_of(row), [(speech + 1) % 64, (speech + 2) % 64])
        with pytest.raises(DataError, match="prompt_residual"):
            residual_of(row, prompt=True)
    np.testing.assert_array_equal(
        load_split(out, "train").columns["speech_tokens"], list(map(len, plain["speech"]))
    )


def test_a_codec_encodes_recordings_and_prompts_at_its_own_rate(tmp_path):
    waves = [chirp(0.8, seed) for seed in range(3)] + [chirp(1.3, 9)]
    rows = [{"split": "train", "prompt_audio": "3.wav", "prompt_text": "Oh."}] + 2 * [
        {"split": "train"}
    ]
    manifest = write_manifest(tmp_path, rows, waves, rate=24_000)
    spec = f"codec:{save_codec('encodec', tmp_path / 'codec')}"
    config = toy_settings(
        manifest,
        tmp_path / "out",
        corpus="jsonl",
        splits=("train",),
        tokenizer=f"{spec}@3",
        residual=True,
    )
    run(config, speaker_encoder=ToyEncoder(), progress=False)
    codec = load_tokenizer(f"{spec}@3")
    prepared = load_prepared(tmp_path / "out", "train", tokenizer=codec)
    assert prepared.features["residual"].feature.dtype == "uint8"  # 16 codes
    for row in prepared:
        wave = np.round(waves[int(row["id"][1:])] * 32768) / 32768  # 16-bit WAV
        found = codec.encode_layers([wave.astype(np.float32)], 24_000)[0]
        np.testing.assert_array_equal(row["speech"], found[0])
        np.testing.assert_array_equal(residual_of(row), found[1:])
    frames = len(prepared[0]["prompt_speech"])
    assert frames > 100 and residual_of(prepared[0], prompt=True).shape == (2, frames)
    assert prepared[1]["prompt_residual"] == []


def test_another_number_of_layers_is_prepared_again(corpus, tmp_path, monkeypatch):
    settings = toy_settings(corpus, tmp_path / "p", splits=("dev",), residual=True)
    toy_prepare(settings, ToyLayers())
    first = prepared_info(tmp_path / "p")["fingerprint"]
    again = ToyLayers()
    toy_prepare(settings, again)
    assert again.batches == []
    monkeypatch.setattr(ToyLayers, "layers", 2)
    toy_prepare(settings, ToyLayers())
    info = prepared_info(tmp_path / "p")
    assert info["fingerprint"] != first and info["tokenizer"]["layers"] == 2
    assert residual_of(load_prepared(tmp_path / "p", "dev")[0]).shape[0] == 1


def test_streamed_is_the_same(tmp_path):
    rows = [{"split": split} for split in ("train", "dev", "test") for _ in range(2)]
    manifest = write_manifest(tmp_path, rows, [chirp(0.6, seed, 16_000) for seed in range(6)])
    for stream in (False, True):
        config = toy_settings(
            manifest, tmp_path / str(stream), corpus="jsonl", residual=True, stream=stream
        )
        toy_prepare(config, ToyLayers())
    for split in ("train", "dev", "test"):
        assert (
            load_prepared(tmp_path / "True", split).to_list()
            == load_prepared(tmp_path / "False", split).to_list()
        )


def test_joined_utterances_have_joined_layers(corpus, tmp_path):
    toy_prepare(toy_settings(corpus, tmp_path / "p", residual=True), ToyLayers())
    join(JoinConfig([str(tmp_path / "p")], str(tmp_path / "long"), share=1.0, max_seconds=9))
    rows = load_prepared(tmp_path / "long", "train")
    assert len(rows) < 10
    for row in rows:
        speech = np.array(row["speech"])
        np.testing.assert_array_equal(residual_of(row), [(speech + 1) % 64, (speech + 2) % 64])
    toy_prepare(toy_settings(corpus, tmp_path / "plain"))
    with pytest.raises(DataError, match="plain: has 1 layers"):
        join(JoinConfig([str(tmp_path / "p"), str(tmp_path / "plain")], str(tmp_path / "out")))


def test_a_tokenizer_of_one_layer_is_refused(corpus, tmp_path, monkeypatch):
    settings = toy_settings(corpus, tmp_path / "p", residual=True)
    with pytest.raises(ConfigError, match="residual: "):
        toy_prepare(settings)
    monkeypatch.setattr(ToyLayers, "layers", 1)
    with pytest.raises(ConfigError, match="residual: "):
        toy_prepare(settings, ToyLayers())
    assert not list(tmp_path.iterdir())


def test_damaged_columns_and_lists(corpus, tmp_path):
    row = {"id": "a", "speech": [1, 2, 3], "residual": [1, 2, 3, 4]}
    with pytest.raises(DataError, match="utterance a: 4 codes in the column 'residual' for 3"):
        residual_of(row)
    with pytest.raises(DataError, match="utterance a: .*residual=true"):
        residual_of({"id": "a", "speech": [1, 2, 3]})
    out = tmp_path / "p"
    toy_prepare(toy_settings(corpus, out, splits=("dev",), residual=True), ToyLayers())
    info = json.loads((out / "prepared.json").read_text())
    (out / "prepared.json").write_text(
        json.dumps({**info, "tokenizer": {**info["tokenizer"], "layers": "3"}})
    )
    with pytest.raises(DataError, match="tokenizer.layers"):
        load_prepared(out, "dev")


@pytest.mark.parametrize("wrong", [64, -1])
def test_codes_of_every_layer_are_checked(wrong, corpus, tmp_path, monkeypatch):
    def encode_layers(self, waves, rate):
        return [np.stack([codes, np.full_like(codes, wrong)]) for codes in self.encode(waves, rate)]

    monkeypatch.setattr(ToyLayers, "encode_layers", encode_layers)
    with pytest.raises(DataError, match="outside the vocabulary 0…63"):
        toy_prepare(toy_settings(corpus, tmp_path / "p", residual=True), ToyLayers())
