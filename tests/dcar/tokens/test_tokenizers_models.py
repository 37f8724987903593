"""HuBERT against transformers, k-means on its states, and files that are refused."""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_corpora import write_manifest
from tiny_pretrained import save_hubert
from tones import chirp

from dcar.errors import AssetError, AudioError, CheckpointError, ConfigError
from dcar.sources.hub import read_weights
from dcar.tokens.fit import FitTokenizerConfig, run
from dcar.tokens.hubert import HubertEncoder, parse_encoder, shared_hubert
from dcar.tokens.kmeans import KMeansTokenizer
from dcar.tokens.load import load_tokenizer

RATE = 16_000


@pytest.fixture(scope="module")
def hubert(tmp_path_factory) -> Path:
    return save_hubert(tmp_path_factory.mktemp("hubert"))


@pytest.fixture(scope="module")
def kmeans(hubert: Path) -> KMeansTokenizer:
    waves = [(chirp(2.0, s, RATE), RATE) for s in range(3)]
    return KMeansTokenizer.fit(
        waves, shared_hubert(str(hubert), -1, "cpu"), vocab_size=16, standardize=False
    )


def test_hubert_states_are_those_of_transformers(hubert):
    from transformers import AutoFeatureExtractor, HubertModel

    wave = chirp(0.5, 1, RATE)
    for layer in (-1, 1):
        encoder = HubertEncoder(hubert, layer)
        assert (encoder.stride, encoder.padding, encoder.rate_hz) == (320, 80, 50.0)
        model = HubertModel.from_pretrained(hubert).eval()
        extractor = AutoFeatureExtractor.from_pretrained(hubert)
        values = extractor(wave, sampling_rate=RATE, return_tensors="pt").input_values
        with torch.no_grad():
            states = model(
                torch.nn.functional.pad(values, (0, 80)), output_hidden_states=True
            ).hidden_states
        reference = states[-1] if layer == -1 else states[1]
        np.testing.assert_allclose(encoder(wave, RATE), reference[0].numpy(), atol=1e-4)
    with pytest.raises(AudioError, match="61.0 s .*60 s"):
        encoder(np.full(61 * RATE, 0.1, np.float32), RATE)


def test_hubert_of_a_relative_folder_is_found_from_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    waves = [(np.random.default_rng(0).normal(size=16_000).astype(np.float32), 16_000)] * 2
    encoder = HubertEncoder(save_hubert(Path("hubert")))
    KMeansTokenizer.fit(waves, encoder, vocab_size=16).save_pretrained("codes")
    shared_hubert.cache_clear()
    monkeypatch.chdir("/")
    assert load_tokenizer(tmp_path / "codes").vocab_size == 16
    shared_hubert.cache_clear()
    (tmp_path / "hubert").rename(tmp_path / "moved")
    with pytest.raises(AssetError, match="codes: .*`encoder` of .*tokenizer.json"):
        load_tokenizer(tmp_path / "codes")


@pytest.mark.parametrize("large", [True, False])
def test_hubert_batches_give_the_states_and_codes_of_single_waveforms(large, tmp_path, monkeypatch):
    """Where padding would change states, only equal lengths share a batch."""
    encoder = HubertEncoder(save_hubert(tmp_path, large=large))
    waves = [chirp(s, i, RATE) for i, s in enumerate((0.5, 0.31, 0.5, 1.2, 0.03, 0.5))]
    waves[2] = waves[2][:-1]  # as many frames as its neighbours
    sizes = []
    forward = encoder.model.forward

    def counted(values, *args, **kwargs):
        sizes.append(len(values))
        return forward(values, *args, **kwargs)

    monkeypatch.setattr(encoder.model, "forward", counted)
    encoder.batch(waves, RATE)
    assert sizes == [1] * 6  # on a CPU
    sizes.clear()
    monkeypatch.setattr("dcar.tokens.base.CPU_BATCH_SECONDS", 120.0)
    together = encoder.batch(waves, RATE)
    assert sizes == ([6] if large else [1, 1, 3, 1])
    alone = [encoder(wave, RATE) for wave in waves]
    for states, single in zip(together, alone, strict=True):
        np.testing.assert_allclose(states.numpy(), single, atol=1e-4)
    centroids = np.concatenate(alone)[::7]
    mean, scale = np.zeros(32, np.float32), np.ones(32, np.float32)
    codes = KMeansTokenizer(encoder, centroids, mean, scale).encode(waves, RATE)
    for found, single in zip(codes, alone, strict=True):
        nearest = ((single[:, None] - centroids) ** 2).sum(-1).argmin(1)
        np.testing.assert_array_equal(found, nearest)


