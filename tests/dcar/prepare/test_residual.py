"""Residual layers in prepared corpora: the columns, what carries them, and what refuses or drops
them."""

import numpy as np
import pytest
from tiny_codecs import save_codec
from tiny_corpora import toy_prepare, toy_settings, write_manifest
from tiny_data import ToyEncoder, ToyLayers
from tones import chirp

from dcar.errors import DataError
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
    assert prepared_info(out).tokenizer.layers == 3
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
    prepared = load_prepared(tmp_path / "out", "train")
    assert prepared.features["residual"].feature.dtype == "uint8"  # 16 codes
    for row in prepared:
        wave = np.round(waves[int(row["id"][1:])] * 32768) / 32768  # 16-bit WAV
        found = codec.encode_layers([wave.astype(np.float32)], 24_000)[0]
        np.testing.assert_array_equal(row["speech"], found[0])
        np.testing.assert_array_equal(residual_of(row), found[1:])
    frames = len(prepared[0]["prompt_speech"])
    assert frames > 100 and residual_of(prepared[0], prompt=True).shape == (2, frames)
    assert prepared[1]["prompt_residual"] == []


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
