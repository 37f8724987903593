"""Packaged models (digests, joining) and the k-means tokenizer on real whisper-base states of synthetic audio."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dcar.errors import AssetError, AudioError, CheckpointError, ConfigError
from dcar.fit_tokenizer import information, viterbi
from dcar.packages import PackagedFile, join_files, package_dir, verify_sha256
from dcar.text import text_to_ids
from dcar.tokenizers import SpeechTokenizer, WhisperKMeansTokenizer, load_tokenizer, token_count

RATE = 24_000


def chirp(seconds: float, seed: int, rate: int = RATE) -> np.ndarray:
    """A gliding buzz with syllable-like bursts: not speech, but it moves the encoder through many states."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate)) / rate
    pitch = 110 * 2 ** rng.uniform(0, 1) * (1 + 0.2 * np.sin(2 * np.pi * rng.uniform(0.5, 2) * t))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    wave = sum(np.sin(k * phase) * rng.uniform(0.1, 1) / k for k in range(1, 12))
    envelope = 0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(2, 5) * t + rng.uniform(0, 6))
    return (0.1 * wave * envelope + 0.003 * rng.standard_normal(len(t))).astype(np.float32)


@pytest.fixture(scope="module")
def tokenizer() -> WhisperKMeansTokenizer:
    return WhisperKMeansTokenizer.fit(((chirp(2.0, s), RATE) for s in range(2)), vocab_size=32, passes=3)


def test_rate_and_range(tokenizer: WhisperKMeansTokenizer) -> None:
    assert isinstance(tokenizer, SpeechTokenizer)
    waves = [chirp(1.0, 5), chirp(1.0, 5)[:-1], chirp(1.0, 5)[:481], np.full(1, 0.1, np.float32)]
    codes = tokenizer.encode(waves, RATE)
    assert [len(c) for c in codes] == [50, 50, 2, 1] == [token_count(len(w), RATE) for w in waves]
    assert all(c.dtype == np.int64 and c.min() >= 0 and c.max() < 32 for c in codes)
    assert len(tokenizer.encode([chirp(1.0, 5, 8000)], 8000)[0]) == 50


def test_batch_and_order_change_nothing(tokenizer: WhisperKMeansTokenizer) -> None:
    waves = [chirp(s, i) for i, s in enumerate((0.4, 0.9, 0.3))]
    together = tokenizer.encode(waves, RATE)
    backwards = tokenizer.encode(waves[::-1], RATE)[::-1]
    for wave, a, b in zip(waves, together, backwards, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, tokenizer.encode([wave], RATE)[0])


def test_save_load_and_fit_are_deterministic(tokenizer: WhisperKMeansTokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.checksum == tokenizer.checksum
    assert (loaded.name, loaded.vocab_size, loaded.rate_hz) == (tokenizer.name, 32, 50.0)
    wave = chirp(0.5, 9)
    np.testing.assert_array_equal(loaded.encode([wave], RATE)[0], tokenizer.encode([wave], RATE)[0])
    again = WhisperKMeansTokenizer.fit(((chirp(2.0, s), RATE) for s in range(2)), vocab_size=32, passes=3)
    assert again.checksum == tokenizer.checksum


def test_damaged_or_foreign_tokenizer_is_refused(tokenizer: WhisperKMeansTokenizer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="fit-tokenizer"):
        load_tokenizer(tmp_path / "absent")
    tokenizer.save_pretrained(tmp_path)
    card = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(card | {"encoder_sha256": "0" * 64}))
    with pytest.raises(CheckpointError, match="whisper-base"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(card | {"tail_seconds": 0.1}))
    with pytest.raises(CheckpointError, match="checksum"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="not a complete"):
        load_tokenizer(tmp_path)


def test_bad_audio_and_too_little_audio(tokenizer: WhisperKMeansTokenizer) -> None:
    good = chirp(0.2, 0)
    for bad, message in (
        (np.zeros(0, np.float32), "empty"),
        (np.where(np.arange(len(good)) == 7, np.nan, good), "NaN"),
        (np.stack([good, good]), "mono"),
        (np.zeros(30 * RATE, np.float32), "cut it"),
    ):
        with pytest.raises(AudioError, match=message):
            tokenizer.encode([bad], RATE)
    with pytest.raises(ConfigError, match="too few"):
        WhisperKMeansTokenizer.fit([(good, RATE)], vocab_size=512)


def test_digest_mismatch_and_missing_package_name_the_command(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"abc")
    with pytest.raises(AssetError, match="pip install it"):
        verify_sha256(part, "0" * 64, "pip install it")
    with pytest.raises(AssetError, match="pip install it"):
        join_files([part, part], tmp_path / "joined", "0" * 64, "pip install it")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part"]
    with pytest.raises(AssetError, match="pip install it"):
        package_dir("no_such_package_of_dcar", "pip install it")
    with pytest.raises(AssetError, match="pip install it"):
        PackagedFile("json", "no_such_file", None, "pip install it").locate()
    with pytest.raises(AssetError, match="SHA-256"):
        PackagedFile("json", "__init__.py", "0" * 64, "pip install it").locate()


def test_join_is_repaired_and_safe_with_several_writers(tmp_path: Path) -> None:
    parts = []
    for name in "ab":
        parts.append(tmp_path / name)
        parts[-1].write_bytes(name.encode() * 100_000)
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in parts)).hexdigest()
    target = tmp_path / "cache" / "whole"
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: join_files(parts, target, digest, ""), range(16))) == {target}
    target.write_bytes(b"cut")
    join_files(parts, target, digest, "")
    assert hashlib.sha256(target.read_bytes()).hexdigest() == digest
    assert [p.name for p in target.parent.iterdir()] == ["whole"]


def test_viterbi_finds_the_best_monotone_path() -> None:
    rng = np.random.default_rng(0)
    score, codes, sequence = rng.standard_normal((4, 5)), rng.integers(0, 5, 7), np.array([0, 2, 1])
    best = max(
        (
            np.repeat(sequence, [a, b, 7 - a - b])
            for a in range(1, 6)
            for b in range(1, 7 - a)
        ),
        key=lambda labels: score[labels, codes].sum(),
    )  # fmt: skip
    np.testing.assert_array_equal(viterbi(score, codes, sequence), best)


def test_information_tells_words_from_voices() -> None:
    """Codes made from the phonemes alone carry phoneme bits and no voice; codes of the voice alone the reverse."""
    rng = np.random.default_rng(0)
    vocabulary = "grandmother kept buttons who left door open please wipe boots glorious smell drifts cottage".split()
    texts = [text_to_ids(" ".join(rng.choice(vocabulary, 4))) for _ in range(80)]
    speakers = [f"s{rng.integers(4)}" for _ in texts]
    words = [np.repeat(t, rng.integers(1, 5, len(t))) % 64 for t in texts]
    voices = [
        np.full(len(w), 16 * int(s[1])) + rng.integers(0, 16, len(w)) for w, s in zip(words, speakers, strict=True)
    ]
    of_words, of_voices = (information(c, texts, speakers, 64) for c in (words, voices))
    assert of_words["phoneme_bits"] > of_words["phoneme_bits_wrong_text"] + 0.5
    assert of_words["speaker_bits"] < 0.2
    assert of_voices["speaker_bits"] > 1.5
    assert of_voices["speaker_bits_wrong_speaker"] < 0
