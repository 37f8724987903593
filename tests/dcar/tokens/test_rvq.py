"""Codecs with residual layers, on tiny random models in the real formats.

SpeechTokenizer needs its package; its case is skipped without it.
"""

import numpy as np
import pytest
import torch
from tiny_codecs import needs, save_codec, save_speechtokenizer, save_xcodec2
from tones import chirp

from dcar.errors import AssetError, AudioError, CheckpointError, ConfigError, DataError
from dcar.tokens.load import load_tokenizer
from dcar.tokens.rvq import RVQCodec


@pytest.fixture(params=("encodec", "mimi", "dac", "speechtokenizer"))
def spec(request, tmp_path_factory, monkeypatch) -> str:
    kind = request.param
    if kind == "speechtokenizer":
        needs(kind, monkeypatch)
        return f"{kind}:{save_speechtokenizer(tmp_path_factory.mktemp(kind))}"
    return f"codec:{save_codec(kind, tmp_path_factory.mktemp(kind))}"


def load(spec: str, layers: int) -> RVQCodec:
    codec = load_tokenizer(f"{spec}@{layers}")
    assert isinstance(codec, RVQCodec)
    return codec


def test_codes_are_those_of_the_model(spec):
    """The wave is whole tokens long and of the codec's rate: nothing is padded or resampled."""
    codec = load(spec, 2)
    wave = chirp(0.8, 3, codec.sample_rate)
    values = torch.from_numpy(wave)[None, None]
    with torch.inference_mode():
        found = codec.model.encode(values)
    if codec.name.startswith("speech"):
        wanted = found[:2, 0]
    elif codec.name.startswith("encodec"):
        with torch.inference_mode():
            wanted = codec.model.encode(values, bandwidth=1.6).audio_codes[0, 0, :2]
    else:
        wanted = found.audio_codes[0, :2]
    [codes] = codec.encode_layers([wave], codec.sample_rate)
    np.testing.assert_array_equal(codes, wanted.numpy())
    np.testing.assert_array_equal(codec.encode([wave], codec.sample_rate)[0], codes[0])
    if spec.startswith("codec:"):  # codebooks that were fitted
        assert all(len(set(layer)) > 4 for layer in codes.tolist())


def test_sound_of_a_batch_is_that_of_its_rows(spec):
    codec = load(spec, 2)
    codes = torch.randint(
        0, codec.vocab_size, (6, 2, 40), generator=torch.Generator().manual_seed(0)
    )
    lengths = torch.tensor([40, 12, 3, 7, 0, 12])
    padded = codes.where(torch.arange(40) < lengths[:, None, None], -1)  # padding is no code
    waves = codec.decode_layers(padded, lengths)
    assert waves.shape == (6, 40 * codec.sample_rate / codec.rate_hz)
    assert waves.dtype == torch.float32
    for row, wave, length in zip(codes, waves, lengths.tolist(), strict=True):
        end = round(length * codec.sample_rate / codec.rate_hz)
        assert not wave[end:].any()
        if length:
            alone = codec.decode_layers(row[None, :, :length])[0]
            torch.testing.assert_close(
                wave[:end], alone, rtol=0, atol=1e-5 * float(alone.abs().max())
            )
    changed = codes.clone()
    changed[0, 1] = (changed[0, 1] + 1) % codec.vocab_size
    before, after = codec.decode_layers(codes)[0], codec.decode_layers(changed)[0]
    assert (after - before).abs().max() > 1e-2 * before.abs().max()  # the second layer matters


def test_sound_is_that_of_the_model(spec):
    codec = load(spec, 2)
    codes = torch.from_numpy(codec.encode_layers([chirp(0.5, 3)], 24_000)[0])
    with torch.inference_mode():
        if codec.name.startswith("speech"):
            wanted = codec.model.decode(codes[:, None])
        elif codec.name.startswith("encodec"):
            wanted = codec.model.decode(codes[None, None], [None]).audio_values
        else:
            wanted = codec.model.decode(audio_codes=codes[None]).audio_values
    wanted = wanted.ravel()
    wave = codec.decode_layers(codes[None])[0]
    torch.testing.assert_close(wave[: len(wanted)], wanted)
    assert len(wave) - len(wanted) < codec.hop and not wave[len(wanted) :].any()


def test_layers_that_a_codec_lacks(spec):
    for layers in (0, 9):
        with pytest.raises(ConfigError, match=f"@{layers}: .*@1 to @"):
            load_tokenizer(f"{spec}@{layers}")
    with pytest.raises(DataError, match="@2"):
        load(spec, 1).decode_layers(torch.zeros(1, 2, 5, dtype=torch.int64))
    with pytest.raises(AudioError, match="rvq1"):
        load(spec, 1).encode([np.zeros(0, np.float32)], 24_000)


def test_models_that_are_no_codec(tmp_path):
    from transformers import EncodecConfig, EncodecModel

    with pytest.raises(ConfigError, match="xcodec2"):
        load_tokenizer(f"codec:{save_xcodec2(tmp_path / 'other')}")
    with pytest.raises(AssetError, match="absent"):
        load_tokenizer(f"codec:{tmp_path / 'absent'}@4")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        load_tokenizer(f"codec:{tmp_path / 'empty'}")
    stereo = EncodecConfig(audio_channels=2, num_filters=2, hidden_size=8, num_lstm_layers=1)
    EncodecModel(stereo).save_pretrained(tmp_path / "stereo")
    with pytest.raises(CheckpointError, match="encodec_24khz"):
        load_tokenizer(f"codec:{tmp_path / 'stereo'}")
