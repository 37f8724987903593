"""Training speech for the reward recogniser: audio, text and tokens of a split, in a manifest that it can read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_data import tiny_vocoder, write_prepared
from tiny_decoders import tiny_decoder

from dcar.audio import load_audio, resample, save_audio
from dcar.errors import CheckpointError, ConfigError
from dcar.prepare.prepared import load_prepared
from dcar.prepare.run import PrepareConfig
from dcar.prepare.run import run as prepare
from dcar.prompts.items import make_prompts
from dcar.prompts.load import vocoder_for
from dcar.recognition.manifest import load_manifest
from dcar.vocoder.resynthesize import ResynthesizeConfig, run


def test_manifest_holds_what_the_vocoder_says_and_the_tokens_it_said_it_from(tmp_path):
    data = write_prepared(tmp_path / "data", train=5)
    tiny_vocoder().save_pretrained(tmp_path / "vocoder")
    settings = dict(data=str(data), split="train", vocoder=str(tmp_path / "vocoder"), batch_size=2)
    manifest = run(ResynthesizeConfig(**settings, out=str(tmp_path / "own")))
    rows = {row["key"]: row for row in map(json.loads, manifest.read_text().splitlines())}
    prepared = {row["id"]: row for row in load_prepared(data, "train")}
    assert rows.keys() == prepared.keys()
    assert all(rows[i]["tokens"] == prepared[i]["speech"] and rows[i]["text"] == prepared[i]["text"] for i in rows)
    recordings = load_manifest(manifest, 0.04)
    assert [len(r.wave) for r in recordings] == [len(row["tokens"]) * 320 for row in rows.values()]  # 50 Hz at 16 kHz
    assert all(np.array_equal(r.tokens, row["tokens"]) for r, row in zip(recordings, rows.values(), strict=True))

    other = run(ResynthesizeConfig(**settings, out=str(tmp_path / "other"), other_voices=True, limit=4))
    assert len(other.read_text().splitlines()) == 4
    same = [np.array_equal(a.wave, b.wave) for a, b in zip(load_manifest(other, 0.04), recordings, strict=False)]
    assert not all(same)


def test_wavs_to_listen_to_stand_beside_their_texts(tmp_path):
    data = write_prepared(tmp_path / "data", train=3)
    tiny_vocoder().save_pretrained(tmp_path / "vocoder")
    manifest = run(ResynthesizeConfig(data=str(data), split="train", vocoder=str(tmp_path / "vocoder"),
                                      out=str(tmp_path / "out"), wavs=True))
    stored = np.load(manifest.with_suffix(".npz"))
    for row in load_prepared(data, "train"):
        wave, rate = load_audio(tmp_path / "out" / "train" / f"{row['id']}.wav")
        assert rate == stored["sample_rate"] and np.abs(wave - stored[row["id"]] / 32767).max() < 1e-3
        assert (tmp_path / "out" / "train" / f"{row['id']}.txt").read_text() == f"{row['text']}\n"
    assert len(list((tmp_path / "out" / "train").iterdir())) == 6


def test_tokens_of_another_rate_or_tokenizer_are_refused(tmp_path):
    data = write_prepared(tmp_path / "data", train=2)
    tiny_vocoder().save_pretrained(tmp_path / "vocoder")
    settings = dict(data=str(data), vocoder=str(tmp_path / "vocoder"), out=str(tmp_path / "out"))
    info = json.loads((data / "prepared.json").read_text())
    info["tokenizer"]["rate_hz"] = 25.0
    (data / "prepared.json").write_text(json.dumps(info))
    with pytest.raises(CheckpointError, match="speaks 50 tokens a second, tiny makes 25"):
        run(ResynthesizeConfig(**settings))
    card = tmp_path / "vocoder" / "config.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "tokenizer_checksum": "another"}))
    with pytest.raises(CheckpointError, match="trained on the tokenizer another"):
        run(ResynthesizeConfig(**settings))


class _Tokenizer:
    name, vocab_size, rate_hz, checksum = "toy", 12, 50.0, "toy-checksum"

    def encode(self, waves, sample_rate):
        return [np.zeros(-(-len(w) * 50 // sample_rate), np.int64) for w in waves]


class _Encoder:
    name = "toy"

    def embed(self, wave, sample_rate):
        return np.eye(256, dtype=np.float32)[0]


def test_recordings_are_written_in_the_same_form_at_their_speed(tmp_path):
    time = np.arange(24_000) / 24_000
    wave = (0.3 * np.sign(np.sin(2 * np.pi * 150 * time))).astype(np.float32)
    save_audio(tmp_path / "a.wav", wave, 24_000)
    (tmp_path / "m.jsonl").write_text(
        json.dumps({"id": "u", "audio": "a.wav", "text": "Now.", "speaker": "s", "split": "train"}))
    prepare(PrepareConfig(out=str(tmp_path / "p"), corpus="jsonl", path=str(tmp_path / "m.jsonl"),
                          splits=("train",), speeds=(1.0, 0.8)),
            tokenizer=_Tokenizer(), speaker_encoder=_Encoder(), progress=False)
    settings = dict(data=str(tmp_path / "p"), out=str(tmp_path / "out"), recordings=True)
    plain, slow = load_manifest(run(ResynthesizeConfig(**settings)), 0.04)
    expected = [resample(wave, 24_000 * speed, 16_000) for speed in (1.0, 0.8)]
    for got, wanted in zip((plain, slow), expected, strict=True):
        assert abs(len(got.wave) - len(wanted)) <= 1
        shared = min(len(got.wave), len(wanted))
        difference = got.wave[:shared] / 32767 - wanted[:shared]
        assert np.sqrt(np.mean(difference[100:-100] ** 2)) < 0.02  # the file has 16 bits, and was resampled once more
    with pytest.raises(ConfigError, match="not both"):
        ResynthesizeConfig(recordings=True, other_voices=True)


def test_stage_two_hands_prompts_to_a_vocoder_that_hears_them(tmp_path, monkeypatch):
    """CosyVoice's vocoder in a DCPO recipe once stopped for want of them. Other rates are refused here as well."""
    for i in range(2):
        save_audio(tmp_path / f"{i}.wav", (0.3 * np.sign(np.sin(np.arange(24_000 + 2400 * i) / 25))).astype(np.float32),
                   24_000)
    rows = [{"id": f"u{i}", "audio": f"{i}.wav", "text": f"Now {i}.", "speaker": "s", "split": "dev"} for i in range(2)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(PrepareConfig(out=str(tmp_path / "p"), corpus="jsonl", path=str(tmp_path / "m.jsonl"), splits=("dev",)),
            tokenizer=_Tokenizer(), speaker_encoder=_Encoder(), progress=False)
    items = make_prompts(load_prepared(tmp_path / "p", "dev"), 10, 0)
    base = tiny_decoder(text_vocab_size=64)
    given = []

    def load(spec, device, prompts):
        given.append(prompts)
        return tiny_vocoder()

    monkeypatch.setattr("dcar.prompts.load.load_vocoder", load)
    vocoder_for(base, str(tmp_path / "p"), items, "cosyvoice:folder")
    wave, rate = given[0](items[0].speaker_embedding)
    assert rate == 24_000 and len(wave) == 24_000 + 2400 * int(items[0].prompt_utterance_id[1:])
    vocoder_for(base, str(tmp_path / "p"), items, "starter")
    assert given[1] is None
    info = json.loads((tmp_path / "p" / "prepared.json").read_text())
    info["tokenizer"]["rate_hz"] = 25.0
    (tmp_path / "p" / "prepared.json").write_text(json.dumps(info))
    with pytest.raises(CheckpointError, match="speaks 50 tokens a second, toy makes 25"):
        vocoder_for(base, str(tmp_path / "p"), items, "starter")
