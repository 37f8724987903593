"""Residual codebooks end to end: recordings -> all layers -> decoder and residual model ->
table."""

from pathlib import Path

import numpy as np
import pytest
from tiny_codecs import save_codec
from tiny_corpora import toy_settings, write_manifest
from tiny_data import ToyEncoder
from tiny_training import MODEL, arguments
from tones import chirp

from dcar.cli import main
from dcar.prepare.run import run as prepare
from dcar.prompts.load import corpus_recordings
from dcar.vocoder.base import PromptAudio
from dcar.vocoder.load import load_vocoder
from eval.compare import run as compare
from eval.results.types import RESYNTHESIS

RUN = dict(
    prompt_tokens=10,
    per_device_train_batch_size=4,
    max_steps=3,
    eval_steps=3,
    save_steps=3,
    logging_steps=1,
    warmup_steps=1,
)


class Judge:
    """Transcribes everything alike."""

    name = "toy"

    def transcribe(self, waves, sample_rate):
        assert all(np.isfinite(wave).all() for wave in waves)
        return ["line" for _ in waves]


@pytest.fixture(params=["encodec", "mimi"])
def world(request, tmp_path) -> Path:
    """A corpus with the layers of a codec, a decoder of its first layer, and a residual model."""
    codec = f"codec:{save_codec(request.param, tmp_path / 'codec')}@4"
    rows = [
        {"split": split, "speaker": f"s{i % 2}"} for i in range(8) for split in ("train", "dev")
    ]
    rows[1] |= {"prompt_audio": "0.wav", "prompt_text": "Line zero."}
    manifest = write_manifest(tmp_path, rows, [chirp(1.2, seed) for seed in range(16)], rate=24_000)
    data = tmp_path / "prepared"
    settings = dict(corpus="jsonl", splits=("train", "dev"), tokenizer=codec, residual=True)
    prepare(toy_settings(manifest, data, **settings), speaker_encoder=ToyEncoder(), progress=False)
    decoder = {f"model.{name}": value for name, value in MODEL.items()}
    main(["train", *arguments(dict(data=data, out=tmp_path / "car") | RUN | decoder)])
    shape = {name: decoder[name] for name in decoder if "head" not in name or "attention" in name}
    del shape["model.bos"]
    main(["train-residual", *arguments(dict(data=data, out=tmp_path / "residual") | RUN | shape)])
    return tmp_path


def test_from_recordings_to_a_table(world, monkeypatch):
    monkeypatch.setattr("eval.compare.tools.load_recognizer", lambda name, device: Judge())
    spec = f"residual:{world / 'residual'}"
    settings = dict(
        data=world / "prepared",
        split="dev",
        decoder=world / "car",
        vocoder=spec,
        scorers="[]",
        methods="[car-1,car-3]",
        prompt_tokens=10,
        timing_utterances=2,
        audio_utterances=1,
        resamples=100,
        report="false",
        out=world / "compare",
        device="cpu",
    )
    result = compare.run(compare.load_config(compare.CompareConfig, arguments(settings)))
    rows = {row.method: row for row in result.first.rows}
    assert {"car-1", "car-3", "recording", RESYNTHESIS} <= set(rows)
    assert all(rows[name].speed.rtf > 0 for name in ("car-1", "car-3"))


def test_waveforms_of_a_batch_have_whole_tokens_and_equal_single_ones(world):
    recording = corpus_recordings(str(world / "prepared"))
    features = np.random.default_rng(0).normal(size=(3, 298)).astype(np.float32)
    prompts = PromptAudio((f, lambda i=i: recording(f"u{i}")) for i, f in enumerate(features))
    vocoder = load_vocoder(f"residual:{world / 'residual'}", prompts=prompts)
    tokens, texts = [[3, 1, 4, 1], [5, 9, 2, 6, 5, 3], [5]], ["a red house", "yes", "one two three"]
    waves = vocoder.synthesize(tokens, features, texts)
    samples = vocoder.sample_rate / vocoder.token_rate
    assert [len(wave) for wave in waves] == [len(row) * samples for row in tokens]
    for i, wave in enumerate(waves):
        alone = vocoder.synthesize(tokens[i : i + 1], features[i : i + 1], texts[i : i + 1])[0]
        np.testing.assert_allclose(wave, alone, atol=1e-5)
        assert np.abs(wave).max() > 0
