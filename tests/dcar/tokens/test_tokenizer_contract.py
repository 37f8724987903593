"""The contract of every tokenizer: rate and range of its codes, which depend neither on batch nor
on order. Those of packages that are not installed are skipped."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_codecs import needs, save_codec, save_speechtokenizer, save_xcodec2
from tiny_pretrained import save_hubert
from tones import chirp

from dcar.errors import CheckpointError
from dcar.tokens.base import SpeechTokenizer
from dcar.tokens.hubert import shared_hubert
from dcar.tokens.kmeans import KMeansTokenizer
from dcar.tokens.load import load_tokenizer
from dcar.tokens.whisper import WhisperEncoder

RATES = {  # codes a second, and how many there are
    "whisper": (50, 16),
    "hubert": (50, 16),
    "xcodec2": (50, 64),
    "speechtokenizer": (50, 8),
    "encodec": (100, 16),
    "mimi": (12.5, 16),
    "dac": (75, 16),
    "speech_tokenizer_v1": (50, 32),
    "speech_tokenizer_v1_25hz": (25, 32),
    "speech_tokenizer_v2_25hz": (25, 6561),
}


def save_s3(name: str, codes: int, file: Path, monkeypatch) -> Path:
    needs("s3tokenizer", monkeypatch)
    from s3tokenizer import model, model_v2

    filters = torch.rand(16, 201, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("s3tokenizer.utils._mel_filters", lambda device, mels: filters)
    torch.manual_seed(0)
    sizes = {"n_mels": 16, "n_audio_state": 64, "n_audio_head": 1, "n_audio_layer": 2}
    if "v2" in name:
        network = model_v2.S3TokenizerV2(name, model_v2.ModelConfig(**sizes))
    else:
        network = model.S3Tokenizer(name, model.ModelConfig(**sizes, n_codebook_size=codes))
    torch.save(network.state_dict(), file)
    return file


def load(kind: str, folder: Path, monkeypatch) -> SpeechTokenizer:
    if kind in ("whisper", "hubert"):
        hubert = kind == "hubert" and shared_hubert(str(save_hubert(folder)), -1, "cpu")
        waves = [(chirp(2.0, s), 24_000) for s in range(2)]
        return KMeansTokenizer.fit(waves, hubert or WhisperEncoder(), vocab_size=16)
    if kind == "xcodec2":
        return load_tokenizer(f"xcodec2:{save_xcodec2(folder)}")
    if kind == "speechtokenizer":
        needs(kind, monkeypatch)
        return load_tokenizer(f"{kind}:{save_speechtokenizer(folder)}")
    if kind.startswith("speech_tokenizer"):
        file = save_s3(kind, RATES[kind][1], folder / "s3.pt", monkeypatch)
        other = "speech_tokenizer_v1" if "v2" in kind else "speech_tokenizer_v2_25hz"
        with pytest.raises(CheckpointError, match="another version's file"):
            load_tokenizer(f"s3:{other}@{file}")
        return load_tokenizer(f"s3:{kind}@{file}")
    return load_tokenizer(f"codec:{save_codec(kind, folder)}")


@pytest.mark.parametrize("kind", RATES)
def test_contract(kind, tmp_path, monkeypatch):
    tokenizer, (rate, codes) = load(kind, tmp_path, monkeypatch), RATES[kind]
    assert isinstance(tokenizer, SpeechTokenizer)
    assert (tokenizer.rate_hz, tokenizer.vocab_size) == (rate, codes)
    waves = [chirp(0.5, 3), chirp(0.5, 3)[:-1], chirp(0.03, 4)]
    found = tokenizer.encode(waves, 24_000)
    assert [len(c) for c in found] == [np.ceil(s * rate) for s in (0.5, 0.5, 0.03)]
    assert all(c.dtype == np.int64 and c.min() >= 0 and c.max() < codes for c in found)
    for batch_seconds in (0.0, 120.0):  # as on a CPU, and as on a GPU
        monkeypatch.setattr("dcar.tokens.base.CPU_BATCH_SECONDS", batch_seconds)
        for again in (tokenizer.encode(waves, 24_000), tokenizer.encode(waves[::-1], 24_000)[::-1]):
            for one, other in zip(again, found, strict=True):
                np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(tokenizer.encode(waves[2:], 24_000)[0], found[2])
    assert len(tokenizer.encode([chirp(1.0, 5, 8_000)], 8_000)[0]) == np.ceil(rate)
