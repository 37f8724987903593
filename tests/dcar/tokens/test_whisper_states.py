"""Whisper's encoder in PyTorch against CTranslate2, and the file that its weights come from."""

import struct

import numpy as np
import pytest
import torch
from fake_gpu import fake_gpu
from tones import chirp

from dcar.corpus.read import load_corpus
from dcar.errors import AudioError, CheckpointError
from dcar.sources.shipped import shipped
from dcar.tokens.load import load_tokenizer
from dcar.tokens.whisper import WhisperEncoder, _model
from dcar.tokens.whisper_states import (
    _mel_filters,
    ctranslate2_weights,
    log_mel,
    shared_states,
    whisper_base_states,
)

RATE = 16_000


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as device:
        yield device
    shared_states.cache_clear()
    _mel_filters.cache_clear()


def test_features_are_those_of_faster_whisper():
    waves = [chirp(seconds, i, RATE) for i, seconds in enumerate((1.0, 0.3, 0.04, 2.0))]
    features, frames = log_mel(waves, torch.device("cpu"))
    assert features.shape == (4, 200, 80) and frames.tolist() == [100, 30, 4, 200]
    for row, wave in enumerate(waves):
        wanted = torch.from_numpy(_model().feature_extractor(wave, padding=0).T)
        torch.testing.assert_close(features[row, : frames[row]], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tail", [0.5, 0.0])
def test_batched_states_are_those_of_ctranslate2(tail, gpu):
    waves = [chirp(seconds, i) for i, seconds in enumerate((1.0, 0.3, 0.02, 2.0))]
    on_gpu, on_cpu = (
        WhisperEncoder(tail, device=device).batch(waves, 24_000) for device in (gpu, "cpu")
    )
    assert [len(states) for states in on_gpu] == [50, 15, 1, 100]
    assert all(states.device == gpu for states in on_gpu)
    for got, wanted in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(got.cpu(), torch.from_numpy(wanted), atol=1e-3, rtol=0)
    assert WhisperEncoder(device=gpu).batch([], RATE) == []
    with pytest.raises(AudioError):
        WhisperEncoder(device=gpu).batch([waves[0], np.zeros(0, np.float32)], RATE)


def test_the_starter_tokenizer_gives_the_same_codes_on_a_gpu(gpu):
    sounds = [u.load() for u in load_corpus("starter", str(shipped("corpus")), "dev")[:4]]
    waves, rate = [wave for wave, _ in sounds], sounds[0][1]
    wanted = load_tokenizer("starter").encode(waves, rate)
    for got, codes in zip(
        load_tokenizer("starter", str(gpu)).encode(waves, rate), wanted, strict=True
    ):
        np.testing.assert_array_equal(got, codes)


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(CheckpointError, match=r"layers \[7\]"):
        whisper_base_states([7])


def _variable(name: str, values: np.ndarray, kind: int) -> bytes:
    text = name.encode() + b"\0"
    dims = struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
    return (
        struct.pack("<H", len(text))
        + text
        + dims
        + struct.pack("<BI", kind, values.nbytes)
        + values.tobytes()
    )


def test_reading_a_model_file(tmp_path):
    half = np.arange(6, dtype=np.float16).reshape(2, 3)
    body = _variable("encoder/a", half, 4) + _variable("decoder/b", np.ones(2, np.float32), 0)
    head = struct.pack("<IH2sII", 6, 2, b"S\0", 3, 2)
    path = tmp_path / "model.bin"
    path.write_bytes(head + body)
    found = ctranslate2_weights(path, "encoder/")
    assert list(found) == ["a"] and torch.equal(found["a"], torch.arange(6.0).view(2, 3))
    path.write_bytes((head + body)[:-30])
    with pytest.raises(CheckpointError, match="not a readable CTranslate2 model"):
        ctranslate2_weights(path)
    path.write_bytes(struct.pack("<I", 5) + head[4:] + body)
    with pytest.raises(CheckpointError, match="version 5"):
        ctranslate2_weights(path)