def test_fit_command_on_a_sampled_share(hubert, tmp_path):
    manifest = write_manifest(
        tmp_path, 8 * [{"split": "train"}], [chirp(1.0, i, RATE) for i in range(8)]
    )
    config = FitTokenizerConfig(
        out=str(tmp_path / "out"),
        encoder=f"hubert:{hubert}@1",
        corpus="jsonl",
        path=str(manifest),
        vocab_size=8,
        sample_hours=6 / 3600,
        max_frames=150,
        standardize=False,
        report_utterances=0,
    )
    run(config)
    card = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert (card["type"], card["layer"], card["vocab_size"]) == ("hubert-kmeans", 1, 8)
    # half of the 300 states of six seconds, from all of them
    assert 100 < card["provenance"]["frames"] <= 150
    assert load_tokenizer(tmp_path / "out").checksum == card["checksum"]
    with pytest.raises(ConfigError, match=r"hubert:FOLDER_OR_NAME\[@LAYER\]"):
        parse_encoder("wav2vec:x")


def test_wrong_kmeans_for_the_encoder(kmeans, tmp_path):
    kmeans.save_pretrained(tmp_path / "tok")
    other = save_hubert(tmp_path / "other", seed=1)
    card = json.loads((tmp_path / "tok" / "tokenizer.json").read_text())
    for change, message in (
        ({"encoder": str(other)}, "SHA-256 .*other .*fit-tokenizer"),
        ({"layer": 1}, "checksum"),
        ({"layer": "last"}, "tokenizer.json "),
    ):
        (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps(card | change))
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(tmp_path / "tok")


def test_encoders_not_there_or_not_right(hubert, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    slow = save_hubert(tmp_path / "slow", rate=8000)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for error, message, source, *layer in (
        (AssetError, "absent: ", tmp_path / "absent"),
        (CheckpointError, "empty: .*HuBERT", tmp_path / "empty"),
        (CheckpointError, "slow: .*8000 Hz.*16000 Hz", slow),
        (ConfigError, "layer 7 .* 2", hubert, 7),
        (AssetError, "hf download nobody/hubert ", "nobody/hubert"),
    ):
        with pytest.raises(error, match=message):
            HubertEncoder(source, *layer)


def test_s3_without_the_package_or_the_file(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="speech_tokenizer_v9: .*speech_tokenizer_v1,"):
        load_tokenizer("s3:speech_tokenizer_v9")
    monkeypatch.setitem(sys.modules, "s3tokenizer", None)
    with pytest.raises(AssetError, match="pip install s3tokenizer"):
        load_tokenizer("s3:speech_tokenizer_v1")


def test_pickles_are_never_unpickled(tmp_path):
    """A weights file that would run code when unpickled is refused, and its code does not run."""

    class Trap:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"weight": Trap()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="model.pt: "):
        read_weights(tmp_path / "model.pt", "weights")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(AssetError, match="missing"):
        read_weights(tmp_path / "absent.pt", "weights")


@pytest.mark.parametrize("kind", ["pt", "legacy.pt", "safetensors"])
def test_damaged_weights_are_refused(kind, tmp_path):
    """Whatever byte is wrong: the libraries raise a dozen kinds of errors."""
    path, tensors = tmp_path / f"m.{kind}", {"weight": torch.ones(3)}
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "pt")
    whole, rng = np.frombuffer(path.read_bytes(), np.uint8), np.random.default_rng(0)
    cut = [whole[: rng.integers(len(whole))] for _ in range(20)]
    flipped = [np.where(rng.random(len(whole)) < 0.02, rng.integers(256), whole) for _ in range(40)]
    for data in (*cut, *flipped):
        path.write_bytes(data.astype(np.uint8).tobytes())
        with contextlib.suppress(CheckpointError):
            assert isinstance(read_weights(path, "weights"), dict)
